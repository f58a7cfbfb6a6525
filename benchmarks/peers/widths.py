"""Which units go so that a share of the decoder's parameters goes, by scores: lower goes first, one stays in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from benchmarks.peers.structure import Units

Scores = Mapping[Units, torch.Tensor]  # one score a unit
Kept = tuple[tuple[Units, tuple[int, ...]], ...]


def uniform(scores: Scores, share: float, target: float) -> Kept:
    """Take from every block as many units, and as many KV groups as come nearest to `share` of them.

    The neurons make up what is left of `target` parameters; where it is not a whole number of neurons a block, the
    first blocks lose one more.
    """
    heads = {units: round(share * units.size) for units in scores if units.kind == "kv-groups"}
    losses = {units: min(lost, units.size - 1) for units, lost in heads.items()}
    neurons = [units for units in scores if units.kind == "neurons"]
    rest = max(0.0, target - sum(lost * units.parameters for units, lost in losses.items()))
    total = round(rest / neurons[0].parameters) if neurons else 0
    each, more = divmod(total, max(1, len(neurons)))
    losses |= {units: min(units.size - 1, each + (place < more)) for place, units in enumerate(neurons)}
    return tuple((units, _best(scores[units], units.size - lost)) for units, lost in losses.items() if lost)


def _best(scores: torch.Tensor, count: int) -> tuple[int, ...]:
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
