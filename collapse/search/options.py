"""What each sublayer of the free layout can become, and which of it for a total: units by one slope, maps by choice.

Between two numbers of units lie all others, and the costs of those are made convex (`collapse.search.allocate`). A map
is taken as a whole or not at all, so which sublayers become maps is a multiple-choice knapsack: dynamic programming on
a grid of parameters decides it, with every number of units among the choices. Once the maps are chosen, the units of
the others are given anew at one slope, which knows no grid; the cheaper of both is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collapse.search.allocate import allocate, lower_hull
from collapse.search.maps import MapKind
from collapse.search.places import Place
from collapse.search.shapes import Uneven
from collapse.search.trials import Trial
from collapse.search.units import Units

CELLS = 1024  # of the grid, as many as the parameters that are to go where those are fewer

Costs = NDArray[np.float64]


@dataclass(frozen=True)
class MapTrial:
    """A map in a place: the mean KL divergence that it costs alone, nats a token."""

    place: Place
    kind: MapKind
    kl: float


def allocate_with_maps(
    trials: Sequence[Trial], maps: Sequence[MapTrial], parameters: float, worth: Mapping[MapTrial, float]
) -> Uneven:
    """Return the cheapest choice found for `parameters` to go in all, or all that can go where that is less.

    `worth` is how many parameters go with each map.
    """
    if parameters <= 0 or not maps:
        return Uneven(kept=allocate(trials, parameters))
    chosen = _on_grid(trials, maps, parameters, worth)
    gone = sum(worth[one] for one in maps if chosen.maps.get(one.place) == one.kind)
    rest = [one for one in trials if all(one.units != place.units for place in chosen.maps)]
    again = Uneven(kept=allocate(rest, max(0.0, parameters - gone)), maps=chosen.maps)

    def rank(one: Uneven) -> tuple[bool, float]:
        lost = gone + sum((units.size - size) * units.parameters for units, size in one.kept.items())
        return lost < parameters, added_cost(trials, maps, one)

    return min((again, chosen), key=rank)


def keeping_one(maps: Sequence[MapTrial], attentions: int) -> tuple[MapTrial, ...]:
    """Return the trials that may all be taken together, where the model has so many attentions and one must stay.

    Where every one of them might go, the one stays whose cheapest map costs most: a KV cache without any attention
    could not tell how many tokens were seen.
    """
    cheapest: dict[Place, float] = {}
    for one in maps:
        if one.place.attends:
            cheapest[one.place] = min(one.kl, cheapest.get(one.place, one.kl))
    if len(cheapest) < attentions:
        return tuple(maps)
    stays = max(cheapest, key=lambda place: cheapest[place], default=None)
    return tuple(one for one in maps if one.place != stays)


def added_cost(trials: Sequence[Trial], maps: Sequence[MapTrial], chosen: Uneven) -> float:
    """Return what the parts of a shape cost in sum, nats a token."""
    of_units = sum(_cost_of(_hull(trials, units), units.size - size) for units, size in chosen.kept.items())
    return of_units + sum(one.kl for one in maps if chosen.maps.get(one.place) == one.kind)


def _hull(trials: Iterable[Trial], units: Units) -> list[tuple[int, float]]:
    """Return the lower hull of what losing units costs."""
    return lower_hull([(0, 0.0), *((units.size - one.kept, one.kl) for one in trials if one.units == units)])


def _cost_of(hull: Sequence[tuple[int, float]], lost: int) -> float:
    return float(np.interp(lost, [count for count, _ in hull], [kl for _, kl in hull]))


@dataclass(frozen=True)
class _Choice:
    """One thing that a sublayer can become: so many lost units, or a map."""

    worth: float
    kl: float
    lost: int = 0
    kind: MapKind | None = None


@dataclass(frozen=True)
class _Sublayer:
    """The choices of one sublayer."""

    units: Units | None
    place: Place | None
    choices: tuple[_Choice, ...]

    def on_grid(self, cell: float, cells: int) -> tuple[Costs, NDArray[np.int64]]:
        """Return by number of cells the least cost of losing as many or more, and the number of the choice."""
        costs, best = np.full(cells + 1, np.inf), np.zeros(cells + 1, dtype=np.int64)
        for number, choice in enumerate(self.choices):
            if choice.worth < 0:  # it adds to the size that is asked about, as a map for experts may to FLOPs
                continue
            reached = min(cells, int(choice.worth / cell + 1e-9))
            better = costs[: reached + 1] > choice.kl
            costs[: reached + 1][better], best[: reached + 1][better] = choice.kl, number
        last = int(np.isfinite(costs).sum())
        return costs[:last], best[:last]


def _sublayers(
    trials: Sequence[Trial], maps: Sequence[MapTrial], worth: Mapping[MapTrial, float]
) -> tuple[_Sublayer, ...]:
    places: dict[Place, list[_Choice]] = {}
    for one in maps:
        places.setdefault(one.place, []).append(_Choice(worth[one], one.kl, kind=one.kind))
    place_of = {place.units: place for place in places if place.units is not None}
    found: list[_Sublayer] = []
    for units in dict.fromkeys(one.units for one in trials):
        place = place_of.pop(units, None)
        found.append(_Sublayer(units, place, (*_narrower(trials, units), *(places.pop(place) if place else ()))))
    return (*found, *(_Sublayer(None, place, (_Choice(0, 0.0), *choices)) for place, choices in places.items()))


def _narrower(trials: Sequence[Trial], units: Units) -> list[_Choice]:
    hull = _hull(trials, units)
    return [_Choice(lost * units.parameters, _cost_of(hull, lost), lost) for lost in range(hull[-1][0] + 1)]


def _on_grid(
    trials: Sequence[Trial], maps: Sequence[MapTrial], parameters: float, worth: Mapping[MapTrial, float]
) -> Uneven:
    """Choose by dynamic programming; what a choice is worth is rounded down to whole cells, so enough goes."""
    sublayers = _sublayers(trials, maps, worth)
    cells = max(1, min(CELLS, int(parameters)))
    cell = parameters / cells
    total, taken = np.zeros(1), list[tuple[NDArray[np.int64], NDArray[np.int64]]]()
    for one in sublayers:
        costs, best = one.on_grid(cell, cells)
        total, cells_of = _joined(total, costs, cells)
        taken.append((cells_of, best))
    left, kept, chosen = len(total) - 1, dict[Units, int](), dict[Place, MapKind]()
    for one, (cells_of, best) in zip(reversed(sublayers), reversed(taken), strict=True):
        here = int(cells_of[left])
        left = max(0, left - here)
        choice = one.choices[int(best[here])]
        if choice.kind is not None and one.place is not None:
            chosen[one.place] = choice.kind
        elif choice.lost and one.units is not None:
            kept[one.units] = one.units.size - choice.lost
    return Uneven(kept=kept, maps=chosen)


def _joined(total: Costs, costs: Costs, cells: int) -> tuple[Costs, NDArray[np.int64]]:
    """Return the least cost of each sum of cells, at most `cells` of them, and how many cells are of `costs`."""
    length = min(cells, len(total) + len(costs) - 2) + 1
    found, cells_of = np.full(length, np.inf), np.zeros(length, dtype=np.int64)
    for count, cost in enumerate(costs):
        stop = min(length, count + len(total))
        better = total[: stop - count] + cost < found[count:stop]
        found[count:stop][better] = (total[: stop - count] + cost)[better]
        cells_of[count:stop][better] = count
    return found, cells_of
