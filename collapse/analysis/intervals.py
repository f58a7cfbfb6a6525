"""Bounds of every integer of a graph that sizes, positions and masks determine, over all calls of a schema.

An interval has a lower and an upper bound that are affine functions of the new and the past length. The allowed calls
form a triangle, so that a bound is held by its values at the three corners, and `low(a) > high(b)` at the corners
means `a > b` in every call: no length is tried, and none is left out. What is not affine is widened to a constant.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from collapse.analysis.lengths import NEW, PAST, Lengths, Sizes
from collapse.analysis.reachability import storage_roots, written_arguments
from collapse.program import Program

aten = torch.ops.aten

_INTEGERS = {torch.bool, torch.int32, torch.int64}
_KEEPING = frozenset(  # operators whose elements are elements of their first argument
    {
        aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default, aten.clone.default,
        aten.contiguous.default, aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor, aten.select.int,
        aten.expand.default, aten.view.default, aten.reshape.default, aten.transpose.int, aten.permute.default,
        aten.index.Tensor, aten.max.default, aten.min.default, aten.amax.default, aten.amin.default,
    }
)  # fmt: skip
_CASTS = frozenset({aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default})
_FILLED = {aten.ones.default: 1, aten.new_ones.default: 1, aten.ones_like.default: 1}
_FILLED |= {aten.zeros.default: 0, aten.new_zeros.default: 0, aten.zeros_like.default: 0}
_SIGNS = {aten.add.Tensor: 1, aten.add.Scalar: 1, aten.sub.Tensor: -1, aten.sub.Scalar: -1}
_AND = frozenset({aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default})
_OR = frozenset({aten.__or__.Tensor, aten.bitwise_or.Tensor, aten.logical_or.default})
_NOT = frozenset({aten.bitwise_not.default, aten.logical_not.default})
_COMPARISONS: dict[Any, Callable[[Any, Any], bool]] = {
    getattr(getattr(aten, name), overload): getattr(operator, name)
    for name in ("gt", "ge", "lt", "le")
    for overload in ("Tensor", "Scalar")
}


@dataclass(frozen=True)
class Interval:
    """Bounds of all elements: values of two affine functions at the corners of `Lengths`."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def constant(self) -> int | None:
        """The one value that every element has in every call, or None."""
        return int(self.low[0]) if len({*self.low, *self.high}) == 1 else None


def intervals(program: Program, sizes: Sizes, lengths: Lengths) -> dict[fx.Node, Interval]:
    """Return what is known of the nodes of `program`; a node that is not a key can have any value."""
    roots = storage_roots(program.graph.graph)
    written = {roots[argument] for node in roots for argument in written_arguments(node)}
    roles = {item.placeholder: item.target for item in program.inputs if item.role == "input"}
    known: dict[fx.Node, Interval] = {}
    for node in program.graph.graph.nodes:
        if roots[node] in written or not _is_integer(node.meta.get("val")):
            continue
        if node.op == "placeholder":
            found = _of_input(roles.get(node.name), lengths)
        elif isinstance(node.meta["val"], torch.SymInt):
            found = _of_size(sizes.canonical(node.meta["val"]), lengths)
        else:
            found = _of_call(node, known)
        if found is not None:
            known[node] = found
    return known


def _is_integer(value: Any) -> bool:
    return isinstance(value, torch.SymInt) or (isinstance(value, torch.Tensor) and value.dtype in _INTEGERS)


def _constant(low: float, high: float | None = None) -> Interval:
    return Interval((low,) * 3, (low if high is None else high,) * 3)


def _of_input(target: str | None, lengths: Lengths) -> Interval | None:
    if target == "attention_mask":
        return _constant(1 if lengths.unpadded else 0, 1)
    return _constant(0, lengths.last_position) if target == "position_ids" else None


def _of_size(expression: sympy.Expr | None, lengths: Lengths) -> Interval | None:
    if expression is None:
        return None
    polynomial = sympy.expand(expression).as_poly(NEW, PAST)
    if polynomial is None or expression.free_symbols - {NEW, PAST} or polynomial.total_degree() > 1:
        return None
    values = tuple(float(expression.subs({NEW: new, PAST: past})) for new, past in lengths.corners)
    return Interval(values, values)


def _of_call(node: fx.Node, known: Mapping[fx.Node, Interval]) -> Interval | None:
    target, arguments = node.target, [_of_value(argument, known) for argument in node.args]
    is_bool = node.meta["val"].dtype is torch.bool
    if target in _FILLED:
        return _constant(_FILLED[target])
    if target is aten.arange.default and arguments[0] is not None:
        return Interval((0, 0, 0), tuple(end - 1 for end in arguments[0].high))
    if target in _KEEPING and arguments:
        return arguments[0]
    if target is aten.full.default:
        return arguments[1]
    if target in _CASTS:
        return _as_bool(arguments[0]) if is_bool else arguments[0]
    if target is aten.where.self:
        return _either(*arguments)
    pair = arguments[:2] if len(node.args) == 2 and not node.kwargs else []
    if target in _NOT and is_bool:
        return arguments[0] and _difference(_constant(1), arguments[0])
    if target in _SIGNS and is_bool:
        return None  # the sum of truth values is no sum
    return _of_pair(target, *pair) if len(pair) == 2 else None


def _of_pair(target: Any, left: Interval | None, right: Interval | None) -> Interval | None:
    if target in _AND | _OR:
        decisive = 0 if target in _AND else 1
        values = [side.constant if side else None for side in (left, right)]
        if decisive in values:
            return _constant(decisive)
        return _constant(1 - decisive) if values == [1 - decisive] * 2 else None
    if left is None or right is None:
        return None
    if target in _COMPARISONS:
        return _compared(_COMPARISONS[target], left, right)
    if target in _SIGNS:
        return _sum(left, right) if _SIGNS[target] == 1 else _difference(left, right)
    return None


def _of_value(value: Any, known: Mapping[fx.Node, Interval]) -> Interval | None:
    if isinstance(value, fx.Node):
        return known.get(value)
    return _constant(int(value)) if isinstance(value, bool | int) else None


def _as_bool(interval: Interval | None) -> Interval | None:
    if interval is None:
        return None
    if min(interval.low) > 0 or max(interval.high) < 0:
        return _constant(1)
    return _constant(0) if interval.constant == 0 else _constant(0, 1)


def _sum(left: Interval, right: Interval) -> Interval:
    return Interval(
        tuple(a + b for a, b in zip(left.low, right.low, strict=True)),
        tuple(a + b for a, b in zip(left.high, right.high, strict=True)),
    )


def _difference(left: Interval, right: Interval) -> Interval:
    return _sum(left, Interval(tuple(-v for v in right.high), tuple(-v for v in right.low)))


def _compared(holds: Callable[[Any, Any], bool], left: Interval, right: Interval) -> Interval:
    """Decide a comparison of affine bounds at the corners: true if it holds for the closest values, or never."""
    grows = holds(1, 0)  # gt and ge ask for a large left side
    close = zip(left.low, right.high, strict=True) if grows else zip(left.high, right.low, strict=True)
    if all(holds(a, b) for a, b in close):
        return _constant(1)
    far = zip(left.high, right.low, strict=True) if grows else zip(left.low, right.high, strict=True)
    return _constant(0, 1) if any(holds(a, b) for a, b in far) else _constant(0)


def _either(condition: Interval | None, left: Interval | None, right: Interval | None) -> Interval | None:
    if condition is not None and condition.constant is not None:
        return left if condition.constant else right
    if left is None or right is None:
        return None
    return _constant(min(*left.low, *right.low), max(*left.high, *right.high))
