"""The walk to ever smaller shapes of the free layout: each block has its own size, as what was measured says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from collapse.search.map_trials import MapTrials
from collapse.search.measure import Judge
from collapse.search.memory import Memory
from collapse.search.options import MapTrial, added_cost, allocate_with_maps, keeping_one
from collapse.search.shapes import Prices, Shape, Uneven
from collapse.search.sweep import Sweep, Swept
from collapse.search.trials import Trial, Trials
from collapse.search.units import Units
from collapse.search.walk import Point, lost_of

FURTHER = 8  # times that more is asked of one size, until the other sizes are met

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class FreeWalk:
    """What a walk needs, as of `collapse.search.walk.Walk`; trials say what each block costs, tried once.

    `attentions` counts the sublayers of the model that attend, of which one has to stay.
    """

    sweep: Sweep
    judge: Judge
    prices: Mapping[str, Prices]
    units: Sequence[Units]
    trials: Trials
    maps: MapTrials
    attentions: int
    progress: Progress
    memory: Memory

    @property
    def in_steps(self) -> bool:
        """Whether a shape depends on the one before: here none does."""
        return False

    @cached_property
    def costs(self) -> tuple[Trial, ...]:
        """What each block's units cost alone."""
        return self.trials.run(lambda done, of: self.progress("trying blocks one by one", done, of), self.memory)

    @cached_property
    def map_costs(self) -> tuple[MapTrial, ...]:
        """What maps cost alone that may all be taken together."""
        found = self.maps.run(lambda done, of: self.progress("trying maps one by one", done, of), self.memory)
        return keeping_one(found, self.attentions)

    def points(self, levels: Iterable[Mapping[str, float]], allowed: Callable[[Shape], bool]) -> Iterator[Point]:
        """Yield the shape of each level, ever smaller; ends where all that may go is not enough."""
        for level in levels if self.units or self.maps.kinds else ():
            shape = self.shape(level)
            if shape is None or not allowed(shape):
                return
            yield self._point(shape)

    def _point(self, shape: Uneven) -> Point:
        what = f"fitting with {self.prices['params'].share(shape):.1%} of the parameters"

        def fit() -> Swept:
            return self.sweep.run(shape.kept, (), lambda done, of: self.progress(what, done, of), shape.maps)

        return Point.measured(shape, lost_of(shape, self.units), 1, fit, self.judge, self.memory)

    def shape(self, level: Mapping[str, float]) -> Uneven | None:
        """Return the shape for the size that costs most to meet, if it meets the others too, more of it going if not.

        Units are worth as many parameters in each size, maps are not: attention takes FLOPs that no parameter counts.
        """
        found = [shape for metric in level if (shape := self._reaching(metric, level)) is not None]
        return min(found, key=lambda one: added_cost(self.costs, self.map_costs, one), default=None)

    def _reaching(self, metric: str, level: Mapping[str, float]) -> Uneven | None:
        """Return a shape that has enough of one size gone for all sizes to be met."""
        prices = self.prices[metric]
        worth = {one: prices.saved(one.place, one.kind) / prices.parameter for one in self.map_costs}
        share = level[metric]
        for _ in range(FURTHER):
            wanted = (1 - share) * prices.total / prices.parameter
            shape = allocate_with_maps(self.costs, self.map_costs, wanted, worth)
            over = max(self.prices[name].share(shape) - limit for name, limit in level.items())
            if over <= 1e-9:
                return shape
            share -= over
        return None
