"""Shapes of a dynamic graph as expressions in the sizes of a call, so that two sizes can be compared for every call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx

from collapse.program import Program

Shape = tuple[sympy.Expr, ...]
BATCH, NEW = sympy.symbols("batch new", positive=True, integer=True)
PAST = sympy.Symbol("past", nonnegative=True, integer=True)
# The last rows of a prefill that are computed where one is needed. Products of fewer than four rows run in other CPU
# kernels than those of many and round otherwise; four give the bits that the same row has among many, by AVX2 kernels
# and widths of small models at least: by AVX-512, of 576 wide products, it takes sixteen.
LAST = sympy.Symbol("last", positive=True, integer=True)
LAST_ROWS = 4  # LAST is the smaller of this and NEW


@dataclass(frozen=True)
class Shapes:
    """Shapes of a program's nodes in the sizes of a call: batch, new and past; all others are numbers."""

    program: Program

    @cached_property
    def _symbols(self) -> dict[sympy.Symbol, Any]:
        sizes: dict[str, Any] = {"batch": BATCH, "new": NEW, "past": PAST if self.program.masks_past else 0}
        return dict(self.program.bindings(**sizes))

    def size(self, size: int | torch.SymInt) -> sympy.Expr:
        """Return one traced size as an expression."""
        if not isinstance(size, torch.SymInt):
            return sympy.Integer(int(size))
        found = size.node.expr.xreplace(self._symbols)
        return sympy.expand(found.replace(lambda e: type(e).__name__ == "Max", lambda e: _largest(e.args)))

    def __call__(self, node: fx.Node) -> Shape | None:
        """Return the shape of a node, of the first of several results; None for what is no tensor."""
        value = node.meta.get("val")
        if isinstance(value, list | tuple) and value:
            value = value[0]
        return tuple(map(self.size, value.shape)) if isinstance(value, torch.Tensor) else None


def _largest(values: tuple[sympy.Expr, ...]) -> sympy.Expr:
    """Return the value that is the largest in every call, where there is one, else their maximum."""
    zero_based = {size: 1 + sympy.Symbol(f"{size}_1", nonnegative=True, integer=True) for size in (BATCH, NEW)}
    for one in values:
        if all(sympy.expand((one - other).xreplace(zero_based)).is_nonnegative for other in values):
            return one
    return sympy.Max(*values)
