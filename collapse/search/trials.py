"""What each block's units cost by how many of them go: every block tried alone, at several sizes, refitted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collapse.analysis.block_runs import BlockRuns
from collapse.analysis.layer_search import BATCH
from collapse.analysis.layers import Layers
from collapse.search.calls import block_calls, watched
from collapse.search.least_squares import RIDGE, Normal, eliminations, normal_equations, pulled
from collapse.search.surgery import copy_sharing, narrow_units, put
from collapse.search.sweep import ROWS, Reader
from collapse.search.units import Units

FRACTIONS = (0.25, 0.625)  # of a block's units that are tried without
BETWEEN = 32  # sizes at which the cost is interpolated, evenly over all units
LEAST = 1e-9  # nats: powers have no other way through zero

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Trial:
    """One size of one block's units, tried or estimated, and the KL divergence that it costs alone, nats a token."""

    units: Units
    kept: int
    kl: float


@dataclass(frozen=True)
class Trials:
    """Tries on `model`: fitted to the windows `fitting`, measured on `choosing`, token ids [sequences, tokens]."""

    model: PreTrainedModel
    layers: Layers
    units: Sequence[Units]
    fitting: Tensor
    choosing: Tensor
    ridge: float = RIDGE

    def run(self, progress: Progress) -> tuple[Trial, ...]:
        """Return what all units cost at several sizes, tried or in between; at full size they cost nothing."""
        runs = BlockRuns(self.model, self.layers.site)
        before = [_Source.of(runs, ids) for ids in torch.split(self.choosing, BATCH)]
        found: list[Trial] = []
        for done, (units, normal) in enumerate(self._normals(), 1):
            parts = [tuple(units.columns([unit])) for unit in range(units.size)]
            tried = []
            for kept in eliminations(normal, parts, sizes_of(units)):
                smaller = self._narrowed(units, normal, kept)
                tried.append(Trial(units, len(kept), self._kl(smaller, units.block, before)))
            found += in_between(tried)
            progress(done, len(self.units))
        return tuple(found)

    def _normals(self) -> Iterator[tuple[Units, Normal]]:
        """Yield the pulled normal equations of every reader on the source's own stream."""
        blocks = list(self.model.get_submodule(self.layers.site).children())
        starts, calls = zip(
            *(block_calls(self.model, blocks, ids) for ids in torch.split(self.fitting, ROWS)), strict=True
        )
        streams = list(starts)
        for number, block in enumerate(blocks):
            units = [one for one in self.units if one.block == number]
            with watched(self.model, [one.reader for one in units]) as seen:
                streams = [call[number](block, stream) for call, stream in zip(calls, streams, strict=True)]
            for one in units:
                reader = Reader.of(self.model, one)
                pairs = ((reader.extended(x), y) for x, y in seen[one.reader])
                yield one, pulled(normal_equations(pairs), reader.matrix, self.ridge)

    def _narrowed(self, units: Units, normal: Normal, kept: Sequence[int]) -> PreTrainedModel:
        smaller = copy_sharing(self.model)
        reader = Reader.of(smaller, units)
        columns = torch.tensor([*units.columns(kept), *range(reader.inputs, reader.matrix.shape[1])])
        narrow_units(smaller, units, kept)
        for name, tensor in reader.tensors(normal.solve(columns).float()).items():
            put(smaller, name, tensor)
        return smaller

    def _kl(self, smaller: PreTrainedModel, block: int, before: Sequence[_Source]) -> float:
        tried = BlockRuns(smaller, self.layers.site)
        total = sum(one.kl(tried.run(one.ids, start=block, state=one.states[block]).logits) for one in before)
        return total / self.choosing.numel()


@dataclass(frozen=True)
class _Source:
    """The source on a batch of ids [n, tokens]: its stream before every block, and log-probabilities [n * tokens, ids].

    These are kept, since they are needed for every trial.
    """

    ids: Tensor
    states: Mapping[int, Tensor]
    says: Tensor

    @classmethod
    def of(cls, runs: BlockRuns, ids: Tensor) -> _Source:
        seen = runs.run(ids)
        return cls(ids, seen.states, seen.logits.flatten(0, -2).float().log_softmax(-1))

    def kl(self, logits: Tensor) -> float:
        """Return the KL divergence of what the source says from other logits, summed over tokens, nats."""
        found = logits.flatten(0, -2).float().log_softmax(-1)
        rows = zip(torch.split(self.says, ROWS), torch.split(found, ROWS), strict=True)
        return sum(float(nn.functional.kl_div(q, p, reduction="sum", log_target=True)) for p, q in rows)


def in_between(tried: Sequence[Trial]) -> tuple[Trial, ...]:
    """Return trials of one block's units with estimates of further sizes, down to the smallest tried, descending.

    The cost grows as a power of how many units go: between two trials that of both, and before the first the power of
    the first two, if it is at least one. Without two trials nothing is added.
    """
    known = {one.units.size - one.kept: one for one in tried}
    if len(known) < 2:
        return tuple(tried)
    units, lost = tried[0].units, sorted(known)
    places = {round(units.size * n / BETWEEN) for n in range(1, BETWEEN)} - {0}
    for place in places - known.keys():
        if place < lost[-1]:
            after = max(1, next(n for n, one in enumerate(lost) if one > place))
            low, high = lost[after - 1], lost[after]
            power = math.log(_cost(known[high]) / _cost(known[low])) / math.log(high / low)
            power = power if place > low else max(1.0, power)
            known[place] = Trial(units, units.size - place, _cost(known[low]) * (place / low) ** power)
    return tuple(known[place] for place in sorted(known))


def _cost(trial: Trial) -> float:
    return max(LEAST, trial.kl)


def sizes_of(units: Units) -> tuple[int, ...]:
    """Return how many units are kept in each trial, descending; at least one."""
    kept = {units.size - max(1, round(fraction * units.size)) for fraction in FRACTIONS}
    return tuple(sorted((size for size in kept if size > 0), reverse=True))
