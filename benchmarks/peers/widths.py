"""Which units go so that a share of the decoder's parameters goes, by scores: lower goes first, one stays in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from collapse.search.units import Units

Scores = Mapping[Units, torch.Tensor]  # one score a unit
Kept = tuple[tuple[Units, tuple[int, ...]], ...]


def uniform_losses(units: Sequence[Units], share: float, target: float) -> dict[Units, int]:
    """Return how many of each to take, as many from every block: KV groups as near to `share` of them as can be.

    The neurons make up what is left of `target` parameters; where it is not a whole number of neurons a block, the
    first blocks lose one more.
    """
    groups = [one for one in units if one.kind == "kv-groups"]
    neurons = [one for one in units if one.kind == "neurons"]
    losses = {one: min(round(share * one.size), one.size - 1) for one in groups}
    rest = max(0.0, target - sum(lost * one.parameters for one, lost in losses.items()))
    total = round(rest / neurons[0].parameters) if neurons else 0
    each, more = divmod(total, max(1, len(neurons)))
    losses |= {one: min(one.size - 1, each + (place < more)) for place, one in enumerate(neurons)}
    return {one: lost for one, lost in losses.items() if lost}


def uniform(scores: Scores, share: float, target: float) -> Kept:
    """Take as many from every block, the lowest scores of each first."""
    losses = uniform_losses(list(scores), share, target)
    return tuple((units, best(scores[units], units.size - lost)) for units, lost in losses.items())


def best(scores: torch.Tensor, count: int) -> tuple[int, ...]:
    """Return the numbers of the highest scores, ascending; of equal ones the first."""
    return tuple(sorted(scores.argsort(descending=True, stable=True)[:count].tolist()))


def adaptive(scores: Scores, target: float) -> Kept:
    """Take the lowest scores of all blocks together, until `target` parameters are gone to within half a unit."""
    order = sorted(
        ((float(score), units, unit) for units, found in scores.items() for unit, score in enumerate(found)),
        key=lambda entry: entry[0],
    )
    left = {units: set(range(units.size)) for units in scores}
    gone = 0
    for _, units, unit in order:
        if len(left[units]) > 1 and gone + units.parameters / 2 <= target:
            left[units].discard(unit)
            gone += units.parameters
    return tuple((units, tuple(sorted(kept))) for units, kept in left.items() if len(kept) < units.size)


def unit_scores(units: Units, channels: torch.Tensor, *, mean: bool) -> torch.Tensor:
    """Return the sum or mean of the scores of each unit's input channels."""
    rows = torch.tensor([list(units.columns([unit])) for unit in range(units.size)])
    by_unit = channels[rows]
    return by_unit.mean(1) if mean else by_unit.sum(1)


def lost_columns(kept: Kept) -> Sequence[tuple[Units, torch.Tensor]]:
    """Return the inputs that each narrowed reader loses."""
    return [
        (units, torch.tensor(list(units.columns(set(range(units.size)) - set(rest))), dtype=torch.long))
        for units, rest in kept
    ]
