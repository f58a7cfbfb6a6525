"""Running a model with some of its blocks left out, whole and from a later block on."""

from __future__ import annotations

import copy
from collections.abc import Collection
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

from collapse.analysis.block_runs import BlockRuns
from collapse.analysis.first_order import sweep
from collapse.analysis.layer_search import BATCH, FIRST, MANY, SEED, LayerSearch, Step, divergence
from collapse.analysis.sites import Group, Sizes
from collapse.errors import UnsupportedError
from tests.architectures import tiny_model

SITE, LAYERS = "model.layers", 4
IDS = torch.arange(2 * 12).reshape(2, 12) % 40
KINDS = ["llama", "gemma3_text"]


def model_of(kind: str = "llama") -> nn.Module:
    types = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    more = {"layer_types": types} if kind == "gemma3_text" else {}
    return tiny_model(kind, num_hidden_layers=LAYERS, **more).eval()


def without(model: nn.Module, dropped: Collection[int]) -> Tensor:
    """What the model says after its list has lost the blocks for good."""
    shorter = copy.deepcopy(model)
    kept = [block for number, block in enumerate(shorter.model.layers) if number not in dropped]
    shorter.model.layers = nn.ModuleList(kept)
    shorter.model.config.num_hidden_layers = shorter.config.num_hidden_layers = len(kept)
    with torch.no_grad():
        return shorter(input_ids=IDS, use_cache=False).logits


def no_progress(done: int, total: int) -> None:
    """Say nothing."""


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_skipped_is_the_model_itself(kind: str) -> None:
    model = model_of(kind)
    run = BlockRuns(model, SITE).run(IDS)
    with torch.no_grad():
        assert torch.equal(run.logits, model(input_ids=IDS, use_cache=False).logits)
    assert sorted(run.states) == list(range(LAYERS + 1))


@pytest.mark.parametrize("dropped", [(0,), (1, 2), (3,), (0, 3)])
def test_skipped_blocks_are_gone(dropped: tuple[int, ...]) -> None:
    model = model_of()
    assert torch.equal(BlockRuns(model, SITE).run(IDS, dropped).logits, without(model, dropped))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_from_a_later_block_on_says_what_the_whole_one_says(kind: str) -> None:
    runs = BlockRuns(model_of(kind), SITE)
    whole = runs.run(IDS, (1,))
    for start in range(1, LAYERS + 1):
        later = runs.run(IDS, (1,), start=start, state=whole.states[start])
        assert torch.equal(later.logits, whole.logits)
        assert all(number >= start for number in later.states)


def test_the_model_is_afterwards_as_it_was_also_after_an_error() -> None:
    model = model_of()
    runs = BlockRuns(model, SITE)
    with pytest.raises(IndexError):
        runs.run(torch.full((1, 3), 10**6))
    assert all("forward" not in vars(block) for block in model.model.layers)


def test_blocks_that_do_not_hand_on_a_stream_are_refused() -> None:
    class Odd(nn.Module):
        def forward(self, *, other: Tensor) -> Tensor:
            return other

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Odd()])

        def forward(self, input_ids: Tensor, use_cache: bool) -> Tensor:
            return self.layers[0](other=input_ids)

    with pytest.raises(UnsupportedError, match="Odd does not take the residual stream"):
        BlockRuns(Model(), "layers")


# The search.


def idle(model: nn.Module, *blocks: int) -> nn.Module:
    """Make blocks that add nothing to the stream."""
    with torch.no_grad():
        for block in blocks:
            model.model.layers[block].self_attn.o_proj.weight.zero_()
            model.model.layers[block].mlp.down_proj.weight.zero_()
    return model


def search_of(model: nn.Module, **options: int) -> LayerSearch:
    return LayerSearch(BlockRuns(model, SITE), windows_of(), **options)


def cost(model: nn.Module, windows: Tensor, dropped: Collection[int]) -> float:
    """Mean divergence a token of the model without some blocks, with nothing resumed."""
    runs = BlockRuns(model, SITE)
    return divergence(runs.run(windows).logits, runs.run(windows, dropped).logits) / windows.numel()


def windows_of(rows: int = 8) -> Tensor:
    torch.manual_seed(0)
    return torch.randint(0, 40, (rows, 10))


def steps_of(search: LayerSearch, count: int, allowed=lambda dropped: True) -> list[Step]:
    found = []
    for step in search.steps(LAYERS, allowed, no_progress):
        found.append(step)
        if len(found) == count:
            break
    return found


def test_blocks_that_do_nothing_go_first_and_cost_nothing() -> None:
    first, second, third = steps_of(search_of(idle(model_of(), 1, 3)), 3)
    assert set(second.dropped) == {1, 3}
    assert first.kl < 1e-9 and second.kl < 1e-9
    assert third.kl > 1e-4


