"""Experts under a budget: those that no token needs go first, with their rows of the router and its correction."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from collapse import Options, export
from collapse.budget import parse_budgets
from collapse.errors import UnsupportedError
from collapse.manifest import load_manifest
from collapse.pipeline import make_plan
from collapse.plan import DropLayers, Narrow, Plan, Replace
from tests.test_export import LOG
from tests.test_shrink import source_of

NEVER = 2  # the expert that no token is sent to
FAR = -1e4  # of its score, beside scores of the order of one


def plan_of(source: Path, budget: str, *passes: str, layout: str = "native") -> Plan:
    return make_plan(source, LOG, Options(passes=passes, budgets=parse_budgets(budget), layout=layout)).plan


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source_of("mixtral", tmp_path_factory.mktemp("mixtral"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def unrouted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a GPT-OSS, whose routers have a bias, with one expert in each layer that is never chosen."""
    root = source_of("gpt_oss", tmp_path_factory.mktemp("gpt_oss"), num_hidden_layers=2)
    weights = load_file(root / "model.safetensors")
    for name in (name for name in weights if name.endswith("router.bias")):
        weights[name][NEVER] = FAR
    save_file(weights, root / "model.safetensors", metadata={"format": "pt"})
    return root


def expert_share(source: Path, marks: tuple[str, ...]) -> float:
    """Return the share of all parameters that one expert of every layer has, counted from the files."""
    weights = load_file(source / "model.safetensors")
    of_experts = sum(tensor.numel() for name, tensor in weights.items() if any(mark in name for mark in marks))
    return of_experts / 4 / sum(tensor.numel() for tensor in weights.values())


def test_an_expert_that_no_token_is_sent_to_goes_first_and_costs_nothing(unrouted: Path, tmp_path: Path) -> None:
    share = expert_share(unrouted, (".experts.", ".router."))
    options = Options(passes=("experts",), budgets=parse_budgets(f"params=-{100 * share - 1e-4:.4f}%"))
    result = export(unrouted, tmp_path / "out", LOG, options)
    assert result.report.verified.status == "verified"
    narrows = load_manifest(tmp_path / "out").plan.of_kind(Narrow)
    assert [set(range(4)) - set(one.kept) for one in narrows] == [{NEVER}, {NEVER}]
    figures = narrows[0].evidence.figures
    assert narrows[0].evidence.grade == "measured"
    assert figures["kl"] == pytest.approx(0, abs=1e-9) and figures["flips"] == 0
    assert figures["experts_lost"] == 2 and figures["params_share"] == pytest.approx(1 - share, abs=1e-6)
    before, after = (AutoModelForCausalLM.from_pretrained(one) for one in (unrouted, tmp_path / "out"))
    assert after.config.num_local_experts == 3
    assert after.model.layers[1].mlp.router.bias.shape == (3,)
    ids = torch.tensor([[5, 9, 30, 12, 7]])
    torch.testing.assert_close(before(ids).logits, after(ids).logits, rtol=0, atol=1e-5)


def test_experts_in_parts_go_and_the_rest_loads_anywhere(mixtral: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    share = expert_share(mixtral, (".experts.", ".gate."))
    options = Options(passes=("experts", "vocabulary"), budgets=parse_budgets(f"params=-{100 * share - 1e-4:.4f}%"))
    result = export(mixtral, out, LOG, options)
    assert result.report.verified.status == "verified"
    plan = load_manifest(out).plan
    assert [len(one.kept) for one in plan.of_kind(DropLayers)] == [3, 3]
    assert not plan.of_kind(Replace)  # nothing is fitted for experts alone
    model, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(loading[one] for one in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.num_local_experts == 3
    ids = torch.tensor([[5, 9, 30, 12]])
    found = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(found, model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False))
    held = model.get_input_embeddings().weight.shape[0]
    assert held < 900 and plan.of_kind(DropLayers)[0].evidence.figures["kl"] > 0


def test_experts_go_beside_blocks_and_groups(mixtral: Path, tmp_path: Path) -> None:
    passes = ("layers", "kv-groups", "experts")
    result = export(mixtral, tmp_path / "out", LOG, Options(passes=passes, budgets=parse_budgets("params=-18%")))
    assert result.report.verified.status == "verified"
    model, whole = (AutoModelForCausalLM.from_pretrained(one) for one in (tmp_path / "out", mixtral))
    assert sum(p.numel() for p in model.parameters()) <= 0.82 * sum(p.numel() for p in whole.parameters())
    figures = load_manifest(tmp_path / "out").plan.rewrites[0].evidence.figures
    assert len(model.model.layers) == 2 - figures["dropped_blocks"]
    assert model.config.num_local_experts == 4 - figures["experts_lost"] / len(model.model.layers)
    assert figures["dropped_blocks"] == 1 and figures["experts_lost"] == 2  # of the one layer that stays


def test_as_many_experts_stay_as_a_token_is_sent_to(mixtral: Path) -> None:
    share = expert_share(mixtral, (".experts.", ".gate."))
    plan = plan_of(mixtral, f"params=-{300 * share - 1e-3:.4f}%", "experts")
    assert plan.rewrites == ()
    assert [one.reason for one in plan.skipped] == ["experts alone cannot make it that small"]


def test_experts_save_no_flops_so_a_budget_of_flops_takes_none(mixtral: Path) -> None:
    plan = plan_of(mixtral, "flops=-10%", "experts")
    assert plan.rewrites == () and [one.pass_name for one in plan.skipped] == ["experts"]


def test_experts_stay_where_each_token_is_sent_to_all(tmp_path: Path) -> None:
    source = source_of("mixtral", tmp_path, num_hidden_layers=1, num_local_experts=2)
    plan = plan_of(source, "params=-10%", "experts")
    assert plan.rewrites == ()
    assert {one.reason for one in plan.skipped} == {"a token is sent to 2 of 2"}  # and nothing beside it


def test_experts_stay_where_the_router_chooses_groups_first(tmp_path: Path) -> None:
    source = source_of("deepseek_v3", tmp_path)
    plan = plan_of(source, "params=-5%", "experts")
    assert plan.rewrites == ()
    assert any("chooses groups first" in one.reason for one in plan.skipped)


def test_experts_that_cannot_be_ranked_stay_with_the_reason(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise UnsupportedError("its experts are called in another way", where="mlp.experts")

    monkeypatch.setattr("collapse.passes.shrink_experts.first_order.sweep", unknown)
    plan = plan_of(mixtral, "params=-5%", "experts")
    assert plan.rewrites == ()
    assert any("called in another way" in one.reason for one in plan.skipped)


def test_experts_stay_in_the_free_layout(mixtral: Path) -> None:
    plan = plan_of(mixtral, "params=-5%", "experts", layout="free")
    assert plan.rewrites == ()
    assert any("native layout only" in one.reason for one in plan.skipped)


def test_without_a_budget_all_experts_stay(mixtral: Path) -> None:
    plan = make_plan(mixtral, LOG, Options(passes=("experts",))).plan
    assert plan.rewrites == () and plan.skipped == ()


def test_a_model_without_experts_is_left_as_it_is(tmp_path: Path) -> None:
    plan = plan_of(source_of("llama", tmp_path), "params=-5%", "experts")
    assert plan.rewrites == ()


def test_two_searches_take_the_same_experts(mixtral: Path) -> None:
    first, second = (plan_of(mixtral, "params=-10%", "experts") for _ in range(2))
    assert first.digest == second.digest and first.rewrites
