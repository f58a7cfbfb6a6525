"""The influence of sites: measured as by hand, estimated by gradients, and the same however it is asked for."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from collapse.analysis.block_runs import BlockRuns
from collapse.analysis.exact_cost import Loss, Reference, Sums, compared, cost_of, means_of
from collapse.analysis.first_order import sweep
from collapse.analysis.influence_store import Store
from collapse.analysis.left_out import left_out
from collapse.analysis.site_influence import Influence, Settings, batches_of, influence_of
from collapse.analysis.sites import Places
from collapse.errors import UnsupportedError
from collapse.survey import influence
from tests.architectures import tiny_model
from tests.influence_cases import (
    IDS,
    batches,
    logits_of,
    places_at,
    removed_by_hand,
    shorter,
    sites,
)
from tests.shared import SHARED, needs_shared

FP32 = 1e-6  # of sums of numbers near 1 that cancel
STORIES = SHARED / "models" / "stories260K"


def nothing(*_: object) -> None:
    """Report nothing."""


def measured(kind: str, places: Places, site) -> Sums:
    runs = BlockRuns(tiny_model(kind), places.blocks)
    return cost_of(runs, Reference.of(runs, IDS), site)


# Exact costs.


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("what", ["sublayers", "kv-groups", "neurons"])
def test_a_cost_is_what_zeroed_weights_cost(kind: str, what: str, tmp_path: Path) -> None:
    places = places_at(tmp_path, kind)
    reference = Reference.of(BlockRuns(tiny_model(kind), places.blocks), IDS)
    found = sites(places, what)
    assert found or (kind, what) == ("gpt2", "kv-groups")
    for site in found:
        cost = measured(kind, places, site)
        assert cost == compared(reference, logits_of(removed_by_hand(kind, site)))
        assert cost.kl > 1e-6


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "glm4_moe"])
def test_an_expert_costs_what_a_model_built_without_it_loses(kind: str, tmp_path: Path) -> None:
    places = places_at(tmp_path, kind)
    reference = Reference.of(BlockRuns(tiny_model(kind), places.blocks), IDS)
    by_block: dict[int, list] = {}
    for site in sites(places, "experts"):
        by_block.setdefault(site.group.block, []).append(site)
    runs = BlockRuns(tiny_model(kind), places.blocks)
    for number in range(4):  # by hand an expert goes from all blocks at once
        together = [found[number] for found in by_block.values()]
        with left_out(runs.model, together[0]), left_out(runs.model, together[-1]):
            logits = logits_of(runs.model)
        expected = logits_of(removed_by_hand(kind, together[0]))
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert compared(reference, logits).kl > 1e-6


def test_a_block_costs_what_a_shorter_model_loses(tmp_path: Path) -> None:
    places = places_at(tmp_path, "llama")
    reference = Reference.of(BlockRuns(tiny_model("llama"), places.blocks), IDS)
    for site in sites(places, "layers"):
        assert measured("llama", places, site) == compared(reference, logits_of(shorter("llama", site.group.block)))


def test_losses_are_those_of_the_definitions() -> None:
    torch.manual_seed(3)
    source, other = torch.randn(2, 9, 48) * 4, torch.randn(2, 9, 48) * 4
    reference = Reference(IDS, {}, source.flatten(0, 1).log_softmax(-1))
    found = compared(reference, other)
    p, q = source.double().log_softmax(-1), other.double().log_softmax(-1)
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-5)
    assert (found.positions, found.targets) == (18, 16)
    losses = [-torch.gather(x[:, :-1], -1, IDS[:, 1:, None]).sum() for x in (p, q)]
    assert found.nll == pytest.approx(float(losses[1] - losses[0]), rel=1e-4)
    flips, sure = p.argmax(-1) != q.argmax(-1), p.exp().amax(-1) >= 0.5
    assert 0 < sure.sum() < 18
    assert (found.flips, found.confident, found.confident_flips) == (flips.sum(), sure.sum(), (flips & sure).sum())
    assert compared(reference, source) == Sums(18, 16, found.confident, 0.0, 0.0, 0, 0)


def test_batches_are_averaged_over_their_positions() -> None:
    loss = Loss.of([Sums(10, 9, 4, 1.0, 0.9, 2, 1), Sums(30, 27, 0, 5.0, 2.7, 2, 0)])
    assert loss == Loss(kl=6 / 40, nll=pytest.approx(3.6 / 36), flips=4 / 40, confident_flips=1 / 4)


def test_a_mean_stands_in_exactly_where_the_output_is_constant(tmp_path: Path) -> None:
    places = places_at(tmp_path, "gpt2")
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.weight.zero_()  # only its bias is left: a constant
    runs = BlockRuns(model, places.blocks)
    reference = Reference.of(runs, IDS)
    site = next(one for one in sites(places, "sublayers") if one.name == "transformer.h.1.mlp")
    mean = means_of(model, [site.group], [IDS])[site.group.key]
    torch.testing.assert_close(mean, model.transformer.h[1].mlp.c_proj.bias.detach(), rtol=1e-6, atol=0)
    assert cost_of(runs, reference, site, mean).kl < 1e-9 < 1e-3 < cost_of(runs, reference, site).kl


def test_the_mean_of_neurons_is_that_of_what_their_reader_gets(tmp_path: Path) -> None:
    places = places_at(tmp_path, "llama")
    model = tiny_model("llama")
    group = sites(places, "neurons")[0].group
    seen: list[Tensor] = []
    model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    found = means_of(model, [group], batches())[group.key]
    torch.testing.assert_close(found, torch.cat(seen).mean((0, 1)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "glm4_moe"])
def test_the_model_is_afterwards_as_it_was(kind: str, tmp_path: Path) -> None:
    places = places_at(tmp_path, kind)
    model = tiny_model(kind)
    before, said = copy.deepcopy(model.state_dict()), logits_of(model)
    settings = Settings(exact=None, by=("zero", "mean"))
    influence_of(lambda: model, places, batches(), settings, Store({}), nothing)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(one.requires_grad and one.grad is None for one in model.parameters())
    modules = list(model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    assert torch.equal(logits_of(model), said)


def test_a_router_that_is_no_linear_map_is_refused(tmp_path: Path) -> None:
    places = places_at(tmp_path, "mixtral")
    model = tiny_model("mixtral")
    for layer in model.model.layers:
        gate = layer.mlp.gate
        gate.forward = lambda hidden, gate=gate: _by_product(gate, hidden)
    runs = BlockRuns(model, places.blocks)
    with pytest.raises(UnsupportedError, match="its router is no linear map"):
        cost_of(runs, Reference.of(runs, IDS), sites(places, "experts")[0])


def _by_product(gate: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
    scores, chosen = logits.softmax(-1).topk(gate.top_k, -1)
    return logits, scores, chosen


# What is dead.


def test_what_is_exactly_dead_costs_exactly_nothing(tmp_path: Path) -> None:
    places = places_at(tmp_path, "llama")
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
        model.model.layers[2].mlp.up_proj.weight[:12].zero_()
    found = influence_of(lambda: model, places, batches(), Settings(exact=None, ranges=2), Store({}), nothing)
    dead = found["model.layers.1.self_attn"]
    assert dead.losses == {"zero": Loss(0.0, 0.0, 0.0, 0.0)}
    assert (dead.estimate.fisher, dead.estimate.taylor, dead.estimate.norm) == (0.0, 0.0, 0.0)
    lowest = found["model.layers.2.mlp neurons 0/2"]
    assert list(lowest.site.units) == list(range(12)), "neurons of no influence rank first"
    assert lowest.kl == 0.0 == lowest.estimate.fisher
    assert found["model.layers.2.mlp neurons 1/2"].kl > 1e-6
    assert found["model.layers.0.self_attn"].kl > 1e-6


def test_an_expert_that_is_never_chosen_costs_exactly_nothing(tmp_path: Path) -> None:
    places = places_at(tmp_path, "mixtral")
    model = tiny_model("mixtral", num_experts_per_tok=1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[3] = layer.mlp.gate.weight[:2].mean(0)  # never above both of the others
    found = influence_of(lambda: model, places, batches(), Settings(("experts",), None), Store({}), nothing)
    for block in range(2):
        names = [f"model.layers.{block}.mlp.experts experts {number}/4" for number in range(4)]
        dead = found[names[3]]
        assert (dead.kl, dead.estimate.fisher, dead.estimate.routed) == (0.0, 0.0, 0.0)
        assert sum(found[name].estimate.routed for name in names) == pytest.approx(1.0)


# Estimates.


def masked_gradients(model: nn.Module, module: str, before: bool, ids: Tensor, seed: int) -> Tensor:
    """Return by autograd how the drawn labels' loss changes by a mask on each number, [batch, tokens, features]."""
    masks: list[Tensor] = []

    def mask(value: Tensor) -> Tensor:
        masks.append(torch.ones_like(value, requires_grad=True))
        return value * masks[-1]

    if before:
        handle = model.get_submodule(module).register_forward_pre_hook(lambda _, args: (mask(args[0]), *args[1:]))
    else:
        handle = model.get_submodule(module).register_forward_hook(
            lambda _, __, out: (mask(out[0]), *out[1:]) if isinstance(out, tuple) else mask(out)
        )
    logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
    handle.remove()
    labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=torch.Generator().manual_seed(seed))[:, 0]
    nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    return masks[0].grad


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("what", ["sublayers", "kv-groups", "neurons"])
def test_estimates_are_derivatives_by_a_mask(kind: str, what: str, tmp_path: Path) -> None:
    places = places_at(tmp_path, kind)
    gathered = sweep(tiny_model(kind), places.groups, [IDS], 5, nothing)
    for site in sites(places, what):
        group = site.group
        gradient = masked_gradients(tiny_model(kind), group.module, group.read is not None, IDS, 5).flatten(0, 1)
        units = [list(group.read.rows([unit])) for unit in site.units] if group.read else [slice(None)]
        per_token = torch.stack([gradient[:, columns].sum(1) for columns in units], 1)
        found = gathered[group.key].estimate(site)
        assert found.fisher == pytest.approx(float((per_token**2).sum()) / 2 / IDS.numel(), rel=1e-3, abs=FP32)
        assert found.taylor == pytest.approx(float(per_token.abs().sum()) / IDS.numel(), rel=1e-3, abs=FP32)


