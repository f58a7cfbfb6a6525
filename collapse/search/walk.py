"""The walk to ever smaller native shapes: at each size the best of a few neighbours, all refitted and measured.

Shapes of one size are compared at that size: with the blocks, KV groups and experts of the size before, with one more
block gone, with one more KV group gone from every block, and with fewer experts in every mixture; neurons make up the
rest. What was fitted is measured on other
text, since a fit says little about its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from collapse.search.maps import MapKind
from collapse.search.measure import Judge
from collapse.search.memory import Memory
from collapse.search.mixtures import Mixtures
from collapse.search.places import Place
from collapse.search.shapes import Prices, Shape, Uneven
from collapse.search.sweep import Sweep, Swept
from collapse.search.units import Units

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Point:
    """One point of the path: a shape, and its mean KL divergence on the text that chose, nats.

    `lost` counts the units that it is without, by kind, all blocks together; those of dropped blocks do not count.
    """

    shape: Shape
    fit: Callable[[], Swept]
    kl: float
    tried: int
    lost: Mapping[str, int]

    @property
    def maps(self) -> Mapping[Place, MapKind]:
        """What stands in for sublayers, in the free layout."""
        return self.shape.maps if isinstance(self.shape, Uneven) else {}

    @cached_property
    def swept(self) -> Swept:
        """The model, fitted when it is first asked for."""
        return self.fit()

    @classmethod
    def measured(
        cls, shape: Shape, lost: Mapping[str, int], tried: int, fit: Callable[[], Swept], judge: Judge, memory: Memory
    ) -> Point:
        """Return the point of a shape; where its divergence is known, no model is fitted."""
        point = cls(shape, fit, 0.0, tried, lost)
        (kl,) = memory.kl(shape, lambda: [judge.kl(point.swept.model)])
        found = replace(point, kl=kl)
        if "swept" in vars(point):
            vars(found)["swept"] = point.swept
        return found


def lost_of(shape: Shape, units: Sequence[Units], mixtures: Mixtures | None = None) -> dict[str, int]:
    """Return how many units of each kind a shape is without, in the order in which blocks run them, experts last."""
    sizes, found = shape.sizes(units), dict[str, int]()
    for one in units:
        if sizes.get(one, one.size) < one.size:
            found[one.kind] = found.get(one.kind, 0) + one.size - sizes[one]
    if mixtures is not None and (lost := mixtures.count(shape.lost.get("experts", 0), shape.gone)):
        found["experts"] = lost
    return found


class Order:
    """Blocks in the order in which they may go, from ever larger sets of dropped ones; each is found when asked for."""

    def __init__(self, dropped: Iterable[Sequence[int]]) -> None:
        self._dropped, self._found = iter(dropped), list[int]()

    def after(self, gone: int) -> int | None:
        """Return the block that goes after the first `gone` ones; None where no further one can go."""
        while len(self._found) <= gone and (more := next(self._dropped, None)) is not None:
            self._found += [block for block in more if block not in self._found]
        return self._found[gone] if gone < len(self._found) else None


@dataclass(frozen=True)
class Walk:
    """What a walk needs: `units` may be narrowed, blocks go in this `order`, experts are those of the `mixtures`."""

    sweep: Sweep
    judge: Judge
    prices: Mapping[str, Prices]
    units: Sequence[Units]
    order: Order
    progress: Progress
    memory: Memory
    mixtures: Mixtures | None = None

    @property
    def in_steps(self) -> bool:
        """Whether a shape depends on the one before: not where neurons alone may go."""
        return self.mixtures is not None or self.order.after(0) is not None or self._size("kv-groups") > 1

    def points(self, levels: Iterable[Mapping[str, float]], allowed: Callable[[Shape], bool]) -> Iterator[Point]:
        """Yield the best shape for each level, ever smaller; ends where none is found.

        A level says of some sizes what share of them may be left; `allowed` whether the architecture can have a shape.
        """
        before = Shape()
        for level in levels:
            shapes = [shape for shape in self._neighbours(before, level) if allowed(shape)]
            if not shapes:
                return
            best = min((self._point(shape, len(shapes)) for shape in shapes), key=lambda point: point.kl)
            yield best
            before = best.shape

    def shape(self, level: Mapping[str, float]) -> Shape | None:
        """Return the shape of a level that needs no measuring to be chosen, as without steps."""
        return self._filled(Shape(), level)

    def _neighbours(self, before: Shape, level: Mapping[str, float]) -> Iterator[Shape]:
        """Yield shapes at most as large as the level, each once."""
        tried: list[Shape] = []
        for start in self._starts(before):
            shape = self._filled(start, level)
            if shape is not None and shape not in tried:
                tried.append(shape)
                yield shape

    def _starts(self, before: Shape) -> Iterator[Shape]:
        yield before
        if self.mixtures is not None:
            gone = before.lost.get("experts", 0)
            experts = min(gone + self.mixtures.step, self.mixtures.most)
            if experts > gone and self.mixtures.count(1, before.gone):
                yield before.with_lost("experts", experts)
        block = self.order.after(len(before.gone))
        if block is not None:
            yield before.without(block)
        groups = before.lost.get("kv-groups", 0) + 1
        if groups < self._size("kv-groups"):
            yield before.with_lost("kv-groups", groups)

    def _filled(self, shape: Shape, level: Mapping[str, float]) -> Shape | None:
        """Return the shape with just enough neurons gone; where those are not enough, with what else may go.

        That is experts as long as there are some, then blocks, then groups.
        """
        neurons = self._size("neurons")
        while True:
            if neurons:
                lost = max(self.prices[metric].least_lost(shape, "neurons", share) for metric, share in level.items())
                if lost < neurons:
                    return shape.with_lost("neurons", lost)
            elif all(self.prices[metric].share(shape) <= share for metric, share in level.items()):
                return shape
            further = [one for one in self._starts(shape) if one != shape]
            if not further:
                return None
            shape = further[0]

    def _size(self, kind: str) -> int:
        return next((one.size for one in self.units if one.kind == kind), 0)

    def _point(self, shape: Shape, tried: int) -> Point:
        what = f"fitting with {self.prices['params'].share(shape):.1%} of the parameters"

        def fit() -> Swept:
            sizes = shape.sizes(self.units)
            fewer = shape.lost.get("experts", 0)
            start = self.mixtures.without(fewer) if self.mixtures is not None and fewer else None
            return self.sweep.run(sizes, shape.gone, lambda done, of: self.progress(what, done, of), start=start)

        lost = lost_of(shape, self.units, self.mixtures)
        return Point.measured(shape, lost, tried, fit, self.judge, self.memory)
