"""Maps in closed form against direct solutions, and which places become maps against brute force."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from collapse.search.least_squares import FLOOR
from collapse.search.maps import Fit, MapKind, kinds_for, module_of
from collapse.search.options import MapTrial, added_cost, allocate_with_maps, keeping_one
from collapse.search.places import Place
from collapse.search.shapes import Prices, Uneven
from collapse.search.trials import Trial

WIDTH, TOKENS = 6, 300
LINEAR = MapKind("linear")
KINDS = (LINEAR, MapKind("low-rank", 2), MapKind("constant"), MapKind("zero"))


def tokens(seed: int, noise: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and outputs of a map with a bias, and noise."""
    draw = torch.Generator().manual_seed(seed)
    mixed = torch.eye(WIDTH) + 0.2 * torch.randn(WIDTH, WIDTH, generator=draw)
    x = torch.randn(TOKENS, WIDTH, generator=draw) @ mixed + 2
    y = x @ torch.randn(WIDTH, WIDTH, generator=draw) + 3
    return x, y + noise * torch.randn(TOKENS, WIDTH, generator=draw)


def place(site: str = "a", block: int = 0, *, units=None, attends: bool = False, parameters: int = 1000) -> Place:
    return Place(site, block, WIDTH, parameters, attends, None, None, units)


def pull_rows(x: torch.Tensor, ridge: float) -> torch.Tensor:
    """The pull as further tokens: of each input its share of the energy around the mean."""
    energy = (x - x.mean(0)).double().square().sum(0)
    return torch.diag((ridge * energy + FLOOR * energy.mean()).sqrt())


@pytest.mark.parametrize("ridge", [0.0, 0.03, 1.0])
def test_a_linear_map_is_ridge_regression_whose_bias_is_not_pulled(ridge: float) -> None:
    x, y = tokens(0)
    found = Fit.of([(x[:100].reshape(4, 25, WIDTH), y[:100].reshape(4, 25, WIDTH)), (x[100:], y[100:])], ridge)
    mean_in, mean_out = x.double().mean(0), y.double().mean(0)
    rows = torch.cat([x.double() - mean_in, pull_rows(x, ridge)])
    wanted = torch.cat([y.double() - mean_out, torch.zeros(WIDTH, WIDTH).double()])
    weight = torch.linalg.lstsq(rows, wanted).solution.T
    tensors = found.tensors(MapKind("linear"))
    torch.testing.assert_close(tensors["weight"].double(), weight, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tensors["bias"].double(), mean_out - weight @ mean_in, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.tensors(MapKind("constant"))["bias"], y.mean(0), rtol=1e-5, atol=1e-5)
    assert found.tensors(MapKind("zero")) == {}


