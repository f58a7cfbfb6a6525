"""Maps in place of sublayers within a budget: what is chosen and fitted, and that every way to the result agrees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from collapse import Options, export, load
from collapse.analysis.layers import layer_lists
from collapse.budget import parse_budgets
from collapse.checkpoint import Checkpoint
from collapse.manifest import load_manifest
from collapse.pipeline import make_plan
from collapse.plan import Plan, StandIn
from collapse.search.calls import watched
from collapse.search.maps import Fit, MapKind
from collapse.search.places import Places, places_of
from collapse.search.sweep import Sweep, Swept
from collapse.search.units import Units, units_of
from collapse.trace import load_config, trace
from tests.architectures import tiny_model
from tests.quantised_models import save_quantised
from tests.shared import SHARED, needs_shared
from tests.test_export import LOG
from tests.test_shrink import source_of

MOVES = ("sublayers", "stand-in")
LINEAR = MapKind("linear")


def edited(source: Path, *endings: str, by: float = 0.0) -> Path:
    """Scale the tensors whose names end so."""
    weights = load_file(source / "model.safetensors")
    names = [name for name in weights if name.endswith(endings)]
    assert len(names) == len(endings)
    for name in names:
        weights[name] *= by
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    return source


def options(budget: str, *passes: str, layout: str = "free") -> Options:
    return Options(passes=passes, budgets=parse_budgets(budget) if budget else (), layout=layout)


def plan_of(source: Path, budget: str, *passes: str, layout: str = "free") -> Plan:
    return make_plan(source, LOG, options(budget, *passes, layout=layout)).plan


def maps_of(plan: Plan) -> dict[str, str]:
    return {one.site: one.by for one in plan.of_kind(StandIn)}


def same_with_cache(out: Path) -> None:
    model, ids = load(out, guard="off"), torch.tensor([[5, 9, 30, 12]])
    greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **greedy), model.generate(ids, use_cache=False, **greedy))


@pytest.mark.parametrize(
    ("kind", "budget", "passes"),
    [
        ("llama", "flops=-25%", ("stand-in",)),
        ("gpt2", "flops=-30%", (*MOVES, "neurons")),
        ("gemma3_text", "flops=-25%", MOVES),
        ("qwen3", "decode=-25%", (*MOVES, "neurons", "kv-groups", "vocabulary")),
    ],
)
def test_a_model_with_maps_is_verified_and_generates(
    kind: str, budget: str, passes: tuple[str, ...], tmp_path: Path
) -> None:
    source, out = source_of(kind, tmp_path), tmp_path / "out"
    result = export(source, out, LOG, options(budget, *passes))
    assert result.report.verified.status == "verified"
    plan = load_manifest(out).plan
    assert maps_of(plan)
    evidence = plan.of_kind(StandIn)[0].evidence
    metric, limit = budget.split("=-")
    assert evidence.grade == "measured"
    assert evidence.figures[f"{metric}_share"] <= 1 - float(limit.rstrip("%")) / 100
    same_with_cache(out)


@pytest.mark.parametrize("blocks", [(0, 2), (1,)])
def test_attentions_that_do_nothing_go_with_their_cache(blocks: tuple[int, ...], tmp_path: Path) -> None:
    """The first and the last one, or the middle one; the norms before them, which then are for nothing, go too."""
    source = edited(source_of("llama", tmp_path), *(f"{block}.self_attn.o_proj.weight" for block in blocks))
    result = export(source, tmp_path / "out", LOG, options(f"params=-{3.6 * len(blocks):.1f}%", "sublayers"))
    assert result.report.verified.status == "verified"
    plan = load_manifest(tmp_path / "out").plan
    norms = {f"model.layers.{block}.input_layernorm" for block in blocks}
    assert maps_of(plan).keys() == norms | {f"model.layers.{block}.self_attn" for block in blocks}
    assert {maps_of(plan)[norm] for norm in norms} == {"zero"}
    figures = plan.rewrites[0].evidence.figures
    assert figures["kl"] == pytest.approx(0, abs=1e-6) and figures["maps"] == len(blocks)
    assert {one.pass_name for one in plan.rewrites} == {"sublayers"}
    before, after = result.report.before, result.report.after
    assert after.kv_bytes_per_token == before.kv_bytes_per_token * (3 - len(blocks)) / 3
    assert before.params - after.params >= len(blocks) * (16 * 16 * 2 + 16 * 8 * 2)
    same_with_cache(tmp_path / "out")


def test_a_feed_forward_that_adds_little_gets_a_map(tmp_path: Path) -> None:
    source = edited(source_of("gpt2", tmp_path), "h.1.mlp.c_proj.weight", "h.1.mlp.c_proj.bias", by=1e-2)
    plan = plan_of(source, "params=-5.5%", "stand-in")
    assert maps_of(plan).keys() == {"transformer.h.1.mlp"} and plan.rewrites[0].by in {"linear", "low-rank"}
    assert plan.rewrites[0].evidence.figures["kl"] == pytest.approx(0, abs=1e-4)
    assert plan.rewrites[0].pass_name == "stand-in"


def test_within_a_budget_of_losses_a_map_is_certified(tmp_path: Path) -> None:
    source = edited(source_of("llama", tmp_path), "1.self_attn.o_proj.weight")
    plan = plan_of(source, "kl<=0.02", "sublayers")
    assert maps_of(plan).keys() >= {"model.layers.1.self_attn", "model.layers.1.input_layernorm"}
    (evidence,) = {one.evidence.model_dump_json(): one.evidence for one in plan.rewrites}.values()
    assert evidence.grade == "certified"
    assert 0 < evidence.figures["kl_at_most"] <= 0.02
    assert evidence.figures["path"].startswith("with 1 map: KL 0.0000")


def test_one_attention_stays_where_all_do_nothing(tmp_path: Path) -> None:
    source = edited(source_of("llama", tmp_path), *(f"{block}.self_attn.o_proj.weight" for block in range(3)))
    plan = plan_of(source, "params=-7.2%", "sublayers")
    gone = [site for site in maps_of(plan) if site.endswith("self_attn")]
    assert len(gone) == 2
    assert plan.rewrites[0].evidence.figures["kl"] == pytest.approx(0, abs=1e-6)


def test_without_a_budget_nothing_is_computed(tmp_path: Path) -> None:
    plan = plan_of(source_of("llama", tmp_path), "", *MOVES)
    assert plan.rewrites == () and plan.skipped == ()


def test_the_native_layout_has_no_maps_and_says_what_it_has(tmp_path: Path) -> None:
    source = source_of("llama", tmp_path)
    plan = plan_of(source, "params=-5%", *MOVES, layout="native")
    assert plan.rewrites == ()
    assert [one.pass_name for one in plan.skipped] == list(MOVES)
    assert all("whole blocks go with `layers`" in one.reason for one in plan.skipped)
    with_neurons = plan_of(source, "params=-5%", "stand-in", "neurons", layout="native")
    assert {one.pass_name for one in with_neurons.rewrites} == {"neurons"}
    assert [one.pass_name for one in with_neurons.skipped] == ["stand-in"]


def test_a_budget_that_no_map_meets_changes_nothing(tmp_path: Path) -> None:
    plan = plan_of(source_of("llama", tmp_path), "params=-90%", *MOVES)
    assert plan.rewrites == ()
    assert any("alone cannot make it that small" in one.reason for one in plan.skipped)


def found_places(root: Path, model) -> tuple[Places, Sweep]:
    """The places of a model written to `root`, and a sweep with a few sequences that may map them."""
    model.save_pretrained(root)
    checkpoint = Checkpoint.open(root)
    config = load_config(checkpoint)
    program = trace(config)
    (layers,) = layer_lists(program, checkpoint, config)
    units = [one for one in units_of(program, checkpoint, layers) if isinstance(one, Units)]
    places = places_of(program, checkpoint, config, layers, units, "stand-in")
    ids = torch.randint(3, 48, (6, 20), generator=torch.Generator().manual_seed(0))
    return places, Sweep(model, layers, (), ids, places=places.found)


def test_places_know_their_units_norms_and_sizes(tmp_path: Path) -> None:
    places, _ = found_places(tmp_path, tiny_model("llama"))
    first, second = places.found[:2]
    assert (first.site, first.attends, first.norm) == (
        "model.layers.0.self_attn", True, "model.layers.0.input_layernorm",
    )  # fmt: skip
    assert (second.site, second.attends, second.norm) == (
        "model.layers.0.mlp", False, "model.layers.0.post_attention_layernorm",
    )  # fmt: skip
    assert [one.units.kind for one in (first, second)] == ["kv-groups", "neurons"]
    assert [one.parameters for one in (first, second)] == [16 * 16 * 2 + 16 * 8 * 2, 3 * 16 * 24]
    assert [first.outputs, second.outputs, places.attentions, places.skipped] == [2, None, 3, ()]


@pytest.mark.parametrize(
    ("kind", "message"),
    [("bloom", "it does not give a value of the shape|inputs of the module"), ("opt", "shape of its")],
)
def test_what_is_no_sublayer_of_one_input_is_left_alone(kind: str, message: str, tmp_path: Path) -> None:
    """Bloom adds the residual within its modules; OPT's feed-forward is two modules of the block."""
    places, _ = found_places(tmp_path, tiny_model(kind))
    sites = {one.site.rpartition(".")[2] for one in places.found}
    assert sites == ({"self_attn"} if kind == "opt" else set())
    assert places.skipped
    for one in places.skipped:
        assert any(part in one.reason for part in message.split("|")), one


