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


@dataclass(frozen=True)
class Interval:
    """Bounds of all elements: values of two affine functions at the corners of `Lengths`."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def constant(self) -> int | None:
        """The one value that every element has in every call, or None."""
        return int(self.low[0]) if len({*self.low, *self.high}) == 1 else None


Known = list[Interval | None]
Rule = Callable[[fx.Node, Known], Interval | None]


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
    rule = _RULES.get(node.target)
    if rule is None or (rule in _TWO_SIDED and (len(node.args) != 2 or node.kwargs)):
        return None  # a third argument or an option, such as `alpha`, means another function
    return rule(node, [_of_value(argument, known) for argument in node.args])


def _of_value(value: Any, known: Mapping[fx.Node, Interval]) -> Interval | None:
    if isinstance(value, fx.Node):
        return known.get(value)
    return _constant(int(value)) if isinstance(value, bool | int) else None


def _kept(node: fx.Node, arguments: Known) -> Interval | None:
    """Elements of the result are elements of the first argument."""
    return arguments[0]


def _cast(node: fx.Node, arguments: Known) -> Interval | None:
    interval = arguments[0]
    if interval is None or not _is_bool(node):
        return interval
    if min(interval.low) > 0 or max(interval.high) < 0:
        return _constant(1)
    return _constant(0) if interval.constant == 0 else _constant(0, 1)


def _full(node: fx.Node, arguments: Known) -> Interval | None:
    return arguments[1]


def _ones(node: fx.Node, arguments: Known) -> Interval:
    return _constant(1)


def _zeros(node: fx.Node, arguments: Known) -> Interval:
    return _constant(0)


def _arange(node: fx.Node, arguments: Known) -> Interval | None:
    (end,) = arguments if len(arguments) == 1 else (None,)
    return end and Interval((0, 0, 0), tuple(value - 1 for value in end.high))


def _where(node: fx.Node, arguments: Known) -> Interval | None:
    condition, left, right = arguments
    if condition is not None and condition.constant is not None:
        return left if condition.constant else right
    if left is None or right is None:
        return None
    return _constant(min(*left.low, *right.low), max(*left.high, *right.high))


def _not(node: fx.Node, arguments: Known) -> Interval | None:
    return _difference(_constant(1), arguments[0]) if arguments[0] and _is_bool(node) else None


def _and(node: fx.Node, arguments: Known) -> Interval | None:
    return _decided(arguments, 0) if _is_bool(node) else None


def _or(node: fx.Node, arguments: Known) -> Interval | None:
    return _decided(arguments, 1) if _is_bool(node) else None


def _decided(arguments: Known, decisive: int) -> Interval | None:
    """Decide and (0 on one side suffices) or or (1 does)."""
    values = [side.constant if side else None for side in arguments]
    if decisive in values:
        return _constant(decisive)
    return _constant(1 - decisive) if values == [1 - decisive] * 2 else None


def _add(node: fx.Node, arguments: Known) -> Interval | None:
    left, right = arguments
    return _sum(left, right) if left and right and not _is_bool(node) else None


def _subtract(node: fx.Node, arguments: Known) -> Interval | None:
    left, right = arguments
    return _difference(left, right) if left and right else None


def _compare(holds: Callable[[Any, Any], bool]) -> Rule:
    def rule(node: fx.Node, arguments: Known) -> Interval | None:
        left, right = arguments
        return _compared(holds, left, right) if left and right else None

    return rule


def _is_bool(node: fx.Node) -> bool:
    return bool(node.meta["val"].dtype is torch.bool)


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


_COMPARE = {name: _compare(getattr(operator, name)) for name in ("gt", "ge", "lt", "le")}
_TWO_SIDED: frozenset[Rule] = frozenset({_add, _subtract, _and, _or, *_COMPARE.values()})
_RULES: dict[Any, Rule] = {
    aten.alias.default: _kept, aten.detach.default: _kept, aten.lift_fresh_copy.default: _kept,
    aten.clone.default: _kept, aten.contiguous.default: _kept, aten.unsqueeze.default: _kept,
    aten.squeeze.dim: _kept, aten.slice.Tensor: _kept, aten.select.int: _kept, aten.expand.default: _kept,
    aten.view.default: _kept, aten.reshape.default: _kept, aten.transpose.int: _kept, aten.permute.default: _kept,
    aten.index.Tensor: _kept, aten.max.default: _kept, aten.min.default: _kept, aten.amax.default: _kept,
    aten.amin.default: _kept, aten.to.dtype: _cast, aten.to.device: _cast, aten.to.dtype_layout: _cast,
    aten.ones.default: _ones, aten.new_ones.default: _ones, aten.ones_like.default: _ones,
    aten.zeros.default: _zeros, aten.new_zeros.default: _zeros, aten.zeros_like.default: _zeros,
    aten.full.default: _full, aten.arange.default: _arange, aten.where.self: _where,
    aten.__and__.Tensor: _and, aten.bitwise_and.Tensor: _and, aten.logical_and.default: _and,
    aten.__or__.Tensor: _or, aten.bitwise_or.Tensor: _or, aten.logical_or.default: _or,
    aten.bitwise_not.default: _not, aten.logical_not.default: _not,
    aten.add.Tensor: _add, aten.add.Scalar: _add, aten.sub.Tensor: _subtract, aten.sub.Scalar: _subtract,
    **{getattr(aten, name).Tensor: rule for name, rule in _COMPARE.items()},
    **{getattr(aten, name).Scalar: rule for name, rule in _COMPARE.items()},
}  # fmt: skip
