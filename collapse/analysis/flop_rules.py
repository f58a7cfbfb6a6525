"""What each operator of a traced graph costs: a table from matrix operators to multiply-accumulates (MACs).

Matrix work is what the rules below count. Every other operator must be known to do none: it is pointwise, a
reduction or a view by its own declaration, or it is in `CHEAP`. Anything else is refused by name, so that an
operator nobody thought of can never count as zero. 1 MAC is 2 FLOPs; pointwise work is not counted.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import fx

from collapse.errors import UnsupportedError

Shape = tuple[int, ...]
ShapeOf = Callable[[Any], Shape]
Rule = Callable[[fx.Node, ShapeOf], int]
Kind = Literal["matrix", "cheap"]

MATRIX_NAME = re.compile(
    r"mm(_|$)|matmul|conv|attention|rnn|gru|lstm|scan|einsum|dot|(^|_)mv|bilinear|cdist|linalg|fft|tensordot"
)
CHEAP = frozenset(
    {
        "__and__", "__or__", "__xor__", "_assert_async", "_assert_scalar", "_assert_tensor_metadata", "_is_all_true",
        "_is_any_true", "_log_softmax", "_softmax", "_unsafe_index", "arange", "argmax", "argmin", "argsort",
        "bincount", "broadcast_tensors", "bucketize", "cat", "clone", "constant_pad_nd", "copy", "copy_", "cumprod",
        "cumsum", "detach_", "dropout", "embedding", "empty", "empty_like", "eye", "fill_", "flip", "floor_divide",
        "full", "full_like", "gather", "group_norm", "histc", "index", "index_add", "index_copy", "index_copy_",
        "index_put", "index_put_", "index_select", "layer_norm", "lift_fresh_copy", "linspace", "log_softmax",
        "masked_scatter", "meshgrid", "native_group_norm", "native_layer_norm", "new_empty", "new_full", "new_ones",
        "new_zeros", "nonzero", "one_hot", "ones", "ones_like", "outer", "pad", "polar", "repeat", "repeat_interleave",
        "rms_norm", "roll", "scalar_tensor", "scatter", "scatter_", "scatter_add", "scatter_reduce", "searchsorted",
        "softmax", "sort", "special_softmax", "stack", "sym_numel", "sym_size", "tile", "topk", "tril", "triu",
        "type_as", "unique", "where", "zeros", "zeros_like",
    }
)  # fmt: skip
# Second names of pointwise operators and joins; torch tags only the first names.
ALIASES = frozenset(
    {
        "absolute", "concat", "concatenate", "dstack", "divide", "greater", "greater_equal", "hstack", "less",
        "less_equal", "multiply", "negative", "not_equal", "rsub", "subtract", "true_divide", "vstack",
    }
)  # fmt: skip
CHEAP_TAGS = frozenset({torch.Tag.pointwise, torch.Tag.reduction, torch.Tag.view_copy, torch.Tag.inplace_view})
FUNCTIONS = (torch.tensor, torch._C._set_grad_enabled, torch.sym_int, torch.sym_max, torch.sym_min, torch.sym_not)
SOFTMAX = frozenset({"aten.softmax", "aten._softmax", "aten.special_softmax"})
ATTENTION = frozenset(
    {
        "aten.scaled_dot_product_attention",
        "aten._scaled_dot_product_attention_math",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
    }
)
PRODUCTS = frozenset({"aten.bmm", "aten.baddbmm", "aten.matmul", "aten.einsum"})
PER_ROW = frozenset({"aten.linear", "aten.mm", "aten.addmm", "aten.matmul"})


def op_name(node: fx.Node) -> str:
    """Return the operator without its overload, such as `aten.linear`."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}"
    return str(getattr(target, "__name__", target))


def kind_of(node: fx.Node) -> Kind:
    """Say whether a call does matrix work; raises `UnsupportedError` where neither yes nor no is known."""
    name = op_name(node)
    if name in RULES:
        return "matrix"
    if _is_cheap(node):
        return "cheap"
    raise UnsupportedError(
        f"no FLOP rule for the operator {name}, which may do matrix work",
        where=f"graph node {node.name}",
        fix="add a rule to collapse.analysis.flop_rules",
    )


