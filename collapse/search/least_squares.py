"""Least squares between what a weight reads and what it should write, and which of its inputs can go.

All is said with normal equations, so the text is run once, whatever is tried on it afterwards. Few tokens of narrow
text span only a part of the input space, and a plain solution is then free to do anything elsewhere. So every solution
is pulled towards the source's weight, each input as strongly as its own energy (a generalised ridge): on text of one
kind the fit decides, elsewhere the source does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 0.3  # of each input's own energy; less lets a fit to few systems' logs run away on those of others
FLOOR = 1e-4  # of the mean energy, so that an input that is never used keeps the source's column
ROUNDS = 24  # of elimination: what goes in one round is judged together, before the rest is solved again


EPS = 1e-6  # beside the mean square of what is written, as norms have it

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Weighing:
    """How errors in what a module writes count.

    Attributes:
        factor: L [out, out] of the metric L L^T of an error; without one all outputs count alike.
        relative: an error counts by the size of what is written at its token, as it does behind a norm.
    """

    factor: Tensor | None = None
    relative: bool = False

    def rows(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """Yield inputs [..., in] and outputs [..., out] so that the errors of all tokens count alike."""
        for inputs, outputs in pairs:
            if self.relative:
                size = (outputs.float().square().mean(-1, keepdim=True) + EPS).sqrt()
                yield inputs / size, outputs / size
            else:
                yield inputs, outputs


Metric = Callable[[str], Weighing]  # by the path of the module that writes


def plain(_: str) -> Weighing:
    """Let all that a module writes count alike."""
    return Weighing()


@dataclass(frozen=True)
class Normal:
    """Normal equations of `Y = X W^T`: `gram` is X^T X, [in, in], `cross` is X^T Y, [in, out]; double."""

    gram: Tensor
    cross: Tensor

    def solve(self, kept: Tensor) -> Tensor:
        """Return the weight [out, kept inputs] of least squares that reads only the inputs `kept`."""
        found: Tensor = torch.linalg.solve(self.gram[kept][:, kept], self.cross[kept]).T
        return found

    def seen_by(self, factor: Tensor | None) -> Normal:
        """Return the equations of `Y L`, whose residuals count as the metric L L^T has it; `factor` is L [out, out]."""
        return self if factor is None else Normal(self.gram, self.cross @ factor.double())


def normal_equations(pairs: Iterable[Pair]) -> Normal:
    """Add up tokens given as pairs of inputs [..., in] and outputs [..., out]; one pair at least."""
    gram: Tensor | None = None
    cross: Tensor | None = None
    for inputs, outputs in pairs:
        x, y = inputs.flatten(0, -2).float(), outputs.flatten(0, -2).float()
        one, other = (x.T @ x).double(), (x.T @ y).double()
        gram, cross = (one, other) if gram is None or cross is None else (gram + one, cross + other)
    assert gram is not None and cross is not None
    return Normal(gram, cross)


def pulled(normal: Normal, weight: Tensor, ridge: float = RIDGE) -> Normal:
    """Return the normal equations with a pull of `ridge` towards `weight` [out, in]."""
    energy = normal.gram.diagonal()
    pull = ridge * energy + (FLOOR * energy.mean()).clamp(min=torch.finfo(energy.dtype).tiny)
    return Normal(normal.gram + torch.diag(pull), normal.cross + pull[:, None] * weight.double().T)


def eliminate(normal: Normal, units: Sequence[Sequence[int]], keep: int) -> tuple[int, ...]:
    """Return which `keep` of the `units` the fit needs most, ascending; see `eliminations`."""
    return next(eliminations(normal, units, [keep]))


def eliminations(normal: Normal, units: Sequence[Sequence[int]], sizes: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Yield for each of the descending `sizes` which of the units the fit needs most, ascending.

    The units are disjoint sets of as many inputs each; inputs in none of them stay. Backward elimination by what the
    residual grows by when a unit goes and the rest is solved again (the generalised optimal brain surgeon:
    tr(W_u^T (P_uu)^-1 W_u), with P the inverse of the gram matrix).
    """
    columns = torch.tensor([list(unit) for unit in units])
    inverse = torch.linalg.inv(normal.gram)
    weight = (inverse @ normal.cross).float()  # [in, out]
    inverse = inverse.float()
    alive = torch.ones(len(columns), dtype=torch.bool)
    for size in sizes:
        left = int(alive.sum()) - size
        each = max(1, -(-left // ROUNDS))
        while left > 0:
            costs = torch.where(alive, _costs(inverse, weight, columns), torch.inf)
            gone = costs.argsort(stable=True)[: min(each, left)]
            alive[gone] = False
            inverse, weight = _without(inverse, weight, columns[gone].flatten())
            left -= len(gone)
        yield tuple(alive.nonzero().flatten().tolist())


def _costs(inverse: Tensor, weight: Tensor, columns: Tensor) -> Tensor:
    """Return what the residual grows by for each unit alone, [units]."""
    if columns.shape[1] == 1:
        flat = columns.flatten()
        return weight[flat].square().sum(1) / inverse.diagonal()[flat]
    inner = inverse[columns[:, :, None], columns[:, None, :]]  # [units, width, width]
    block = weight[columns]  # [units, width, out]
    solved: Tensor = torch.linalg.solve(inner, block)
    return (block * solved).sum((1, 2))


def _without(inverse: Tensor, weight: Tensor, gone: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverse and the solution once some inputs are gone, whose own rows are then those of a unit matrix."""
    across = inverse[:, gone]
    inner = torch.linalg.inv(inverse[gone][:, gone])
    weight = weight - across @ (inner @ weight[gone])
    inverse = inverse - across @ inner @ across.T
    weight[gone] = 0
    inverse[gone], inverse[:, gone] = 0, 0
    inverse[gone, gone] = 1
    return inverse, weight
