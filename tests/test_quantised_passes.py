"""Passes, verification and export of quantised checkpoints."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from collapse.analysis.channels import channels_of, narrow_channels
from collapse.analysis.experts import Experts, drop_experts, experts_of
from collapse.analysis.flops import cost
from collapse.analysis.layers import Layers, drop_layers, layer_lists
from collapse.analysis.traffic import element_bytes
from collapse.analysis.units import Channels
from collapse.checkpoint import Checkpoint
from collapse.dequantise import plain_tensors
from collapse.manifest import load_manifest
from collapse.options import Options
from collapse.passes.text_only import TextOnly
from collapse.passes.unread_weights import UnreadWeights
from collapse.passes.vocabulary import Vocabulary
from collapse.pipeline import export
from collapse.plan import DropLayers, IndexSet, Plan, Reroot, Skipped
from collapse.probe import probe
from collapse.rewrite.quantised import refusal
from collapse.schema import InputSchema
from collapse.source_model import load_plain
from collapse.trace import load_config, trace
from collapse.verdict import Verdict
from collapse.verify import verify
from tests.architectures import tiny_config
from tests.contexts import context_of
from tests.exported import SMALL, check, details
from tests.quantised_models import SIZES, WRITERS, save_quantised
from tests.test_quantised import dropping
from tests.tiny import PROVED, plan_for, samples, vocabulary
from tests.tiny import export as write

SCHEMES = tuple(WRITERS)
TEXT = dict(
    model_type="llama", vocab_size=52, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, hidden_size=32, intermediate_size=64,
)  # fmt: skip
HEAD_OF = {"fp8": "weight", "gptq": "qweight", "compressed-int4": "weight_packed", "nf4": "weight", "int8": "weight"}
OF_OTHERS = "no module of the model without quantisation claims it, but the scheme's own may"


@pytest.fixture(scope="module")
def traced():
    return trace(tiny_config("llama", **SIZES))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    @cache
    def make(scheme: str, **options):
        return save_quantised(scheme, tmp_path_factory.mktemp(scheme) / "source", **options)[0]

    return make


def context(checkpoint, program):
    """The graph is that of the plain model, whatever the scheme: only the names in files differ."""
    naming = replace(program.naming, scheme=checkpoint.quantisation.scheme)
    return context_of(checkpoint.root, program=replace(program, naming=naming))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_tensor_of_a_group_is_its_weight_and_none_is_unread(source, traced, scheme):
    checkpoint = source(scheme)
    found = context(checkpoint, traced)
    for group in checkpoint.quantisation.groups:
        assert {found.program.model_name(name) for name in group.members} == {group.weight}
    proposal = UnreadWeights().propose(found)
    assert not proposal.rewrites
    assert [s.reason for s in proposal.skipped] == [
        "every tensor in the files is claimed by a module and read by the traced graph"
    ]
    counted = cost(found.program, prompt=8, element_bytes=element_bytes(checkpoint, found.program))
    state_tensors = sum(info.nbytes for info in checkpoint.tensors.values())
    assert counted.bytes == state_tensors == checkpoint.weight_bytes
    assert counted.params == checkpoint.parameters(checkpoint.tensors)


def test_the_traced_program_knows_the_names_by_the_config_alone(source):
    checkpoint = source("gptq")
    program = trace(load_config(checkpoint), dynamic=False)
    assert program.model_name("model.layers.0.mlp.up_proj.qzeros") == "model.layers.0.mlp.up_proj.weight"
    assert program.model_name("model.layers.0.mlp.up_proj.qmeans") is None


def auxiliary(written):
    """A quantised head that no module claims, scales of a quantised cache, and a stray tensor of its own."""
    part = {n.rpartition(".")[2]: t.clone() for n, t in written.items() if n.startswith("model.layers.0.mlp.up_proj.")}
    head = {f"mtp.proj.{name}": tensor for name, tensor in part.items()}
    return head | {"model.layers.0.self_attn.k_scale": torch.ones(1), "old.table": torch.ones(3)}


@pytest.mark.parametrize("scheme", ["fp8", "awq", "compressed-fp8"])
def test_what_nothing_claims_goes_by_whole_weights(traced, scheme, tmp_path):
    checkpoint, _ = save_quantised(scheme, tmp_path / "source", extra=auxiliary)
    proposal = UnreadWeights().propose(context(checkpoint, traced))
    erased = {rewrite.site: rewrite.tensors for rewrite in proposal.rewrites}
    assert erased == {
        "mtp": tuple(sorted(n for n in checkpoint.tensors if n.startswith("mtp."))),
        "old": ("old.table",),
    }
    figures = next(rewrite for rewrite in proposal.rewrites if rewrite.site == "mtp").evidence.figures
    assert figures["parameters"] == 64 * 32
    assert [(s.site, s.reason) for s in proposal.skipped] == [("model.layers.0.self_attn.k_scale", OF_OTHERS)]
    out = write(checkpoint, plan_for(checkpoint, *proposal.rewrites), tmp_path / "out")
    assert not [name for name in out.tensors if name.startswith(("mtp", "old"))]


def test_a_weight_left_alone_of_its_own_kind_is_not_taken_apart(traced, tmp_path):
    """A quantised head that is a copy of nothing, and an embedding with equal bytes: no copy is found in halves."""

    def same(written):
        return {
            "model.embed_tokens." + n.rpartition("lm_head.")[2]: t.clone() for n, t in written.items() if "lm_head" in n
        }

    checkpoint, _ = save_quantised("int8", tmp_path / "source", head=True, extra=same, tie_word_embeddings=True)
    found = context(checkpoint, traced)
    assert found.tied_copies == {}
    assert not UnreadWeights().propose(found).rewrites


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [("gptq", "8 of its rows share a scale or word"), ("fp8", "16 of its rows share a scale or word"),
     ("compressed-int4", "its weight_shape holds the shape"),
     ("nf4", "its quant_state holds the shape, and its blocks run across rows")],
)  # fmt: skip
def test_a_quantised_head_keeps_its_rows(source, traced, scheme, reason):
    checkpoint = source(scheme, head=True)
    found = context(checkpoint, traced)
    assert found.token_tables == (f"lm_head.{HEAD_OF[scheme]}", "model.embed_tokens.weight")
    assert found.token_rows == 48
    proposal = Vocabulary().propose(found)
    assert not proposal.rewrites
    assert (
        proposal.skipped[0].reason
        == f"lm_head.{HEAD_OF[scheme]} is quantised, and its rows cannot go one by one: {reason}"
    )


def test_layers_are_found_and_dropped_by_their_names_in_the_files(source, traced):
    checkpoint = source("gptq")
    config = load_config(checkpoint)
    (layers,) = layer_lists(context(checkpoint, traced).program, checkpoint, config)
    assert isinstance(layers, Layers)
    rewrite = drop_layers(layers, [0, 2], checkpoint, config, PROVED, "layers")
    assert isinstance(rewrite, DropLayers)
    assert set(rewrite.tensors) == {name for name in checkpoint.tensors if name.startswith("model.layers.1.")}


MIXTURE = dict(num_local_experts=4, num_hidden_layers=2, num_key_value_heads=2)


@pytest.fixture(scope="module")
def mixture():
    return trace(tiny_config("mixtral", **SIZES, **MIXTURE), dynamic=False)


@pytest.mark.parametrize("scheme", ["fp8", "awq"])
def test_experts_of_a_mixture_go_as_groups(mixture, scheme, tmp_path):
    checkpoint, plain = save_quantised(scheme, tmp_path / "source", kind="mixtral", **MIXTURE)
    program = replace(mixture, naming=replace(mixture.naming, scheme=checkpoint.quantisation.scheme))
    config, kept = load_config(checkpoint), IndexSet.of([1, 2, 3])
    chosen = [(e, kept) for n in range(2) for e in experts_of(program, checkpoint, f"model.layers.{n}")]
    assert all(isinstance(experts, Experts) for experts, _ in chosen)
    rewrites = drop_experts(chosen, program, checkpoint, config, PROVED, "experts")
    assert not isinstance(rewrites, Skipped)
    out = write(checkpoint, plan_for(checkpoint, *rewrites), tmp_path / "out")
    assert out.config["num_local_experts"] == 3
    found, start = dict(plain_tensors(out)), chosen[0][0].prefix
    for name, tensor in found.items():
        number = name.removeprefix(start).partition(".")[0]
        origin = f"{start}{int(number) + 1}{name.removeprefix(start + number)}" if name.startswith(start) else name
        if name.startswith(start) or ("experts" not in name and "gate" not in name):
            assert torch.equal(tensor, plain[origin].float()), name
    load_plain(out)  # no size is another than the config's


def test_neurons_go_by_whole_blocks(source, traced, tmp_path):
    checkpoint = source("fp8")
    program, config = context(checkpoint, traced).program, load_config(checkpoint)
    neurons = [
        channels
        for n in range(3)
        for channels in channels_of(program, checkpoint, f"model.layers.{n}")
        if isinstance(channels, Channels) and channels.kind == "neurons"
    ]
    assert [channels.size for channels in neurons] == [64] * 3
    whole = narrow_channels([(c, range(16, 64)) for c in neurons], program, config, PROVED, "neurons")
    assert not isinstance(whole, Skipped) and refusal(checkpoint, whole) is None
    out = write(checkpoint, plan_for(checkpoint, *whole), tmp_path / "out")
    before, after = dict(plain_tensors(checkpoint)), dict(plain_tensors(out))
    for layer in range(3):
        up, down = (f"model.layers.{layer}.mlp.{name}_proj.weight" for name in ("up", "down"))
        assert torch.equal(after[up], before[up][16:]) and torch.equal(after[down], before[down][:, 16:])
    load_plain(out)
    torn = narrow_channels([(c, range(8, 64)) for c in neurons], program, config, PROVED, "neurons")
    assert not isinstance(torn, Skipped)
    assert "do not begin and end between blocks of 16" in str(refusal(checkpoint, torn))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_verifier_runs_both_sides_alike_and_says_how(source, scheme, tmp_path):
    checkpoint = source(scheme, idle=1)
    out = write(checkpoint, plan_for(checkpoint, dropping(checkpoint, 1)), tmp_path / "out").root
    verdict = verify(out, checkpoint, samples=samples(range(3, 48), 20, 9), settings=SMALL)
    assert verdict.status == "verified", details(verdict)
    figures = check(verdict, "logits: prefill").figures
    assert figures["bit_equal_positions"] == figures["positions"] > 0
    way = "transformers" if scheme == "fp8" else "reference"
    said = check(verdict, "quantised weights")
    assert (said.figures["source"], said.figures["output"]) == (way, way)
    assert said.figures["groups"] == len(checkpoint.quantisation.groups)


@pytest.mark.parametrize("scheme", ["fp8", "gptq"])
def test_a_dropped_layer_that_matters_is_refuted(source, scheme, tmp_path):
    checkpoint = source(scheme)
    out = write(checkpoint, plan_for(checkpoint, dropping(checkpoint, 1)), tmp_path / "out").root
    verdict = verify(out, checkpoint, samples=samples(range(3, 48), 20, 9), settings=SMALL)
    assert verdict.status == "refuted"
    assert not check(verdict, "logits: prefill").passed


def test_transformers_and_the_reference_read_fp8_alike(source, monkeypatch):
    checkpoint = source("fp8")
    theirs = load_plain(checkpoint)
    monkeypatch.setattr("collapse.source_model.way_of", lambda checkpoint: "reference")
    ours = load_plain(checkpoint)
    assert (theirs.way, ours.way) == ("transformers", "reference")
    left, right = theirs.model.state_dict(), ours.model.state_dict()
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


TOKENS = InputSchema(type="text", tokens=tuple(range(3, 40)), max_tokens=24)
QUICK = dict(prompts=2, new_tokens=4)


@pytest.mark.parametrize("scheme", ["fp8", "compressed-int4"])
def test_a_plan_is_exported_verified_and_probed(source, scheme, tmp_path):
    """An idle layer goes, rows of the plain token tables go, and graph, source and output agree."""
    checkpoint = source(scheme, idle=1)
    rows = vocabulary(range(40), "model.embed_tokens.weight", "lm_head.weight", size=48, config={"vocab_size": 40})
    plan = plan_for(checkpoint, dropping(checkpoint, 1), rows)
    plan = Plan.model_validate(plan.to_json() | {"schema": TOKENS.to_json(), "schema_digest": TOKENS.digest})
    result = export(checkpoint.root, tmp_path / "out", options=Options(**QUICK), plan=plan)
    verdict = Verdict(checks=result.report.verified.checks)
    assert verdict.status == "verified", details(verdict)
    assert {"quantised weights", "graph: prefill", "graph and source: cache"} <= {c.name for c in verdict.checks}
    assert check(verdict, "graph: prefill").figures["max_abs_diff"] <= 1e-5
    assert probe(result.output, "model.layers.1.*").status == "ERASED"
    assert probe(result.output, "model.layers.2.*").status == "ACTIVE"
    assert load_plain(Checkpoint.open(result.output)).model.config.num_hidden_layers == 2
    kept = load_manifest(result.output).kept
    assert kept.parameters == result.report.after.params
    assert kept.bytes == result.report.after.bytes


def test_the_text_model_of_a_quantised_multimodal_one(tmp_path):
    """Names in files, names in the model and names in the list of modules left alone are three kinds of names."""
    inside = "model.layers.1.mlp.down_proj"
    checkpoint, _ = save_quantised(
        "fp8", tmp_path / "source", kind="llava", excluded=f"language_model.{inside}", text_config=TEXT,
        listed=("lm_head", "model.vision_tower", "model.language_model." + inside.removeprefix("model.")),
    )  # fmt: skip
    tower = [group.main for group in checkpoint.quantisation.groups if "vision_tower" in group.main]
    assert tower
    options = Options(passes=("text-only", "unread-weights"), **QUICK)
    result = export(checkpoint.root, tmp_path / "out", TOKENS, options)
    (rooted,) = result.plan.rewrites
    assert isinstance(rooted, Reroot) and set(tower) < set(rooted.tensors)
    out = Checkpoint.open(result.output)
    assert out.config["quantization_config"]["modules_to_not_convert"] == ["lm_head", inside]
    assert out.tensors[f"{inside}.weight"].dtype == "F32"
    assert out.tensors["model.layers.0.mlp.down_proj.weight"].dtype == "F8_E4M3"
    model, keys = AutoModelForCausalLM.from_pretrained(out.root, dtype=torch.float32, output_loading_info=True)
    assert type(model).__name__ == "LlamaForCausalLM" and not keys["missing_keys"] and not keys["unexpected_keys"]


def test_an_expression_that_only_fits_the_multimodal_names_is_a_reason_to_decline(tmp_path):
    checkpoint, _ = save_quantised(
        "fp8", tmp_path / "source", kind="llava", text_config=TEXT,
        excluded="language_model.model.layers.1.mlp.up_proj",
        listed=("lm_head", r"model\.language_model\.layers\.1\.mlp\.up_proj"),
    )  # fmt: skip
    proposal = TextOnly().propose(context_of(checkpoint.root, TOKENS))
    assert not proposal.rewrites
    assert proposal.skipped[0].reason.startswith("quantised: quantization_config.modules_to_not_convert speaks of")
