"""Gives every block its own size: where what was measured says that a parameter costs least.

The costs of single blocks are added up. They are made convex first (the lower hull over the sizes tried), where the
best sizes for a total are those at one slope: a parameter more would cost as much in every block. That is the exact
solution of the separable problem, which dynamic programming would find too, on a grid. What blocks cost together is
measured afterwards, on the model that is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from collapse.search.trials import Trial
from collapse.search.units import Units


@dataclass(frozen=True)
class _Piece:
    """Between two sizes of the hull: units that may go, each at the same cost."""

    units: Units
    count: int
    slope: float  # nats for each parameter


def allocate(trials: Sequence[Trial], parameters: float) -> dict[Units, int]:
    """Return how many of its units each block keeps, where it loses some, for `parameters` to go in all.

    As near to it as whole units allow, and not less, unless all trials together do not reach so far.
    """
    pieces = sorted(_pieces(trials), key=lambda piece: piece.slope)
    lost: dict[Units, int] = {}
    left = parameters
    for piece in pieces:
        count = min(piece.count, -int(-left // piece.units.parameters))
        if count > 0:
            lost[piece.units] = lost.get(piece.units, 0) + count
            left -= count * piece.units.parameters
    return {units: units.size - count for units, count in lost.items()}


def _pieces(trials: Sequence[Trial]) -> list[_Piece]:
    """Return the pieces of all hulls; within one they come in order, since slopes only grow."""
    by_units: dict[Units, list[tuple[int, float]]] = {}
    for trial in trials:
        by_units.setdefault(trial.units, [(0, 0.0)]).append((trial.units.size - trial.kept, trial.kl))
    found = []
    for units, points in by_units.items():
        hull = lower_hull(points)
        for (start, low), (stop, high) in pairwise(hull):
            found.append(_Piece(units, stop - start, (high - low) / ((stop - start) * units.parameters)))
    return found


def lower_hull(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the lower convex hull of points with distinct first numbers, ascending (Andrew's monotone chain)."""
    hull: list[tuple[int, float]] = []
    for point in sorted(points):
        while len(hull) > 1 and _turns_down(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _turns_down(first: tuple[int, float], second: tuple[int, float], third: tuple[int, float]) -> bool:
    return (second[1] - first[1]) * (third[0] - first[0]) >= (third[1] - first[1]) * (second[0] - first[0])