def test_the_estimate_of_an_expert_is_the_derivative_by_its_output(tmp_path: Path) -> None:
    places, ids = places_at(tmp_path, "mixtral"), IDS[:1, :1]
    gathered = sweep(tiny_model("mixtral"), places.groups, [ids], 5, nothing)
    for site in sites(places, "experts"):
        model = tiny_model("mixtral")
        logits = model(input_ids=ids, use_cache=False).logits[0]
        labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=torch.Generator().manual_seed(5))[:, 0]
        nn.functional.cross_entropy(logits, labels).backward()
        weight = model.get_submodule(site.group.module).down_proj
        by_scale = float((weight.grad[site.number] * weight[site.number].detach()).sum())
        assert gathered[site.group.key].estimate(site).taylor == pytest.approx(abs(by_scale), rel=1e-3, abs=1e-9)


def test_a_norm_is_that_of_what_is_added_relative_to_the_stream(tmp_path: Path) -> None:
    places, model = places_at(tmp_path, "llama"), tiny_model("llama")
    gathered = sweep(model, places.groups, [IDS], 0, nothing)
    block, seen = model.model.layers[1], {}
    block.register_forward_pre_hook(lambda _, args: seen.setdefault("stream", args[0]))
    block.mlp.register_forward_hook(lambda _, args, out: seen.setdefault("added", out))
    block.self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.setdefault("heads", args[0]))
    logits_of(model)
    norm = {site.name: gathered[site.group.key].estimate(site).norm for site in sites(places, "sublayers")}
    stream = float(seen["stream"].norm())
    assert norm["model.layers.1.mlp"] == pytest.approx(float(seen["added"].norm()) / stream, rel=1e-5)
    first = next(site for site in sites(places, "kv-groups") if site.group.block == 1)
    given = seen["heads"][..., :8] @ block.self_attn.o_proj.weight[:, :8].T
    size = float(given.detach().norm())
    assert gathered[first.group.key].estimate(first).norm == pytest.approx(size / stream, rel=1e-5)


