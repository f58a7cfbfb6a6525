"""Notes what a search goes through, as `collapse.search_path` has it: the points alone, not their models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from collapse.analysis.flops import Cost
from collapse.canonical import digest
from collapse.certify.certificate import Bound, Certificate
from collapse.certify.losses import SequenceLoss
from collapse.passes.shrink_evidence import total_losses
from collapse.passes.shrink_task import Task
from collapse.search.shapes import Uneven
from collapse.search.walk import Point
from collapse.search_path import HeldBound, Losses, PathPoint, SearchPath, Sizes


@dataclass
class Trail:
    """The points so far, in the order in which they were found."""

    task: Task
    moves: Sequence[str]
    points: list[PathPoint] = field(default_factory=list)

    def noted(self, points: Iterable[Point]) -> Iterator[Point]:
        """Yield the points, and note each."""
        for point in points:
            self._walked(point)
            yield point

    def _walked(self, point: Point) -> None:
        shares = {metric: prices.share(point.shape) for metric, prices in self.task.walk.prices.items()}
        self.points.append(
            PathPoint(
                dropped=point.shape.gone,
                lost=dict(point.lost),
                by_block=_by_block(point),
                maps={place.site: str(kind) for place, kind in point.maps.items()},
                shares=rounded(shares),
                kl=point.kl,
                tried=point.tried,
            )
        )

    def judged(self, losses: Iterable[SequenceLoss]) -> list[SequenceLoss]:
        """Return what the last point loses on held-out text, and note it."""
        found = list(losses)
        self._change(-1, held_out=Losses.model_validate(total_losses(found)))
        return found

    def tested(self, tests: Sequence[Certificate]) -> None:
        """Note the bounds of as many points from the first one on."""
        for number, test in enumerate(tests):
            self._change(number, bounds=tuple(map(_bound, test.bounds)))

    def counted(self, number: int, sizes: Mapping[str, float]) -> None:
        """Note what was counted in the graph of a point."""
        self._change(number, counted=rounded(sizes))

    def taken(self, number: int) -> None:
        """Note which point is taken."""
        self._change(number, taken=True)

    def path(self) -> SearchPath:
        """Return all of it."""
        context = self.task.context
        return SearchPath(
            layout=context.layout,
            moves=tuple(self.moves),
            budgets=tuple(map(str, context.budgets)),
            choosing=digest(self.task.walk.judge.windows.tolist()),
            held_out=digest(self.task.judge.windows.tolist()),
            before=_sizes(self.task.source_cost()),
            points=tuple(self.points),
        )

    def _change(self, number: int, **fields: object) -> None:
        self.points[number] = self.points[number].model_copy(update=fields)


def rounded(shares: Mapping[str, float]) -> dict[str, float]:
    """Return shares to a millionth, as evidence has them."""
    return {metric: round(share, 6) for metric, share in shares.items()}


def _sizes(cost: Cost) -> Sizes:
    figures = cost.figures()
    return Sizes(**{name: figures[name] for name in Sizes.model_fields})


def _by_block(point: Point) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    if isinstance(point.shape, Uneven):
        for units, kept in point.shape.kept.items():
            blocks = found.setdefault(units.kind, {})
            blocks[units.block] = blocks.get(units.block, 0) + units.size - kept
    return found


def _bound(bound: Bound) -> HeldBound:
    return HeldBound(metric=bound.metric, limit=bound.limit, at_most=bound.at_most, met=bound.met)
