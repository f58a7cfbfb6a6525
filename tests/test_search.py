"""Least squares, elimination, shapes and allocation, against what can be computed by hand or by brute force."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from collapse.search.allocate import allocate, lower_hull
from collapse.search.least_squares import FLOOR, Normal, eliminate, normal_equations, pulled
from collapse.search.shapes import Prices, Shape
from collapse.search.trials import Trial, in_between


def tokens(seed: int, count: int = 400, inputs: int = 8, outputs: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs, generator=generator) @ torch.randn(inputs, inputs, generator=generator)
    return x, torch.randn(outputs, inputs, generator=generator)


def test_batches_add_up_to_the_whole() -> None:
    x, weight = tokens(0)
    whole = normal_equations([(x, x @ weight.T)])
    parts = normal_equations(
        [(x[:100].reshape(4, 25, 8), (x[:100] @ weight.T).reshape(4, 25, 5)), (x[100:], x[100:] @ weight.T)]
    )
    assert torch.allclose(whole.gram, parts.gram, rtol=1e-5) and torch.allclose(whole.cross, parts.cross, rtol=1e-4)
    assert torch.allclose(whole.gram, (x.double().T @ x.double()), rtol=1e-4)


def test_all_inputs_give_the_weight_back_whatever_the_pull() -> None:
    x, weight = tokens(1)
    for ridge in (0.0, 0.3, 10.0):
        normal = pulled(normal_equations([(x, x @ weight.T)]), weight, ridge)
        assert torch.allclose(normal.solve(torch.arange(8)).float(), weight, atol=1e-4)


def test_the_solution_is_that_of_ridge_regression() -> None:
    x, weight = tokens(2)
    kept, y = torch.tensor([0, 2, 3, 7]), x @ weight.T
    normal = pulled(normal_equations([(x, y)]), weight, 0.25)
    energy = x.double().square().sum(0)
    root = (0.25 * energy + FLOOR * energy.mean()).sqrt()
    rows = torch.cat([x.double()[:, kept], torch.diag(root)[:, kept]])  # the pull as further tokens
    right = torch.cat([y.double(), torch.diag(root) @ weight.double().T])
    expected = torch.linalg.lstsq(rows, right).solution.T
    assert torch.allclose(normal.solve(kept), expected, atol=1e-5)


def test_inputs_never_used_keep_the_sources_columns() -> None:
    x, weight = tokens(3)
    x[:, 4] = 0
    normal = pulled(normal_equations([(x, x @ weight.T)]), weight)
    assert torch.allclose(normal.solve(torch.arange(8))[:, 4].float(), weight[:, 4], atol=1e-5)


def residual(normal: Normal, kept: list[int]) -> float:
    """What the quadratic form that `normal` stands for is at its solution on `kept`, up to a constant."""
    if not kept:
        return 0.0
    rows = torch.tensor(kept)
    return -float((normal.solve(rows).T * normal.cross[rows]).sum())


@given(st.integers(0, 10_000))
def test_one_unit_is_eliminated_as_brute_force_does(seed: int) -> None:
    note(f"seed {seed}")
    x, weight = tokens(seed)
    normal = pulled(normal_equations([(x, x @ weight.T)]), weight)
    for units in ([[0], [1], [2], [3], [4], [5], [6], [7]], [[0, 1], [2, 3], [4, 5], [6, 7]]):
        costs = {}
        for gone in range(len(units)):
            kept = [column for number, unit in enumerate(units) if number != gone for column in unit]
            costs[gone] = residual(normal, kept)
        (gone,) = set(range(len(units))) - set(eliminate(normal, units, len(units) - 1))
        best = min(costs.values())
        assert costs[gone] <= best + 1e-3 * abs(best)


def test_elimination_one_by_one_is_near_the_best_set() -> None:
    x, weight = tokens(5)
    normal = pulled(normal_equations([(x, x @ weight.T)]), weight)
    found = residual(normal, list(eliminate(normal, [[n] for n in range(8)], 5)))
    best = min(residual(normal, list(some)) for some in combinations(range(8), 5))
    nothing = residual(normal, list(range(8)))
    assert found - nothing <= 1.2 * (best - nothing) + 1e-6


def test_copies_of_an_input_go_first_and_cost_nothing() -> None:
    x, weight = tokens(6, inputs=6)
    x, weight = torch.cat([x, x[:, :2]], 1), torch.cat([weight, weight[:, :2]], 1)
    normal = pulled(normal_equations([(x, x @ weight.T)]), weight, 0.0)
    kept = eliminate(normal, [[n] for n in range(8)], 6)
    assert len({0, 6} & set(kept)) == len({1, 7} & set(kept)) == 1
    rest = torch.tensor(kept)
    off = x[:, rest] @ normal.solve(rest).T.float() - x @ weight.T
    assert off.norm() <= 1e-2 * (x @ weight.T).norm()  # the floor still pulls a little


def test_nothing_is_eliminated_where_all_are_kept() -> None:
    x, weight = tokens(7)
    normal = pulled(normal_equations([(x, x @ weight.T)]), weight)
    assert eliminate(normal, [[n] for n in range(8)], 8) == tuple(range(8))


PRICES = Prices(total=1000, blocks=(80.0,) * 10, unit={"neurons": 2, "kv-groups": 9})


def test_shares_are_counted_block_by_block() -> None:
    assert PRICES.share(Shape()) == 1
    assert PRICES.share(Shape((3,), {})) == pytest.approx(0.92)
    assert PRICES.share(Shape((3,), {"neurons": 5, "kv-groups": 1})) == pytest.approx(1 - 0.08 - 9 * (10 + 9) / 1000)


def test_the_least_loss_just_reaches_the_share() -> None:
    for shape in (Shape(), Shape((1, 2), {"kv-groups": 1})):
        lost = PRICES.least_lost(shape, "neurons", 0.6)
        assert PRICES.share(shape.with_lost("neurons", lost)) <= 0.6 + 1e-12
        assert lost == 0 or PRICES.share(shape.with_lost("neurons", lost - 1)) > 0.6
    assert PRICES.least_lost(Shape(), "neurons", 1.0) == 0


def test_the_lower_hull_leaves_out_what_lies_above() -> None:
    assert lower_hull([(0, 0.0), (1, 5.0), (2, 4.0), (4, 6.0)]) == [(0, 0.0), (4, 6.0)]
    assert lower_hull([(2, 1.0), (0, 0.0), (3, 9.0)]) == [(0, 0.0), (2, 1.0), (3, 9.0)]


class Block:
    """As much of units as an allocation reads."""

    def __init__(self, size: int, parameters: int) -> None:
        self.size, self.parameters = size, parameters


def test_an_allocation_is_the_best_of_all() -> None:
    curves = ([0, 1, 3, 6, 10], [0, 2, 4, 6, 8], [0, 0.1, 5, 12, 30])  # convex, by units lost
    blocks = [Block(5, 7) for _ in curves]
    trials = [
        Trial(block, 5 - lost, cost)
        for block, curve in zip(blocks, curves, strict=True)
        for lost, cost in enumerate(curve)
        if lost
    ]
    for wanted in range(1, 13):
        sizes = allocate(trials, 7 * wanted)
        lost = [5 - sizes.get(block, 5) for block in blocks]
        assert sum(lost) == wanted
        best = min(
            sum(curve[n] for curve, n in zip(curves, counts, strict=True))
            for counts in product(range(5), repeat=3)
            if sum(counts) == wanted
        )
        assert sum(curve[n] for curve, n in zip(curves, lost, strict=True)) == pytest.approx(best)


def test_an_allocation_ends_where_the_trials_do() -> None:
    block = Block(10, 3)
    assert allocate([Trial(block, 8, 0.5)], 1e6) == {block: 8}
    assert allocate([Trial(block, 8, 0.5)], 0.0) == {}


def test_between_two_trials_the_cost_grows_by_their_power() -> None:
    block = Block(64, 1)
    tried = [Trial(block, 48, 0.01), Trial(block, 32, 0.04)]  # twice as many gone, four times the cost
    found = {64 - one.kept: one.kl for one in in_between(tried)}
    assert list(found) == list(range(2, 33, 2))
    assert found == pytest.approx({lost: 0.01 * (lost / 16) ** 2 for lost in found}, rel=1e-12)


def test_below_the_first_trial_the_cost_grows_in_proportion_at_least() -> None:
    block = Block(64, 1)
    found = {64 - one.kept: one.kl for one in in_between([Trial(block, 48, 0.02), Trial(block, 32, 0.02)])}
    assert found[8] == pytest.approx(0.01, rel=1e-12)
    assert found[24] == pytest.approx(0.02, rel=1e-12)


def test_few_units_and_single_trials_have_nothing_in_between() -> None:
    few, many = Block(3, 1), Block(64, 1)
    for tried in ([Trial(few, 2, 0.1), Trial(few, 1, 0.3)], [Trial(many, 32, 0.1)]):
        assert in_between(tried) == tuple(tried)
