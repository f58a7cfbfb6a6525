"""Narrower native models within a budget: what goes, what is refitted, and that every way to the result agrees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from collapse import Options, export, load
from collapse.budget import parse_budgets
from collapse.manifest import load_manifest
from collapse.pipeline import make_plan
from collapse.plan import DropLayers, Narrow, Plan, Replace
from collapse.search.measure import Judge
from tests.architectures import save_tiny
from tests.test_export import LOG, save_tokenizer

SIZES = dict(num_hidden_layers=3, vocab_size=900, max_position_embeddings=512)
MOVES = ("layers", "kv-groups", "neurons")
IDLE_NEURONS = (3, 8, 21)


def source_of(kind: str, root: Path, **sizes: int) -> Path:
    found = save_tiny(kind, root / "tiny", bos_token_id=0, eos_token_id=1, **{**SIZES, **sizes})
    save_tokenizer(found)
    return found


def idle_llama(folder: Path) -> Path:
    """Write a Llama of which some neurons of every block do nothing."""
    root = source_of("llama", folder)
    weights = load_file(root / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("up_proj.weight"):
            tensor[list(IDLE_NEURONS)] = 0
    save_file(weights, root / "model.safetensors", metadata={"format": "pt"})
    return root


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return idle_llama(tmp_path_factory.mktemp("llama"))


def plan_of(source: Path, budget: str, *passes: str) -> Plan:
    return make_plan(source, LOG, Options(passes=passes or MOVES, budgets=parse_budgets(budget))).plan


def test_idle_neurons_go_first_and_cost_nothing(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    neurons = len(weights["model.layers.0.mlp.up_proj.weight"])
    unit = sum(tensor.numel() for name, tensor in weights.items() if ".mlp." in name) / neurons
    total = sum(tensor.numel() for tensor in weights.values())
    share = len(IDLE_NEURONS) * unit / total
    plan = plan_of(llama, f"params=-{100 * share - 1e-4:.4f}%", "neurons")
    narrows = plan.of_kind(Narrow)
    assert {frozenset(range(neurons)) - frozenset(one.kept) for one in narrows} == {frozenset(IDLE_NEURONS)}
    assert len(narrows) == 3
    (replaced,) = plan.of_kind(Replace)
    assert sorted(replaced.tensors) == [f"model.layers.{n}.mlp.down_proj.weight" for n in range(3)]
    assert replaced.evidence.grade == "measured"
    assert replaced.evidence.figures["kl"] == pytest.approx(0, abs=1e-5)
    assert replaced.evidence.figures["params_share"] == pytest.approx(1 - share, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "budget", "passes"),
    [
        ("llama", "flops=-15%", ("neurons",)),
        ("llama", "flops=-8%", ("kv-groups",)),
        ("llama", "decode=-20%", MOVES),
        ("qwen2", "flops=-15%", ("neurons", "kv-groups")),
        ("gemma3_text", "flops=-10%", ("neurons",)),
        ("gpt2", "flops=-10%", ("neurons",)),
    ],
)
def test_a_narrower_model_is_verified_and_loads_anywhere(
    kind: str, budget: str, passes: tuple[str, ...], tmp_path: Path
) -> None:
    source, out = source_of(kind, tmp_path), tmp_path / "out"
    options = Options(passes=(*passes, "vocabulary"), budgets=parse_budgets(budget))
    result = export(source, out, LOG, options)
    assert result.report.verified.status == "verified"
    metric, limit = budget.split("=-")
    manifest = load_manifest(out)
    evidence = manifest.plan.of_kind(Replace)[0].evidence
    assert evidence.figures[f"{metric}_share"] <= 1 - float(limit.rstrip("%")) / 100
    assert evidence.grade == "measured"
    model, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    ids = torch.tensor([[5, 9, 30, 12]])
    found = model.generate(ids, max_new_tokens=6, do_sample=False)
    again = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False)
    assert torch.equal(found, again)


def test_blocks_and_neurons_go_together(llama: Path, tmp_path: Path) -> None:
    result = export(llama, tmp_path / "out", LOG, Options(passes=MOVES, budgets=parse_budgets("flops=-35%")))
    plan = load_manifest(tmp_path / "out").plan
    assert result.report.verified.status == "verified"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    gone = sum(one.size - len(one.kept) for one in plan.of_kind(DropLayers))
    assert len(model.model.layers) == 3 - gone
    whole = AutoModelForCausalLM.from_pretrained(llama).config.intermediate_size
    widths = {len(one.kept) for one in plan.of_kind(Narrow) if one.pass_name == "neurons"}
    assert gone or widths
    assert (widths or {whole}) == {model.config.intermediate_size}


def test_a_budget_that_nothing_meets_changes_nothing(llama: Path) -> None:
    plan = plan_of(llama, "kl<=0.000001")
    assert plan.rewrites == ()
    assert any("breaks the budget" in one.reason or "too much to be judged" in one.reason for one in plan.skipped)


def test_without_a_budget_no_weight_is_computed(llama: Path) -> None:
    plan = make_plan(llama, LOG, Options(passes=MOVES)).plan
    assert plan.rewrites == () and plan.skipped == ()


def test_one_key_value_head_is_left_alone_with_the_reason(tmp_path: Path) -> None:
    source = source_of("llama", tmp_path, num_key_value_heads=1)
    plan = plan_of(source, "params=-10%", "kv-groups")
    assert plan.rewrites == ()
    assert "each block has only one" in {one.reason for one in plan.skipped if one.pass_name == "kv-groups"}


def test_two_plans_of_one_source_are_equal(llama: Path) -> None:
    first, second = (plan_of(llama, "params=-12%", "neurons") for _ in range(2))
    assert first.digest == second.digest


@pytest.mark.parametrize(("kind", "passes"), [("llama", ("neurons", "kv-groups")), ("gemma3_text", ("neurons",))])
def test_in_the_free_layout_each_block_has_its_own_size(kind: str, passes: tuple[str, ...], tmp_path: Path) -> None:
    source, out = source_of(kind, tmp_path), tmp_path / "out"
    weights = load_file(source / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.1.mlp.down_proj.weight"))
    weights[name] *= 1e-3  # the neurons of one block hardly matter
    for norm in (name for name in weights if name.endswith("layers.1.post_feedforward_layernorm.weight")):
        weights[norm] = weights[norm] * 0 - 0.999  # Gemma's norms add one, and would make it as large as before
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    options = Options(passes=passes, budgets=parse_budgets("flops=-12%"), layout="free")
    result = export(source, out, LOG, options)
    assert result.report.verified.status == "verified"
    plan = load_manifest(out).plan
    assert plan.layout == "free"
    sizes = {one.site: len(one.kept) for one in plan.of_kind(Narrow) if one.pass_name == "neurons"}
    assert min(sizes, key=lambda site: sizes[site]).endswith("layers.1.mlp")
    assert len(sizes) < 3 or len(set(sizes.values())) > 1  # blocks that keep all have no rewrite
    assert plan.of_kind(Replace)[0].evidence.figures["flops_share"] <= 0.88
    model = load(out, guard="off")
    ids = torch.tensor([[5, 9, 30, 12]])
    found = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(found, model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False))


def test_blocks_stay_whole_in_the_free_layout(llama: Path) -> None:
    plan = make_plan(llama, LOG, Options(passes=("layers",), budgets=parse_budgets("params=-5%"), layout="free")).plan
    assert plan.rewrites == ()
    assert any("native layout only" in one.reason for one in plan.skipped)


def test_what_judges_is_the_model_as_its_files_hold_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a model of bfloat16 the fitted tensors are rounded; losses of anything finer would be another model's."""
    source = source_of("llama", tmp_path)
    weights = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    judged: list[torch.Tensor] = []
    losses = Judge.losses

    def watched(judge, smaller, *rest):
        judged.extend(tensor for name, tensor in smaller.named_parameters() if name.endswith("down_proj.weight"))
        return losses(judge, smaller, *rest)

    monkeypatch.setattr(Judge, "losses", watched)
    options = Options(passes=("neurons",), budgets=parse_budgets("params=-5%"))
    make_plan(source, LOG, options, save=tmp_path / "plan.json")
    written = load_file(tmp_path / "plan.safetensors")
    assert len(judged) == len(written) == 3
    for tensor, stored in zip(judged, (written[name] for name in sorted(written)), strict=True):
        assert stored.dtype == torch.bfloat16 and torch.equal(tensor, stored.float())