@pytest.mark.parametrize("rank", [1, 3, WIDTH])
@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_a_map_of_low_rank_is_the_best_of_its_rank(rank: int, ridge: float) -> None:
    """Reduced-rank regression by SVD: the fitted outputs cut to their first right singular vectors."""
    x, y = tokens(1, noise=4.0)
    rows = torch.cat([(x - x.mean(0)).double(), pull_rows(x, ridge)])
    wanted = torch.cat([(y - y.mean(0)).double(), torch.zeros(WIDTH, WIDTH).double()])
    full = torch.linalg.lstsq(rows, wanted).solution
    right = torch.linalg.svd(rows @ full).Vh[:rank]
    direct = (full @ right.T @ right).T
    tensors = {
        part: tensor.double() for part, tensor in Fit.of([(x, y)], ridge).tensors(MapKind("low-rank", rank)).items()
    }
    assert tensors["down"].shape == (rank, WIDTH) and tensors["up"].shape == (WIDTH, rank)
    weight = tensors["up"] @ tensors["down"]
    torch.testing.assert_close(weight, direct, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(tensors["bias"], y.double().mean(0) - weight @ x.double().mean(0), rtol=1e-3, atol=1e-3)
    off = (rows @ weight.T - wanted).square().sum()
    draw = torch.Generator().manual_seed(9)
    for _ in range(20):  # no other of that rank is nearer, neighbours included
        step = 0.02 * torch.randn(2, rank, WIDTH, generator=draw).double()
        other = (tensors["up"] + step[0].T) @ (tensors["down"] + step[1])
        assert (rows @ other.T - wanted).square().sum() >= off * (1 - 1e-9)


def test_the_module_gives_what_the_map_says() -> None:
    x, y = tokens(2, noise=0.0)
    fit, where = Fit.of([(x, y)], 0.0), place()
    linear = module_of(where, KINDS[0], fit.tensors(KINDS[0]))
    assert (linear(x) - y).norm() <= 1e-2 * y.norm()
    assert torch.equal(module_of(where, KINDS[3], {})(x), torch.zeros_like(x))
    assert torch.equal(module_of(where, KINDS[2], fit.tensors(KINDS[2]))(x)[5], fit.tensors(KINDS[2])["bias"])
    low = module_of(where, KINDS[1], fit.tensors(KINDS[1]))
    assert [sum(p.numel() for p in one.parameters()) for one in (linear, low)] == [
        kind.parameters(WIDTH) for kind in KINDS[:2]
    ]


def test_maps_to_try_go_from_mild_to_hard_and_are_smaller_than_the_sublayer() -> None:
    wide = Place("a", 0, 16, 600, True, None, None, None)
    assert [str(kind) for kind in kinds_for(wide, ("stand-in", "sublayers"))] == [
        "linear", "low-rank of rank 4", "low-rank of rank 2", "constant", "zero",
    ]  # fmt: skip
    assert [kind.by for kind in kinds_for(wide, ("sublayers", "neurons"))] == ["constant", "zero"]
    assert [kind.rank for kind in kinds_for(Place("a", 0, 16, 272, True, None, None, None), ("stand-in",))] == [4, 2]
    assert kinds_for(wide, ("neurons",)) == ()


class Block:
    """As much of units as an allocation reads."""

    def __init__(self, size: int, parameters: int) -> None:
        self.size, self.parameters = size, parameters


def brute_force(trials: list[Trial], maps: list[MapTrial], worth: dict[MapTrial, float], wanted: int) -> float:
    """The least cost of all choices, with whole units on convex curves."""
    curves = []
    for units in dict.fromkeys(one.units for one in trials):
        own = [(0, 0.0, 0.0)] + [
            ((units.size - one.kept) * units.parameters, one.kl, 0.0) for one in trials if one.units is units
        ]
        curves.append(own + [(worth[one], one.kl, 0.0) for one in maps if one.place.units is units])
    alone = dict.fromkeys(one.place for one in maps if one.place.units is None)
    curves += [[(0, 0.0, 0.0), *((worth[one], one.kl, 0.0) for one in maps if one.place == where)] for where in alone]
    sums = [(sum(lost for lost, _, _ in some), sum(kl for _, kl, _ in some)) for some in product(*curves)]
    return min(kl for lost, kl in sums if lost >= wanted)


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_an_allocation_with_maps_is_the_best_of_all(seed: int) -> None:
    note(f"seed {seed}")
    draw = torch.Generator().manual_seed(seed)

    def numbers(count: int, most: int) -> list[int]:
        return torch.randint(1, most, (count,), generator=draw).tolist()

    blocks = [Block(4, size) for size in numbers(2, 6)]
    slopes = [sorted(numbers(3, 20)) for _ in blocks]  # what a unit more costs: ever more
    trials = [
        Trial(block, 4 - lost, float(sum(slope[:lost])))
        for block, slope in zip(blocks, slopes, strict=True)
        for lost in (1, 2, 3)
    ]
    places = [place("a", units=blocks[0]), place("b", units=blocks[1]), place("c")]
    maps = [
        MapTrial(where, kind, float(kl)) for where in places for kind, kl in zip(KINDS, numbers(2, 60), strict=False)
    ]
    worth = dict(zip(maps, numbers(len(maps), 30), strict=True))
    most = sum(
        max([worth[m] for m in maps if m.place == w] + ([3 * w.units.parameters] if w.units else [])) for w in places
    )
    for wanted in range(1, most + 1, 3):
        found = allocate_with_maps(trials, maps, wanted, worth)
        lost = sum((units.size - size) * units.parameters for units, size in found.kept.items())
        lost += sum(worth[one] for one in maps if found.maps.get(one.place) == one.kind)
        assert lost >= wanted
        assert all(where.units not in found.kept for where in found.maps)
        assert added_cost(trials, maps, found) == pytest.approx(brute_force(trials, maps, worth, wanted))


def test_maps_alone_are_a_knapsack() -> None:
    maps = [MapTrial(place(site), KINDS[0], kl) for site, kl in (("a", 3.0), ("b", 2.0), ("c", 2.0))]
    worth = dict(zip(maps, (10, 6, 6), strict=True))
    assert [one.site for one in allocate_with_maps((), maps, 10, worth).maps] == ["a"]
    assert sorted(one.site for one in allocate_with_maps((), maps, 12, worth).maps) == ["b", "c"]
    assert allocate_with_maps((), maps, 0, worth) == Uneven()


def test_between_narrower_and_map_nothing_is_interpolated() -> None:
    """Half of the way from the narrowest tried to the map costs the whole map."""
    units = Block(10, 1)
    where = place("a", units=units)
    trials, maps = [Trial(units, 5, 1.0)], [MapTrial(where, KINDS[0], 2.0)]
    worth = {maps[0]: 9}
    assert allocate_with_maps(trials, maps, 5, worth) == Uneven(kept={units: 5})
    assert allocate_with_maps(trials, maps, 6, worth) == Uneven(maps={where: KINDS[0]})


def test_without_maps_it_is_the_allocation_of_units() -> None:
    from collapse.search.allocate import allocate

    blocks = [Block(100, 3), Block(50, 7)]
    trials = [Trial(block, block.size - lost, lost**1.5) for block in blocks for lost in (10, 30)]
    for wanted in (1, 50, 199, 10_000):
        assert allocate_with_maps(trials, (), wanted, {}) == Uneven(kept=allocate(trials, wanted))


def test_one_attention_stays_the_one_that_is_missed_most() -> None:
    places = [place(site, attends=attends) for site, attends in (("a", True), ("b", True), ("m", False))]
    costs = {"a": (3.0, 5.0), "b": (1.0, 9.0), "m": (7.0, 7.0)}
    maps = tuple(MapTrial(one, kind, kl) for one in places for kind, kl in zip(KINDS, costs[one.site], strict=False))
    assert {one.place.site for one in keeping_one(maps, 2)} == {"b", "m"}
    assert keeping_one(maps, 3) == maps  # another attention stays anyway
    assert keeping_one((), 2) == ()


def test_a_map_is_worth_what_goes_with_its_sublayer() -> None:
    prices = Prices(total=1000, blocks=(400.0,) * 2, unit={"neurons": 2}, place={"a": 300.0}, parameter=2.0)
    where = Place("a", 0, 4, 100, True, None, None, None)
    assert prices.saved(where, MapKind("linear")) == 300 - 2 * 20
    assert prices.share(Uneven(maps={where: MapKind("low-rank", 1)})) == pytest.approx(1 - (300 - 2 * 12) / 1000)


def test_a_map_that_adds_to_the_size_does_not_count_as_one_that_takes_all_of_it() -> None:
    """A map for experts of which few run has more FLOPs than they."""
    maps = [MapTrial(place("experts"), LINEAR, 0.01), MapTrial(place("mlp"), LINEAR, 0.1)]
    found = allocate_with_maps((), maps, 10, dict(zip(maps, (-30, 12), strict=True)))
    assert [one.site for one in found.maps] == ["mlp"]
