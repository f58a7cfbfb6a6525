"""What the schema says about the sizes of a call, and the sizes of a traced graph in these terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch

from collapse.program import Program

BATCH, NEW, PAST = sympy.symbols("batch new past", integer=True, nonnegative=True)
_PROBE = {"batch": 2, "new": 3, "past": 5}  # distinct, and 3 + 5 differs from all of them
_MEASURES = {2: BATCH, 3: NEW, 5: PAST, 8: NEW + PAST}


@dataclass(frozen=True)
class Lengths:
    """The calls that a schema allows: `new >= 1`, `past >= 0` and `new + past <= max_tokens`, padding included.

    `unpadded` says that the attention mask is all ones. Any batch size is allowed.
    """

    max_tokens: int
    unpadded: bool

    @property
    def corners(self) -> tuple[tuple[int, int], ...]:
        """The corners (new, past) of the triangle of calls: an affine function is largest in one of them."""
        return (1, 0), (self.max_tokens, 0), (1, self.max_tokens - 1)

    @property
    def last_position(self) -> int:
        """The largest position id. `generate` gives padding the position 1, also where no token has it."""
        return self.max_tokens - 1 if self.unpadded else max(self.max_tokens - 1, 1)


@dataclass(frozen=True)
class Sizes:
    """Translates the size symbols of one traced graph into batch, new and past."""

    program: Program

    @cached_property
    def _symbols(self) -> Mapping[sympy.Symbol, sympy.Expr]:
        return {symbol: _MEASURES[size] for symbol, size in self.program.bindings(**_PROBE).items()}

    @cached_property
    def _translated(self) -> dict[sympy.Expr, sympy.Expr | None]:
        return {}  # the same few sizes come up at every node, and sympy is slow

    def canonical(self, size: Any) -> sympy.Expr | None:
        """Return a size in terms of batch, new and past; None where it depends on something else."""
        if isinstance(size, int):
            return sympy.Integer(size)
        if not isinstance(size, torch.SymInt):
            return None
        expression = size.node.expr
        if expression not in self._translated:
            translated = sympy.expand(expression.subs(self._symbols))
            self._translated[expression] = translated if translated.free_symbols <= {BATCH, NEW, PAST} else None
        return self._translated[expression]

    def shape(self, tensor: torch.Tensor) -> tuple[sympy.Expr, ...] | None:
        """Return a shape in these terms, or None."""
        sizes = [self.canonical(size) for size in tensor.shape]
        return tuple(size for size in sizes if size is not None) if None not in sizes else None
