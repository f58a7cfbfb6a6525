"""Which operators commute with taking rows along a dimension, and which rows of their inputs they then need.

A `Cut` takes some rows along one dimension of a node's output. A rule says what the node must be given so that it
computes just these rows: `op(x)[rows] = op(x[rows])`. Every rule holds for any choice of rows, not just the last one,
so the table serves two analyses: which work is only for the last position, and what may be looked up in a table of
all positions. An operator without a rule, or one that mixes rows, is where a cut stops (`collapse.analysis.slicing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from collapse.analysis.call_sizes import Shape, Shapes
from collapse.analysis.flop_rules import op_name

Place = tuple[int, ...]  # of an argument: its number, and its number in a list
ONE = sympy.Integer(1)
END = 9223372036854775807


@dataclass(frozen=True)
class Cut:
    """Rows along dimension `dim`, whose size is read as `[before, length, after]`: the rows are of the middle part."""

    dim: int
    length: sympy.Expr
    before: sympy.Expr = ONE
    after: sympy.Expr = ONE

    @property
    def size(self) -> sympy.Expr:
        """The size of the dimension."""
        return sympy.expand(self.before * self.length * self.after)


@dataclass(frozen=True)
class Pull:
    """What a node needs to compute the cut: rows of the arguments in `cuts`, and all of every other argument.

    `resized`: the size that its list of sizes gives for the dimension is that of the cut.
    """

    cuts: Mapping[Place, Cut]
    resized: bool = False


Rule = Callable[[fx.Node, Cut, Shapes], Pull | None]


def tensor_arguments(node: fx.Node) -> Iterator[tuple[Place, fx.Node]]:
    """Yield the place and node of every tensor among the positional arguments."""
    given: tuple[Any, ...] = node.args
    for number, argument in enumerate(given):
        if is_tensor(argument):
            yield (number,), argument
        elif isinstance(argument, list | tuple):
            yield from (((number, at), item) for at, item in enumerate(argument) if is_tensor(item))


def is_tensor(argument: object) -> bool:
    """Whether an argument is a node with a tensor, or with several."""
    return isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), torch.Tensor | list | tuple)


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of the output is made of the elements of the inputs that are broadcast to it."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    return torch.Tag.pointwise in target.tags or target._opname in POINTWISE


POINTWISE = frozenset(
    {
        "__and__", "__or__", "__xor__", "alias", "clone", "contiguous", "detach", "divide", "floor_divide", "full_like",
        "greater", "greater_equal", "less", "less_equal", "lift_fresh_copy", "multiply", "negative", "not_equal",
        "ones_like", "rsub", "subtract", "to", "true_divide", "type_as", "where", "zeros_like",
    }
)  # fmt: skip


def _int(node: fx.Node, number: int, default: int = 0) -> int:
    """Return the argument of that number, which is a dimension."""
    value: Any = node.args[number] if len(node.args) > number else default
    return int(value)


def _shape(argument: Any, shapes: Shapes) -> Shape:
    return shapes(argument) or ()


def _broadcast(cut: Cut, rank: int, shape: Shape) -> Cut | bool | None:
    """Return the cut of an operand of `shape`, None where it has one row for all, False where sizes do not fit."""
    dim = cut.dim - (rank - len(shape))
    if dim < 0 or shape[dim] == 1:
        return None
    return replace(cut, dim=dim) if shape[dim] == cut.size else False


def _operands(node: fx.Node, cut: Cut, shapes: Shapes, places: Mapping[Place, fx.Node]) -> Pull | None:
    """Cut every operand in `places` along the dimension that is broadcast to the output's."""
    rank = len(_shape(node, shapes))
    cuts = {place: _broadcast(cut, rank, _shape(operand, shapes)) for place, operand in places.items()}
    if any(found is False for found in cuts.values()):
        return None
    return Pull({place: found for place, found in cuts.items() if isinstance(found, Cut)})


def aligned(node: fx.Node, cut: Cut, shapes: Shapes) -> Pull | None:
    """Elementwise, with broadcasting: row i of the output is made of row i, or of the only row, of each operand."""
    return _operands(node, cut, shapes, dict(tensor_arguments(node)))


def _dropout(node: fx.Node, cut: Cut, shapes: Shapes) -> Pull | None:
    return None if node.args[2] else aligned(node, cut, shapes)