# Together.


def test_only_contenders_are_measured_unless_all_are_asked_for(tmp_path: Path) -> None:
    places = places_at(tmp_path, "llama")
    few = influence_of(lambda: tiny_model("llama"), places, batches(), Settings(exact=2), Store({}), nothing)
    for kind in ("layers", "sublayers", "kv-groups", "neurons"):
        ranked = sorted(few.of(kind), key=lambda one: one.estimate.fisher)
        assert [bool(one.losses) for one in ranked] == [True, True] + [False] * (len(ranked) - 2)
    only = influence_of(lambda: tiny_model("llama"), places, batches(), Settings(("layers",), 0), Store({}), nothing)
    assert [one.site.name for one in only.sites] == [f"model.layers.{number}" for number in range(3)]
    assert all(one.kl is None for one in only.sites)
    assert few.tokens == only.tokens == 36


def test_blocks_and_experts_have_no_mean(tmp_path: Path) -> None:
    places = places_at(tmp_path, "mixtral")
    settings = Settings(exact=None, by=("zero", "mean"))
    found = influence_of(lambda: tiny_model("mixtral"), places, batches(), settings, Store({}), nothing)
    assert {frozenset(one.losses) for kind in ("layers", "experts") for one in found.of(kind)} == {frozenset({"zero"})}
    assert all(set(one.losses) == {"zero", "mean"} for one in found.of("sublayers"))
    assert all(math.isfinite(one.kl) for one in found.sites)


def test_batches_hold_a_window_at_least_and_bounded_logits() -> None:
    assert [len(one) for one in batches_of(torch.zeros(10, 128, dtype=torch.long), 1000)] == [4, 4, 2]
    assert [len(one) for one in batches_of(torch.zeros(3, 128, dtype=torch.long), 262144)] == [1, 1, 1]


# On a trained model.


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Influence]:
    """Everything about a trained model on 512 tokens, of the domain and of prose."""
    cache = tmp_path_factory.mktemp("cache")
    settings = Settings(exact=None, ranges=4)
    return {
        generic: influence(STORIES, "log", settings=settings, tokens=512, generic=generic, cache=cache)
        for generic in (False, True)
    }


@needs_shared
def test_estimates_rank_the_sites_of_a_trained_model_as_they_measure(stories: dict[bool, Influence]) -> None:
    for kind, least in (("sublayers", 0.6), ("kv-groups", 0.8), ("neurons", 0.9)):
        found = stories[True].of(kind)
        rank = spearmanr([one.estimate.fisher for one in found], [one.kl for one in found]).statistic
        assert rank > least, f"{kind}: {rank}"


@needs_shared
def test_prose_and_the_domain_say_different_things(stories: dict[bool, Influence]) -> None:
    domain, prose = ({one.site.name: one.kl for one in stories[key].of("sublayers")} for key in (False, True))
    assert domain.keys() == prose.keys()
    assert all(domain[name] != prose[name] for name in domain)
