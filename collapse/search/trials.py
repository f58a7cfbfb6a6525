"""What each block's units cost by how many of them go: every block tried alone, at several sizes, refitted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collapse.analysis.layers import Layers
from collapse.search.alone import Alone, readings
from collapse.search.least_squares import RIDGE, Metric, Normal, eliminations, normal_equations, plain, pulled
from collapse.search.memory import Memory
from collapse.search.surgery import copy_sharing, narrow_units, put
from collapse.search.sweep import Reader
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
    metric: Metric = plain

    def run(self, progress: Progress, memory: Memory | None = None) -> tuple[Trial, ...]:
        """Return what all units cost at several sizes, tried or in between; at full size they cost nothing.

        What `memory` knows is not tried.
        """
        if not self.units:
            return ()
        memory, alone = memory or Memory.empty(), Alone.of(self.model, self.layers, self.choosing)
        found: list[Trial] = []
        for done, (units, normal) in enumerate(self._normals(), 1):
            costs = memory.kl(("alone", units), partial(self._tried, alone, units, normal))
            tried = [Trial(units, kept, kl) for kept, kl in zip(sizes_of(units), costs, strict=True)]
            found += in_between([one for one in tried if math.isfinite(one.kl)])
            progress(done, len(self.units))
        return tuple(found)

    def _tried(self, alone: Alone, units: Units, normal: Normal) -> Iterator[float]:
        parts = [tuple(units.columns([unit])) for unit in range(units.size)]
        for kept in eliminations(normal.seen_by(self.metric(units.reader).factor), parts, sizes_of(units)):
            yield alone.kl(self._narrowed(units, normal, kept), units.block)

    def _normals(self) -> Iterator[tuple[Units, Normal]]:
        """Yield the pulled normal equations of every reader on the source's own stream."""
        by_reader = {one.reader: one for one in self.units}
        paths: dict[int, list[str]] = {}
        for one in self.units:
            paths.setdefault(one.block, []).append(one.reader)
        for path, pairs in readings(self.model, self.layers, self.fitting, paths):
            units, reader = by_reader[path], Reader.of(self.model, by_reader[path])
            extended = self.metric(path).rows((reader.extended(x), y) for x, y in pairs)
            yield units, pulled(normal_equations(extended), reader.matrix, self.ridge)

    def _narrowed(self, units: Units, normal: Normal, kept: Sequence[int]) -> PreTrainedModel:
        smaller = copy_sharing(self.model)
        reader = Reader.of(smaller, units)
        columns = torch.tensor([*units.columns(kept), *range(reader.inputs, reader.matrix.shape[1])])
        narrow_units(smaller, units, kept)
        for name, tensor in reader.tensors(normal.solve(columns).float()).items():
            put(smaller, name, tensor)
        return smaller


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