def _linear(node: fx.Node, cut: Cut, shapes: Shapes) -> Pull | None:
    """`x @ w.T + b`: a row of the output is made of that row of x."""
    return Pull({(0,): cut}) if cut.dim < len(_shape(node, shapes)) - 1 else None


def _product(first: int) -> Rule:
    """`[..., m, k] @ [..., k, n]`, perhaps plus what stands before: rows come from the left, batches from both."""

    def rule(node: fx.Node, cut: Cut, shapes: Shapes) -> Pull | None:
        rank = len(_shape(node, shapes))
        left, right = (_shape(node.args[first + side], shapes) for side in (0, 1))
        if cut.dim == rank - 1 or len(left) < 2 or len(right) < 2:
            return None
        needed = range(first + 1 if cut.dim == rank - 2 else first + 2)
        places = {place: operand for place, operand in tensor_arguments(node) if place[0] in needed}
        return _operands(node, cut, shapes, places)

    return rule


def _attention(node: fx.Node, cut: Cut, shapes: Shapes) -> Pull | None:
    """A query's row needs all keys and values, and its row of the mask; `is_causal` counts rows, so it has no rule."""
    rank = len(_shape(node, shapes))
    named = dict(zip(("attn_mask", "dropout_p", "is_causal"), node.args[3:6], strict=False)) | dict(node.kwargs)
    if cut.dim != rank - 2 or named.get("dropout_p") or named.get("is_causal"):
        return None
    places = {place: operand for place, operand in tensor_arguments(node) if place[0] in {0, 3}}
    return _operands(node, cut, shapes, places)


def _along(number: int) -> Rule:
    """Works along the dimension given by argument `number`, on every row along another one apart."""

    def rule(node: fx.Node, cut: Cut, shapes: Shapes) -> Pull | None:
        along = _int(node, number) % len(_shape(node, shapes))
        return None if along == cut.dim else aligned(node, cut, shapes)

    return rule


def _norm(node: fx.Node, cut: Cut, shapes: Shapes) -> Pull | None:
    normalised: Any = node.args[1]
    return Pull({(0,): cut}) if cut.dim < len(_shape(node, shapes)) - len(normalised) else None


def _reduction(node: fx.Node, cut: Cut, shapes: Shapes) -> Pull | None:
    rank = len(_shape(node.args[0], shapes))
    given: Any = node.args[1] if len(node.args) > 1 else None
    if not isinstance(given, int | list | tuple) or given in ([], ()):
        return None
    dims = {int(dim) % rank for dim in ([given] if isinstance(given, int) else given)}
    kept = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    left = [dim for dim in range(rank) if kept or dim not in dims]
    return None if left[cut.dim] in dims else Pull({(0,): replace(cut, dim=left[cut.dim])})


def _embedding(node: fx.Node, cut: Cut, shapes: Shapes) -> Pull | None:
    return Pull({(1,): cut}) if cut.dim < len(_shape(node, shapes)) - 1 else None


def _view(node: fx.Node, cut: Cut, shapes: Shapes) -> Pull | None:
    """A view keeps the order of elements, so the cut splits all of them as `[before, length, after]` on both sides."""
    shape, source = _shape(node, shapes), _shape(node.args[0], shapes)
    before = sympy.Mul(*shape[: cut.dim], cut.before)
    after = sympy.Mul(cut.after, *shape[cut.dim + 1 :])
    for dim, size in enumerate(source):
        outer, inner = (
            _quotient(whole, sympy.Mul(*part))
            for whole, part in ((before, source[:dim]), (after, source[dim + 1 :]))
        )  # fmt: skip
        if outer is not None and inner is not None and sympy.expand(outer * cut.length * inner) == size:
            return Pull({(0,): Cut(dim, cut.length, outer, inner)}, resized=True)
    return None


def _quotient(whole: sympy.Expr, part: sympy.Expr) -> sympy.Expr | None:
    """Return whole / part where it is a whole number for all sizes."""
    found = sympy.cancel(whole / part)
    return found if found.is_integer and sympy.denom(found) == 1 else None


def _moved(order: Callable[[fx.Node, int], list[int]]) -> Rule:
    """Output dimension i is input dimension `order[i]`."""

    def rule(node: fx.Node, cut: Cut, shapes: Shapes) -> Pull | None:
        source = order(node, len(_shape(node.args[0], shapes)))[cut.dim]
        return Pull({(0,): replace(cut, dim=source)}) if source >= 0 else None

    return rule


