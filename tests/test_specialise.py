"""Config switches that the bound on length decides: when they go, when they must stay, and that nothing changes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3Config

from collapse.analysis.config_switches import Switch, length_switches
from collapse.analysis.soft_cap import head_of, is_inert, largest_logit, soft_cap
from collapse.checkpoint import Checkpoint
from collapse.erase import write_checkpoint
from collapse.errors import UnsupportedError
from collapse.options import Options
from collapse.passes import specialise
from collapse.passes.base import Context, Proposal
from collapse.passes.specialise import Specialise, edited_config
from collapse.pipeline import export, prepare
from collapse.plan import Skipped
from collapse.program import Program
from collapse.progress import Stopwatch
from collapse.schema import InputSchema
from collapse.sequences import Sequences
from collapse.trace import trace
from tests.architectures import save_tiny, tiny_config
from tests.contexts import context_of
from tests.tiny import plan_for

FULL, SLIDING = "full_attention", "sliding_attention"
SAME_ROPE = {"rope_parameters": {k: {"rope_type": "default", "rope_theta": 10000.0} for k in (FULL, SLIDING)}}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
PHI3 = tiny_config("phi3").rope_parameters
SHORT = {**PHI3, "long_factor": PHI3["short_factor"]}
ONES = {**PHI3, "short_factor": [1.0, 1.0]}
DYNAMIC = {
    "num_hidden_layers": 1, "max_position_embeddings": 4,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
}  # fmt: skip

# (kind, changes of the tiny config, the longest sequence that notices nothing, the edit)
TAKEN = {
    "mistral": ("mistral", {}, 4, {"sliding_window": None}),
    "qwen2": ("qwen2", {}, 4, {"layer_types": [FULL] * 2, "sliding_window": None, "use_sliding_window": False}),
    "gemma2": ("gemma2", {}, 4, {"layer_types": [FULL] * 2}),
    "gemma3": ("gemma3_text", {"sliding_window": 4, **SAME_ROPE}, 4, {"layer_types": [FULL] * 3}),
    "longrope": ("phi3", {}, 4, {"rope_parameters": SHORT}),
    "plain longrope": ("phi3", {"rope_parameters": {**ONES, "attention_factor": 1.0}}, 4, {"rope_parameters": PLAIN}),
    "scaled longrope": ("phi3", {"rope_parameters": ONES}, 4, {"rope_parameters": {**ONES, "long_factor": [1.0, 1.0]}}),
    "dynamic": ("llama", DYNAMIC, 4, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
}  # fmt: skip


@cache
def program_of(kind: str, changes: str) -> Program:
    return trace(tiny_config(kind, **eval(changes)))


def context(root: Path, kind: str, max_tokens: int | None, changes: dict) -> Context:
    schema = InputSchema(type="text", tokens=tuple(range(48)), max_tokens=max_tokens)
    drawn = Sequences(((1, 2),), ((1, 2),))
    saved = root / "config.json"
    if not saved.exists():
        save_tiny(kind, root, **changes)
    return context_of(root, schema, drawn=drawn, program=program_of(kind, repr(changes)))


def propose(root: Path, kind: str, max_tokens: int | None, changes: dict) -> Proposal:
    return Specialise().propose(context(root, kind, max_tokens, changes))


def decoded(model, ids: torch.Tensor, past: int) -> torch.Tensor:
    with torch.no_grad():
        held = model(input_ids=ids[:, :past], use_cache=True).past_key_values if past else None
        return model(input_ids=ids[:, past:], past_key_values=held, use_cache=True).logits


def load(root: Path):
    return AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32).eval()


@pytest.mark.parametrize("case", TAKEN)
def test_an_edit_is_taken_up_to_the_reach_and_the_reloaded_model_computes_the_same(tmp_path, case):
    kind, changes, reach, edit = TAKEN[case]
    proposal = propose(tmp_path, kind, reach, changes)
    (rewrite,) = proposal.rewrites
    assert (rewrite.config, rewrite.evidence.grade, rewrite.max_tokens) == (edit, "proved", reach)
    checkpoint, output = Checkpoint.open(tmp_path), tmp_path / "out"
    output.mkdir()
    write_checkpoint(checkpoint, plan_for(checkpoint, rewrite), output)
    before, after = load(tmp_path), load(output)
    ids = torch.randint(2, 48, (2, reach), generator=torch.Generator().manual_seed(1))
    for total in range(1, reach + 1):
        for past in range(total):
            expected = decoded(before, ids[:, :total], past)
            torch.testing.assert_close(decoded(after, ids[:, :total], past), expected, rtol=1.3e-6, atol=1e-5)
            if total < reach:  # at the window's own length transformers leaves out the full mask, not the sliding one
                assert torch.equal(decoded(after, ids[:, :total], past), expected)


@pytest.mark.parametrize("case", TAKEN)
def test_inputs_of_one_token_more_keep_the_switch(tmp_path, case):
    kind, changes, reach, _ = TAKEN[case]
    proposal = propose(tmp_path, kind, reach + 1, changes)
    assert proposal.rewrites == ()
    assert f"which inputs of {reach + 1} tokens notice" in proposal.skipped[0].reason
    assert proposal.skipped[0].figures["max_tokens"] == reach + 1


@pytest.mark.parametrize("case", TAKEN)
def test_a_schema_without_a_bound_keeps_the_switch(tmp_path, case):
    kind, changes, _, _ = TAKEN[case]
    proposal = propose(tmp_path, kind, None, changes)
    assert proposal.rewrites == ()
    assert "the schema gives no max_tokens" in proposal.skipped[0].reason


@pytest.mark.parametrize("total", [3, 4, 5])
def test_the_sliding_cache_of_transformers_agrees_up_to_the_window_and_not_beyond(tmp_path, total):
    save_tiny("mistral", tmp_path / "sliding")
    save_tiny("mistral", tmp_path / "full", sliding_window=None)
    windowed, full = load(tmp_path / "sliding"), load(tmp_path / "full")
    ids = torch.randint(2, 48, (1, total), generator=torch.Generator().manual_seed(2))
    for past in range(total):
        close = torch.allclose(decoded(windowed, ids, past), decoded(full, ids, past), rtol=1.3e-6, atol=1e-5)
        assert close == (total <= 4)


def test_sliding_layers_with_frequencies_of_their_own_stay(tmp_path):
    proposal = propose(tmp_path, "gemma3_text", 4, {})
    assert proposal.rewrites == ()
    assert "rotary frequencies of their own" in proposal.skipped[0].reason


def test_a_model_without_switches_says_so(tmp_path):
    proposal = propose(tmp_path, "llama", 4, {})
    assert proposal.rewrites == ()
    assert [s.reason for s in proposal.skipped] == ["no switch of the config depends on the schema"]


def planted(monkeypatch, *edits) -> None:
    switch = Switch("sliding_window", "planted", 100, tuple(edits), {})
    monkeypatch.setattr(specialise, "length_switches", lambda config, written: (switch,))


def test_a_wrong_edit_is_not_proved(tmp_path, monkeypatch):
    planted(monkeypatch, {"sliding_window": 3})
    proposal = propose(tmp_path, "mistral", 4, {})
    assert proposal.rewrites == ()
    assert proposal.skipped[0].reason.startswith("not proved to change nothing: ")


def test_an_edit_that_changes_tensors_is_not_proved(tmp_path, monkeypatch):
    planted(monkeypatch, {"sliding_window": None, "intermediate_size": 20})
    assert "has other tensors" in propose(tmp_path, "mistral", 4, {}).skipped[0].reason


def test_an_edit_that_the_config_class_refuses_is_passed_over(tmp_path, monkeypatch):
    planted(monkeypatch, {"num_hidden_layers": "many"}, {"sliding_window": None})
    (rewrite,) = propose(tmp_path, "mistral", 4, {}).rewrites
    assert rewrite.config == {"sliding_window": None}
    planted(monkeypatch, {"num_hidden_layers": "many"})
    assert "the edited config is not accepted" in propose(tmp_path, "mistral", 4, {}).skipped[0].reason


def test_older_fields_are_replaced_by_those_of_today(tmp_path):
    written = {"rope_theta": 10000.0, "rope_scaling": {"type": "longrope"}}
    (switch,) = length_switches(tiny_config("phi3"), written)
    assert switch.edits == ({"rope_parameters": SHORT, "rope_scaling": None},)
    edited = edited_config(tiny_config("phi3"), {**tiny_config("phi3").to_dict(), **switch.edits[0]})
    assert edited.rope_parameters["long_factor"] == edited.rope_parameters["short_factor"]


def test_edits_of_a_nested_text_config_are_dotted_paths():
    config = Gemma3Config(text_config={"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "sliding_window": 8})
    (switch,) = length_switches(config, config.to_dict())
    assert (switch.site, switch.reach) == ("text_config.sliding_window", 8)
    assert {"text_config.layer_types": [FULL, FULL]} in switch.edits


def test_a_config_class_says_why_it_refuses(tmp_path):
    with pytest.raises(UnsupportedError, match="num_hidden_layers"):
        edited_config(tiny_config("llama"), {"num_hidden_layers": "many"})


def shrunk(root: Path, factor: float) -> None:
    model = load(root)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(factor)  # the head is tied to it; a norm follows the embedding
    model.save_pretrained(root)


def caps(proposal: Proposal) -> dict[str, Skipped]:
    return {skipped.site: skipped for skipped in proposal.skipped if "softcapping" in skipped.site}


def test_soft_caps_of_a_usual_model_are_near_misses_with_figures(tmp_path):
    proposal = propose(tmp_path, "gemma2", 5, {})
    assert proposal.rewrites == ()
    final = caps(proposal)["final_logit_softcapping"]
    assert final.figures["cap"] == 30.0
    assert final.figures["largest_logit"] > 1
    assert caps(proposal)["attn_logit_softcapping"].figures == {"cap": 50.0}


def test_no_logit_exceeds_the_bound_and_some_come_near(tmp_path):
    given = context(tmp_path, "gemma2", 5, {})
    capped = soft_cap(given.program)
    head = head_of(given.program, capped.logits)
    bound = largest_logit(given.program, given.checkpoint, head)
    assert (head.gain, head.offset) == ("model.norm.weight", 1.0)
    model = load(tmp_path)
    gain = 1 + model.model.norm.weight.double()
    rows = model.lm_head.weight.double() * gain
    longest = rows[rows.norm(dim=1).argmax()]
    with torch.no_grad():  # the state that the longest row likes best: the bound is reached but for eps and rounding
        logits = model.lm_head(model.model.norm(longest.float() * 1e3))
    assert 0.99 * bound < float(logits.abs().max()) <= bound


def test_a_cap_that_no_logit_comes_near_goes(tmp_path):
    context(tmp_path, "gemma2", 5, {})
    shrunk(tmp_path, 1e-3)
    (rewrite,) = propose(tmp_path, "gemma2", 5, {}).rewrites
    assert rewrite.config == {"final_logit_softcapping": None}
    assert rewrite.evidence.figures["largest_logit"] < 0.05
    assert rewrite.evidence.grade == "proved"


def test_a_cap_is_inert_up_to_half_of_the_tolerance():
    cap = 30.0
    at = (3 * cap**2 * 0.5e-5) ** (1 / 3)  # |x|^3 / (3 cap^2) = 0.5e-5
    assert is_inert(at, cap)
    assert not is_inert(at * 1.1, cap)
    x = torch.linspace(-at, at, 1001, dtype=torch.float64)
    assert float((x - cap * torch.tanh(x / cap)).abs().max()) <= 0.5e-5


@pytest.mark.parametrize(("kind", "changes"), [
    ("phi3", {"original_max_position_embeddings": 16, "max_position_embeddings": 32}),
    ("llama", {**DYNAMIC, "max_position_embeddings": 16}),
    ("mistral", {"sliding_window": 16}),
])  # fmt: skip
def test_an_export_is_verified_with_continuations_up_to_the_bound(tmp_path, kind, changes):
    save_tiny(kind, tmp_path / "source", **changes)
    schema = {"type": "text", "tokens": list(range(48)), "max_tokens": 16, "workload": {"prompt": 8, "new": 4}}
    result = export(tmp_path / "source", tmp_path / "out", schema, Options(passes=("specialise",), prompts=2))
    (rewrite,) = result.plan.rewrites
    written = Checkpoint.open(tmp_path / "out").config
    assert {field: written[field] for field in rewrite.config} == rewrite.config


def test_inputs_beyond_the_length_of_growing_frequencies_are_refused_by_name(tmp_path):
    save_tiny("llama", tmp_path, **DYNAMIC)
    schema = InputSchema(type="text", tokens=tuple(range(48)), max_tokens=5)
    with pytest.raises(UnsupportedError, match="grow beyond 4 tokens.*max_tokens of at most 4"):
        prepare(Checkpoint.open(tmp_path), schema, Options(), Stopwatch(quiet=True))
