"""Maps that stand in for a sublayer, in closed form: least squares of what it gives on what enters it.

All are said with the same normal equations, as the refits of `collapse.search.least_squares` are. There is no weight of
the source to be pulled towards, so the pull is towards none: of the map's weight, each input as strongly as a share of
its own energy. What the sublayer gives on average is the bias's, and is not pulled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from collapse.models.rebuild import StandIn
from collapse.plan import Map
from collapse.search.least_squares import Normal, normal_equations, pulled
from collapse.search.places import Place

RIDGE = 0.1  # of each input's own energy; what cost least, or nearly, on systems whose logs were not fitted to
RANKS = (4, 8)  # of the width one in so many


@dataclass(frozen=True)
class MapKind:
    """Which map, as of `collapse.plan.StandIn`; `rank` is that of a low-rank one."""

    by: Map
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.by} of rank {self.rank}" if self.rank else self.by

    def shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the map's tensors for `width` channels."""
        if self.by == "zero":
            return {}
        if self.by == "low-rank":
            return {"down": (self.rank, width), "up": (width, self.rank), "bias": (width,)}
        return {"bias": (width,)} if self.by == "constant" else {"weight": (width, width), "bias": (width,)}

    def parameters(self, width: int) -> int:
        """Return how many parameters it has."""
        return sum(torch.Size(shape).numel() for shape in self.shapes(width).values())


def kinds_for(place: Place, moves: Collection[str]) -> tuple[MapKind, ...]:
    """Return the maps to try in a place, from the mildest to the hardest: those that hold less than it does."""
    found: list[MapKind] = []
    if "stand-in" in moves:
        ranks = dict.fromkeys(place.width // part for part in RANKS if place.width >= part)
        found += [MapKind("linear"), *(MapKind("low-rank", rank) for rank in ranks)]
    if "sublayers" in moves:
        found += [MapKind("constant"), MapKind("zero")]
    return tuple(kind for kind in found if kind.parameters(place.width) < place.parameters)


@dataclass(frozen=True)
class Fit:
    """Least squares with an unpulled bias between inputs and outputs of one width.

    `normal` is about their deviations from the means `entering` and `given`, [width]; all double.
    """

    normal: Normal
    entering: Tensor
    given: Tensor

    @classmethod
    def of(cls, pairs: Iterable[tuple[Tensor, Tensor]], ridge: float = RIDGE) -> Fit:
        """Add up tokens given as pairs of inputs and outputs, [..., width] each."""
        with_one = ((torch.cat([x, torch.ones_like(x[..., :1])], -1), y) for x, y in pairs)
        normal = normal_equations(with_one)
        count = normal.gram[-1, -1]
        entering, given = normal.gram[-1, :-1] / count, normal.cross[-1] / count
        centred = Normal(
            normal.gram[:-1, :-1] - count * torch.outer(entering, entering),
            normal.cross[:-1] - count * torch.outer(entering, given),
        )
        return cls(pulled(centred, torch.zeros_like(centred.cross.T), ridge), entering, given)

    @cached_property
    def weight(self) -> Tensor:
        """The solution of full rank, [width, width]: outputs by inputs."""
        return self.normal.solve(torch.arange(len(self.entering)))

    @cached_property
    def directions(self) -> Tensor:
        """Directions of the outputs as columns, those first in which the fitted outputs have most energy.

        The right singular vectors of the fitted outputs, the pull's own rows among them: of `W gram W^T = W cross`.
        """
        energy = self.weight @ self.normal.cross
        found: Tensor = torch.linalg.eigh((energy + energy.T) / 2).eigenvectors.flip(1)
        return found

    def tensors(self, kind: MapKind) -> dict[str, Tensor]:
        """Return a map's tensors by their part, fp32; that of low rank is by reduced-rank regression."""
        if kind.by == "zero":
            return {}
        if kind.by == "constant":
            return {"bias": self.given.float()}
        if kind.by == "linear":
            return {"weight": self.weight.float(), "bias": (self.given - self.weight @ self.entering).float()}
        up = self.directions[:, : kind.rank]
        down = up.T @ self.weight
        found = {"down": down, "up": up, "bias": self.given - up @ (down @ self.entering)}
        return {part: tensor.float().contiguous() for part, tensor in found.items()}


def module_of(place: Place, kind: MapKind, tensors: dict[str, Tensor]) -> StandIn:
    """Return the module that the loader would make of a map, with its tensors."""
    made = StandIn(kind.by, kind.shapes(place.width), place.outputs)
    for part, tensor in tensors.items():
        setattr(made, part, nn.Parameter(tensor, requires_grad=False))
    return made
