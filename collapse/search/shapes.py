"""Native shapes of a model: how many blocks it has, and how many units of each kind every block keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from collapse.analysis.units import Kind
from collapse.search.maps import MapKind
from collapse.search.places import Place
from collapse.search.units import Units

KINDS: tuple[Kind, ...] = ("kv-groups", "neurons")
Lost = Literal["neurons", "kv-groups", "experts"]


@dataclass(frozen=True)
class Shape:
    """`gone` blocks are dropped; of each kind in `lost` every other block that has some loses so many units."""

    gone: tuple[int, ...] = ()
    lost: Mapping[Lost, int] = field(default_factory=dict)

    def with_lost(self, kind: Lost, count: int) -> Shape:
        """Return the shape with another number of lost units of one kind."""
        return Shape(self.gone, {**self.lost, kind: count})

    def without(self, block: int) -> Shape:
        """Return the shape with one block fewer."""
        return Shape(tuple(sorted((*self.gone, block))), self.lost)

    def sizes(self, units: Sequence[Units]) -> dict[Units, int]:
        """Return how many units are kept where some are lost."""
        kept = {one: one.size - self.lost.get(one.kind, 0) for one in units if one.block not in self.gone}
        return {one: size for one, size in kept.items() if size < one.size}


@dataclass(frozen=True)
class Uneven(Shape):
    """A shape of the free layout: no block is dropped, and each keeps its own number of units, as `kept` says.

    In the places of `maps` maps stand in for sublayers, units and all.
    """

    kept: Mapping[Units, int] = field(default_factory=dict)
    maps: Mapping[Place, MapKind] = field(default_factory=dict)

    def sizes(self, units: Sequence[Units]) -> dict[Units, int]:
        """Return how many units are kept where some are lost."""
        return dict(self.kept)


@dataclass(frozen=True)
class Prices:
    """What one size of a model (parameters, FLOPs or bytes) is made of.

    `total` is the source's, `blocks` has that of each block; `unit` that of one unit of each kind in one block, `place`
    that of each sublayer, by its path, and `parameter` that of a parameter of a map. `mixed` are the blocks that have
    experts; units of other kinds are in all.
    """

    total: float
    blocks: tuple[float, ...]
    unit: Mapping[Lost, float]
    mixed: frozenset[int] = frozenset()
    place: Mapping[str, float] = field(default_factory=dict)
    parameter: float = 1.0

    def saved(self, place: Place, kind: MapKind) -> float:
        """Return what goes of the size where a map stands in for a sublayer."""
        return self.place[place.site] - self.parameter * kind.parameters(place.width)

    def share(self, shape: Shape) -> float:
        """Return what a shape leaves of the size, as a share of the source's."""
        if isinstance(shape, Uneven):
            lost = sum((one.size - size) * self.unit[one.kind] for one, size in shape.kept.items())
            lost += sum(self.saved(place, kind) for place, kind in shape.maps.items())
            return (self.total - lost) / self.total
        dropped = sum(self.blocks[block] for block in shape.gone)
        narrowed = sum(self.unit[kind] * count * self._holding(kind, shape) for kind, count in shape.lost.items())
        return (self.total - dropped - narrowed) / self.total

    def least_lost(self, shape: Shape, kind: Lost, share: float) -> int:
        """Return how many units of a kind every block must lose for at most `share` of the size to be left."""
        over = (self.share(shape.with_lost(kind, 0)) - share) * self.total
        return max(0, math.ceil(over / (self._holding(kind, shape) * self.unit[kind]) - 1e-9))

    def _holding(self, kind: Lost, shape: Shape) -> int:
        """Return how many of the blocks that stay have units of a kind."""
        left = set(range(len(self.blocks))) - set(shape.gone)
        return len(left & self.mixed) if kind == "experts" else len(left)