def test_every_step_is_the_best_of_all_when_all_are_measured() -> None:
    model, windows = model_of(), windows_of()
    first, second = steps_of(search_of(model, contenders=LAYERS), 2)
    singles = {block: cost(model, windows, (block,)) for block in range(LAYERS)}
    assert first.dropped == (min(singles, key=singles.__getitem__),)
    assert first.kl == pytest.approx(singles[first.dropped[0]], rel=1e-5)
    pairs = {b: cost(model, windows, {*first.dropped, b}) for b in range(LAYERS) if b not in first.dropped}
    assert second.kl == pytest.approx(min(pairs.values()), rel=1e-5)
    assert set(second.dropped) == {*first.dropped, min(pairs, key=pairs.__getitem__)}


def test_a_cost_is_the_mean_divergence_of_the_shorter_model() -> None:
    model = model_of()
    with torch.no_grad():
        source = model(input_ids=IDS, use_cache=False).logits
    expected = nn.functional.kl_div(
        without(model, (2,)).double().log_softmax(-1), source.double().log_softmax(-1), log_target=True, reduction="sum"
    )
    (found,) = steps_of(LayerSearch(BlockRuns(model, SITE), IDS), 1, allowed=lambda dropped: dropped == (2,))
    assert found.kl == pytest.approx(float(expected) / IDS.numel(), rel=1e-5)


def test_what_the_architecture_cannot_do_without_stays() -> None:
    found = steps_of(search_of(idle(model_of(), 1)), 3, allowed=lambda dropped: 1 not in dropped)
    assert all(1 not in step.dropped for step in found)
    assert steps_of(search_of(model_of()), 3, allowed=lambda dropped: False) == []


def test_one_block_always_stays() -> None:
    assert len(steps_of(search_of(model_of()), 10)) == LAYERS - 1


def test_a_divergence_over_many_rows_is_the_sum_of_all() -> None:
    torch.manual_seed(1)
    source, found = torch.randn(2, 300, 7), torch.randn(2, 300, 7)
    expected = nn.functional.kl_div(found.log_softmax(-1), source.log_softmax(-1), log_target=True, reduction="sum")
    assert divergence(source, found) == pytest.approx(float(expected), rel=1e-5)
    assert divergence(source, source) == 0


# Estimates of many blocks.


def deep(blocks: int, *idle_ones: int) -> nn.Module:
    return idle(tiny_model("llama", num_hidden_layers=blocks).eval(), *idle_ones)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that tells of how many candidates each measurement will have been."""
    seen, original = [], LayerSearch._costs

    def costs(self, gone, candidates, batches):
        seen.append(len(candidates))
        return original(self, gone, candidates, batches)

    monkeypatch.setattr(LayerSearch, "_costs", costs)
    return seen


def test_of_many_blocks_only_contenders_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, size, windows = counted(monkeypatch), MANY + 2, windows_of()
    model = deep(size, 3, 11)
    search = LayerSearch(BlockRuns(model, SITE), windows, contenders=4)
    first, second, third = islice(search.steps(size, lambda _: True, no_progress), 3)
    assert set(second.dropped) == {3, 11} and first.kl < 1e-9 and second.kl < 1e-9
    assert third.kl == pytest.approx(cost(model, windows, third.dropped), rel=1e-5), "what is taken was measured"
    assert measured == [4, 4, 4]
    assert all("forward" not in vars(block) and not block._forward_hooks for block in model.model.layers)


def test_up_to_sixteen_blocks_are_all_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collapse.analysis.layer_search.sweep", None)
    measured = counted(monkeypatch)
    search = LayerSearch(BlockRuns(deep(MANY), SITE), windows_of(), contenders=4)
    next(search.steps(MANY, lambda _: True, no_progress))
    assert measured == [MANY, 4]


def test_estimates_are_those_of_the_model_without_what_is_gone() -> None:
    model, gone, windows = model_of(), (1,), windows_of()
    found = LayerSearch(BlockRuns(model, SITE), windows)._estimates(gone, [0, 2, 3])
    shorter = copy.deepcopy(model)
    shorter.model.layers = nn.ModuleList(block for number, block in enumerate(model.model.layers) if number != 1)
    groups = [Group("layers", f"{SITE}.{n}", n, 1, f"{SITE}.{n}", Sizes()) for n in range(3)]
    alone = sweep(shorter, groups, torch.split(windows, BATCH)[:FIRST], SEED, no_progress)
    expected = {old: float(alone[f"layers {SITE}.{new}"].fisher[0]) for new, old in enumerate((0, 2, 3))}
    assert found == pytest.approx(expected, rel=1e-5) and min(found.values()) > 0