def _transposed(node: fx.Node, rank: int) -> list[int]:
    order = list(range(rank))
    first, second = (_int(node, number) % rank for number in (1, 2))
    order[first], order[second] = order[second], order[first]
    return order


def _permuted(node: fx.Node, rank: int) -> list[int]:
    order: Any = node.args[1]
    return [int(dim) % rank for dim in order]


def _unsqueezed(node: fx.Node, rank: int) -> list[int]:
    order = list(range(rank))
    order.insert(_int(node, 1) % (rank + 1), -1)
    return order


def _without(node: fx.Node, rank: int) -> list[int]:
    """`select`, and `squeeze` of one dimension."""
    return [dim for dim in range(rank) if dim != _int(node, 1) % rank]


def _squeeze(node: fx.Node, cut: Cut, shapes: Shapes) -> Pull | None:
    if len(node.args) < 2 or not isinstance(node.args[1], int):
        return None
    gone = len(_shape(node.args[0], shapes)) > len(_shape(node, shapes))
    return _moved(_without)(node, cut, shapes) if gone else Pull({(0,): cut})


def _expand(node: fx.Node, cut: Cut, shapes: Shapes) -> Pull | None:
    found = aligned(node, cut, shapes)
    return None if found is None else replace(found, resized=True)


def _slice(node: fx.Node, cut: Cut, shapes: Shapes) -> Pull | None:
    """Rows along another dimension, or a slice that takes all."""
    given: dict[str, Any] = dict(zip(("start", "end", "step"), node.args[2:], strict=False))
    whole = given.get("start") in (0, None) and given.get("end") in (END, None) and given.get("step", 1) == 1
    return Pull({(0,): cut}) if whole or _int(node, 1) % len(_shape(node, shapes)) != cut.dim else None


def _cat(node: fx.Node, cut: Cut, shapes: Shapes) -> Pull | None:
    return None if _int(node, 1) % len(_shape(node, shapes)) == cut.dim else aligned(node, cut, shapes)


def _stack(node: fx.Node, cut: Cut, shapes: Shapes) -> Pull | None:
    """Along every dimension but the new one, row i is made of row i of each operand."""
    new = _int(node, 1) % len(_shape(node, shapes))
    moved = replace(cut, dim=cut.dim - (cut.dim > new))
    return None if cut.dim == new else Pull({place: moved for place, _ in tensor_arguments(node)})


def _parts(node: fx.Node, cut: Cut, shapes: Shapes) -> Pull | None:
    """`split` and `chunk`: every part is cut alike."""
    return None if _int(node, 2) % len(_shape(node, shapes)) == cut.dim else Pull({(0,): cut})


def _part(node: fx.Node, cut: Cut, shapes: Shapes) -> Pull | None:
    """`getitem` of `split` and `chunk`, whose parts have the same dimensions."""
    source = node.args[0]
    known = isinstance(source, fx.Node) and RULES.get(op_name(source)) is _parts
    return Pull({(0,): cut}) if known else None


RULES: Mapping[str, Rule] = {
    "aten.linear": _linear,
    "aten.matmul": _product(0),
    "aten.mm": _product(0),
    "aten.bmm": _product(0),
    "aten.addmm": _product(1),
    "aten.baddbmm": _product(1),
    "aten.layer_norm": _norm,
    "aten.rms_norm": _norm,
    "aten.embedding": _embedding,
    "aten.transpose": _moved(_transposed),
    "aten.permute": _moved(_permuted),
    "aten.unsqueeze": _moved(_unsqueezed),
    "aten.squeeze": _squeeze,
    "aten.select": _moved(_without),
    "aten.expand": _expand,
    "aten.slice": _slice,
    "aten.cat": _cat,
    "aten.stack": _stack,
    "getitem": _part,
    **dict.fromkeys(("aten.softmax", "aten._softmax", "aten.log_softmax", "aten.cumsum"), _along(1)),
    **dict.fromkeys(("aten.mean", "aten.sum", "aten.amax", "aten.amin", "aten.any", "aten.all"), _reduction),
    **dict.fromkeys(("aten.view", "aten.reshape", "aten._unsafe_view"), _view),
    **dict.fromkeys(("aten.split", "aten.split_with_sizes", "aten.chunk"), _parts),
}
# Operators that draw random numbers, or might: their rules see to it that they do not.
SEEDED: Mapping[str, Rule] = {"aten.dropout": _dropout, "aten.scaled_dot_product_attention": _attention}