def _is_cheap(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace not in {"aten", "prims"} or MATRIX_NAME.search(target._opname):
            return False
        base = target._opname
        return (
            bool({base, base.rstrip("_")} & (CHEAP | ALIASES))
            or bool(CHEAP_TAGS & set(target.tags))
            or _is_view(target)
        )
    if isinstance(target, torch._ops.HigherOrderOperator):
        return False
    module = getattr(target, "__module__", "") or ""
    return target in FUNCTIONS or (module in {"_operator", "math", "builtins"} and target is not operator.matmul)


def _is_view(target: torch._ops.OpOverload) -> bool:
    """By its schema, the operator returns (an alias of) its input and writes nothing."""
    infos = [result.alias_info for result in target._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


def _linear(node: fx.Node, shape: ShapeOf) -> int:
    weight = shape(node.args[1])
    return math.prod(shape(node.args[0])[:-1]) * math.prod(weight)


def _mm(first: int) -> Rule:
    """`[m, k] x [k, n]`, the operands at `first` and `first + 1`."""

    def count(node: fx.Node, shape: ShapeOf) -> int:
        return shape(node.args[first])[0] * math.prod(shape(node.args[first + 1]))

    return count


def _bmm(first: int) -> Rule:
    """`[b, m, k] x [b, k, n]`, the operands at `first` and `first + 1`."""

    def count(node: fx.Node, shape: ShapeOf) -> int:
        return math.prod(shape(node.args[first])) * shape(node.args[first + 1])[2]

    return count


def _matmul(node: fx.Node, shape: ShapeOf) -> int:
    left, right = shape(node.args[0]), shape(node.args[1])
    rows, columns = (left[-2] if len(left) > 1 else 1), (right[-1] if len(right) > 1 else 1)
    batch = itertools.zip_longest(reversed(left[:-2]), reversed(right[:-2]), fillvalue=1)
    return math.prod(max(sizes) for sizes in batch) * rows * left[-1] * columns


def _dot(node: fx.Node, shape: ShapeOf) -> int:
    return math.prod(shape(node.args[0]))


def _attention(node: fx.Node, shape: ShapeOf) -> int:
    """Both products of attention over the whole square of queries `[..., q, d]` and keys `[..., k, d]`."""
    query, key, value = (shape(argument) for argument in node.args[:3])
    return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _convolution(node: fx.Node, shape: ShapeOf) -> int:
    """Outputs of the convolution times what each sums over; transposed ones sum over inputs instead."""
    weight = shape(node.args[1])
    transposed = bool(node.args[6]) if op_name(node) in {"aten.convolution", "aten._convolution"} else False
    if transposed or "transpose" in op_name(node):
        return math.prod(shape(node.args[0])) * math.prod(weight[1:])
    output = shape(node)
    return output[0] * math.prod(output[2:]) * math.prod(weight)


def _grouped(node: fx.Node, shape: ShapeOf) -> int:
    """Every row meets the matrix of one group: `[rows, k] x [groups, k, n]`; other ranks as in `_grouped_mm`."""
    left, right = shape(node.args[0]), shape(node.args[1])
    if len(left) == 2 and len(right) == 3:
        return math.prod(left) * right[2]
    if len(left) == 3 and len(right) == 3:
        return math.prod(left) * right[2]
    return left[-2] * left[-1] * right[-1]


def _einsum(node: fx.Node, shape: ShapeOf) -> int:
    """One product over all letters; three and more operands depend on the order, which we do not guess."""
    operands: Any = node.args[1]
    if len(operands) > 2 or "." in str(node.args[0]):
        raise UnsupportedError(f"no FLOP rule for einsum {node.args[0]!r}", where=f"graph node {node.name}")
    if len(operands) < 2:
        return 0
    letters = str(node.args[0]).replace(" ", "").split("->")[0].split(",")
    sizes = {
        letter: size
        for word, operand in zip(letters, operands, strict=True)
        for letter, size in zip(word, shape(operand), strict=True)
    }
    return math.prod(sizes.values())


_CONVOLUTIONS = (
    "conv1d", "conv2d", "conv3d", "convolution", "_convolution",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
)  # fmt: skip
RULES: Mapping[str, Rule] = {
    "aten.linear": _linear,
    "aten.mm": _mm(0),
    "aten.addmm": _mm(1),
    "aten.bmm": _bmm(0),
    "aten.baddbmm": _bmm(1),
    "aten.matmul": _matmul,
    "aten.mv": _dot,
    "aten.dot": _dot,
    "aten.vdot": _dot,
    "aten.einsum": _einsum,
    "aten._grouped_mm": _grouped,
    "transformers.grouped_mm_fallback": _grouped,
    **dict.fromkeys(sorted(ATTENTION), _attention),
    **{f"aten.{name}": _convolution for name in _CONVOLUTIONS},
}
