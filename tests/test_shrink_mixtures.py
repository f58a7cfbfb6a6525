"""Mixtures of many shapes under a budget: shared experts, dense first layers, several steps, and what is left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from collapse import Options, export
from collapse.analysis.experts import needed
from collapse.budget import parse_budgets
from collapse.plan import DropLayers, Narrow, Plan
from tests import architectures
from tests.architectures import tiny_config
from tests.test_export import LOG
from tests.test_shrink import source_of
from tests.test_shrink_experts import plan_of

LONG = {"max_position_embeddings": 256}
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
HUNYUAN = {**SMALL, "head_dim": 4, "num_experts": 4, "moe_topk": 2, "pad_token_id": 0}
GRANITE = {**SMALL, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 12, "pad_token_id": 0}
MANY = 35  # experts a layer: they go by two at a time, but for the last, since a token is sent to two


def test_a_shared_expert_that_is_given_tokens_without_rows_is_narrowed(tmp_path: Path) -> None:
    source = source_of("qwen2_moe", tmp_path, num_hidden_layers=2, mlp_only_layers=[], **LONG)
    options = Options(passes=("neurons",), budgets=parse_budgets("params=-0.5%"))
    result = export(source, tmp_path / "out", LOG, options)
    assert result.plan.of_kind(Narrow) and result.report.verified.status == "verified"


def test_as_many_experts_stay_as_the_config_says_for_any_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(architectures.TABLE, "hunyuan_v1_moe", HUNYUAN)
    source = source_of("hunyuan_v1_moe", tmp_path, num_hidden_layers=2, moe_topk=[2, 2], **LONG)
    assert plan_of(source, "params=-15%", "experts").rewrites == ()


@pytest.mark.parametrize(
    ("name", "fields", "count"),
    [
        ("mixtral", {}, 2), ("mixtral", {"num_experts_per_tok": 3}, 3),
        ("ernie4_5_moe", {"moe_k": 6}, 6), ("deepseek_v3", {"index_topk": 2048}, 8),
    ],
)  # fmt: skip
def test_how_many_experts_a_token_is_sent_to(name: str, fields: dict[str, int], count: int) -> None:
    assert needed(AutoConfig.for_model(name, **fields)) == count


def test_experts_whose_tokens_are_not_seen_are_left_with_the_reason(tmp_path: Path) -> None:
    plan = plan_of(source_of("llama4_text", tmp_path, num_hidden_layers=2, **LONG), "params=-0.5%", "experts")
    assert plan.rewrites == ()
    assert any("which tokens its experts are given is not seen" in one.reason for one in plan.skipped)


def test_more_moves_reach_what_experts_alone_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(architectures.TABLE, "granitemoeshared", GRANITE)
    source = source_of("granitemoeshared", tmp_path, num_hidden_layers=2, **LONG)
    assert plan_of(source, "params=-25%", "experts", "neurons").rewrites


def test_neurons_that_no_config_can_say_do_not_keep_experts_from_going(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(architectures.TABLE, "hunyuan_v1_moe", {**HUNYUAN, "num_experts": 8})
    plan = plan_of(
        source_of("hunyuan_v1_moe", tmp_path, num_hidden_layers=2, **LONG), "params=-25%", "experts", "neurons"
    )
    assert plan.rewrites
    assert any(one.pass_name == "neurons" and "no edit of the config" in one.reason for one in plan.skipped)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense first layer, and two of a mixture, which hold more."""
    return source_of("deepseek_v3", tmp_path_factory.mktemp("d"), num_hidden_layers=3, n_group=1, **LONG)


def test_the_claim_is_of_the_counted_size(deepseek: Path) -> None:
    evidence = plan_of(deepseek, "params=-5%", "layers", "experts").rewrites[0].evidence
    less = 1 - float(evidence.figures["params_share"])
    assert evidence.claim.startswith(f"with {less:.1%} less parameters")


def test_blocks_are_priced_one_by_one(deepseek: Path) -> None:
    (dropped,) = plan_of(deepseek, "params=-14%", "layers").of_kind(DropLayers)
    assert len(dropped.kept) == 1


def test_experts_of_dropped_blocks_are_no_rewrites(deepseek: Path) -> None:
    plan = plan_of(deepseek, "params=-15%", "layers", "experts")  # that much only without both blocks of mixtures
    (dropped,) = plan.of_kind(DropLayers)
    assert dropped.site == "model.layers" and set(dropped.kept) == {0}
    assert not plan.of_kind(Narrow)
    assert "experts_lost" not in dropped.evidence.figures


def test_the_config_says_one_number_of_experts_in_either_spelling(tmp_path: Path) -> None:
    source = source_of("qwen3_moe", tmp_path, num_hidden_layers=2, **LONG)
    config = json.loads((source / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts")
    (source / "config.json").write_text(json.dumps(config))
    options = Options(passes=("experts",), budgets=parse_budgets("params=-0.5%"))
    export(source, tmp_path / "out", LOG, options)
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {value for name, value in after.items() if name in {"num_experts", "num_local_experts"}} == {3}


def test_a_shared_expert_may_be_as_wide_as_there_are_experts(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "mlp_only_layers": [], "shared_expert_intermediate_size": 4, **LONG}
    plan = plan_of(source_of("qwen2_moe", tmp_path, **sizes), "params=-0.5%", "experts")
    axes = {axis.tensor for one in plan.of_kind(Narrow) for axis in one.axes}
    assert axes == {f"model.layers.{n}.mlp.gate.weight" for n in range(2)}


def test_a_convolution_is_no_mixture(tmp_path: Path) -> None:
    plan = plan_of(source_of("lfm2_moe", tmp_path, num_hidden_layers=2, **LONG), "params=-0.5%", "experts")
    assert plan.rewrites
    assert not any("conv" in one.site for one in plan.rewrites)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 2, "num_local_experts": MANY, "intermediate_size": 8}
    return source_of("mixtral", tmp_path_factory.mktemp("many"), **sizes)


def without(source: Path, count: int) -> Plan:
    """Return the plan for a budget that just `count` experts of every layer meet."""
    weights = load_file(source / "model.safetensors")
    of_experts = sum(one.numel() for name, one in weights.items() if ".experts." in name or ".gate." in name)
    share = count / MANY * of_experts / sum(one.numel() for one in weights.values())
    return plan_of(source, f"params=-{100 * share - 1e-4:.4f}%", "experts")


def gone(plan: Plan) -> list[set[int]]:
    return [set(range(MANY)) - set(one.kept) for one in plan.of_kind(Narrow)]


def test_experts_go_a_sixteenth_at_a_time_and_never_come_back(many: Path) -> None:
    few, more = without(many, 4), without(many, 9)
    assert [len(one) for one in gone(few)] == [4, 4] and [len(one) for one in gone(more)] == [10, 10]
    assert all(less < further for less, further in zip(gone(few), gone(more), strict=True))
    figures = more.rewrites[0].evidence.figures
    assert [point.partition(":")[0] for point in str(figures["path"]).split("; ")] == [
        "without 12 experts",  # of both layers: halfway to the budget, three steps of two in each
        "without 20 experts",
    ]
    assert figures["experts_lost"] == 20 and figures["dropped_blocks"] == 0


def test_the_last_step_takes_no_more_experts_than_may_go(many: Path) -> None:
    most = MANY - needed(tiny_config("mixtral"))
    assert most % 2  # so that the last step is a shorter one
    assert [len(one) for one in gone(without(many, most))] == [most, most]
