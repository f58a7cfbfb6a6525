"""The walk to ever smaller shapes of the free layout: each block has its own size, as what was measured says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from collapse.search.allocate import allocate
from collapse.search.measure import Judge
from collapse.search.shapes import Prices, Shape, Uneven
from collapse.search.sweep import Sweep
from collapse.search.trials import Trial, Trials
from collapse.search.units import Units
from collapse.search.walk import Point

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class FreeWalk:
    """What a walk needs, as of `collapse.search.walk.Walk`; `trials` say what each block costs, tried once."""

    sweep: Sweep
    judge: Judge
    prices: Mapping[str, Prices]
    units: Sequence[Units]
    trials: Trials
    progress: Progress

    @property
    def in_steps(self) -> bool:
        """Whether a shape depends on the one before: here none does."""
        return False

    @cached_property
    def costs(self) -> tuple[Trial, ...]:
        """What each block's units cost alone."""
        return self.trials.run(lambda done, of: self.progress("trying blocks one by one", done, of))

    def points(self, levels: Iterable[Mapping[str, float]], allowed: Callable[[Shape], bool]) -> Iterator[Point]:
        """Yield the shape of each level, ever smaller; ends where all that may go is not enough."""
        for level in levels if self.units else ():
            shape = Uneven(kept=allocate(self.costs, self._parameters(level)))
            reached = all(self.prices[metric].share(shape) <= share + 1e-9 for metric, share in level.items())
            if not reached or not allowed(shape):
                return
            yield self._point(shape)

    def _point(self, shape: Uneven) -> Point:
        what = f"fitting with {self.prices['params'].share(shape):.1%} of the parameters"
        swept = self.sweep.run(shape.kept, (), lambda done, of: self.progress(what, done, of))
        return Point(shape, swept, self.judge.kl(swept.model), 1)

    def _parameters(self, level: Mapping[str, float]) -> float:
        """Return how many parameters have to go; units cost each size in the same proportion."""
        one = self.units[0]
        each = ((self.prices[metric], share) for metric, share in level.items())
        return max((1 - share) * prices.total / prices.unit[one.kind] * one.parameters for prices, share in each)