def test_a_quantised_sublayer_is_left_alone(tmp_path: Path) -> None:
    source, _ = save_quantised("fp8", tmp_path)
    config = load_config(source)
    program = trace(config)
    (layers,) = layer_lists(program, source, config)
    places = places_of(program, source, config, layers, (), "stand-in")
    assert places.found == ()
    assert all("is quantised" in one.reason for one in places.skipped) and places.skipped


def swept(kind: str, root: Path, *sites: str) -> tuple[Swept, object, torch.Tensor]:
    model = tiny_model(kind)
    places, sweep = found_places(root, model)
    ids = torch.randint(3, 48, (6, 20), generator=torch.Generator().manual_seed(0))
    maps = {one: LINEAR for one in places.found if one.site in sites}
    assert len(maps) == len(sites)
    return sweep.run({}, (), lambda done, of: None, maps), model, ids


def seen_in(model, ids: torch.Tensor, *paths: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with watched(model, paths) as seen, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    return [seen[path][0] for path in paths]


def test_a_map_makes_up_for_what_the_stream_lacks(tmp_path: Path) -> None:
    """The second map is to give what its own sublayer gave and what the first one, and an attention since, lost."""
    sites = ("model.layers.0.mlp", "model.layers.1.mlp")
    found, source, ids = swept("llama", tmp_path, *sites)
    maps = {place.site: tensors for place, tensors in found.maps.items()}
    (given, written), _ = seen_in(source, ids, *sites)
    assert_same(maps[sites[0]], Fit.of([(given, written)]).tensors(LINEAR))
    ((_, after),) = seen_in(source, ids, "model.layers.1")
    (entering, _), (stream, _), (_, attention) = seen_in(
        found.model, ids, sites[1], "model.layers.1", "model.layers.1.self_attn"
    )
    assert_same(maps[sites[1]], Fit.of([(entering, after - (stream + attention))]).tensors(LINEAR))
    assert found.weights == {} and found.kept == {} and found.lost == {}


def test_behind_a_norm_a_map_is_fitted_to_what_its_sublayer_gave(tmp_path: Path) -> None:
    sites = ("model.layers.0.mlp", "model.layers.1.mlp")
    found, source, ids = swept("gemma3_text", tmp_path, *sites)
    maps = {place.site: tensors for place, tensors in found.maps.items()}
    _, (_, written) = seen_in(source, ids, *sites)
    ((entering, _),) = seen_in(found.model, ids, sites[1])
    assert_same(maps[sites[1]], Fit.of([(entering, written)]).tensors(LINEAR))


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for part, tensor in wanted.items():
        assert (found[part] - tensor).norm() <= 1e-3 * tensor.norm()


def test_without_maps_the_sweep_is_what_it_was(tmp_path: Path) -> None:
    found, source, ids = swept("llama", tmp_path)
    assert found.maps == {}
    with torch.no_grad():
        assert torch.equal(found.model(ids).logits, source(ids).logits)


@needs_shared
def test_a_trained_model_gets_maps_and_generates(tmp_path: Path) -> None:
    schema = {"type": "text", "max_tokens": 256}
    options_ = options("params=-20%", "stand-in", "neurons")
    result = export(SHARED / "models/stories260K", tmp_path / "out", schema, options_)
    assert result.report.verified.status == "verified"
    plan = load_manifest(tmp_path / "out").plan
    attentions = [site for site in maps_of(plan) if site.endswith("self_attn")]
    assert attentions
    assert result.report.after.kv_bytes_per_token <= result.report.before.kv_bytes_per_token * (5 - len(attentions)) / 5
    same_with_cache(tmp_path / "out")
