"""Which tensors hold one value everywhere, in every call: what follows from an attention mask that is all ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from collapse.analysis.flop_rules import op_name
from collapse.analysis.reachability import storage_roots, written_arguments
from collapse.analysis.slicing import is_pointwise, tensor_arguments
from collapse.program import Program

Value = bool | int | float
AND = frozenset({"aten.__and__", "aten.bitwise_and", "aten.logical_and"})
OR = frozenset({"aten.__or__", "aten.bitwise_or", "aten.logical_or"})
# Operators whose every result is some element of the first argument.
REARRANGING = frozenset(
    f"aten.{name}"
    for name in ("view", "reshape", "expand", "permute", "transpose", "unsqueeze", "squeeze", "slice", "select",
                 "index", "index_select", "gather", "repeat", "flatten", "unflatten")
)  # fmt: skip
FILLED: Mapping[str, int | Value] = {"aten.ones": 1, "aten.new_ones": 1, "aten.ones_like": 1, "aten.zeros": 0,
                                     "aten.new_zeros": 0, "aten.zeros_like": 0}  # fmt: skip
FILLED_WITH = {"aten.full": 1, "aten.full_like": 1, "aten.new_full": 2}  # number of the argument with the value


def uniform_values(program: Program, *, unpadded: bool) -> dict[fx.Node, Value]:
    """Return node -> value for every node whose elements all have this value, whatever the sizes of the call.

    `unpadded`: the schema says that no request is padded, so the attention mask is all ones.
    """
    graph = program.graph.graph
    roots = storage_roots(graph)
    written = {roots[target] for node in graph.nodes for target in written_arguments(node)}
    found: dict[fx.Node, Value] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.name == "attention_mask" and unpadded:
            found[node] = 1
        elif node.op == "call_function" and roots[node] not in written:
            value = _value(node, found)
            if value is not None:
                found[node] = value
    return found


def _value(node: fx.Node, found: Mapping[fx.Node, Value]) -> Value | None:
    name, value = op_name(node), node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if name in FILLED:
        return _as(FILLED[name], value.dtype)
    if name in FILLED_WITH:
        filling = node.args[FILLED_WITH[name]]
        return _as(filling, value.dtype) if isinstance(filling, bool | int | float) else None
    operands = dict(tensor_arguments(node))
    if name in REARRANGING:
        return found.get(operands[(0,)])
    if name in AND | OR and value.dtype == torch.bool:
        deciding = name in OR
        if any(found.get(operand) is deciding for operand in operands.values()):
            return deciding
    if is_pointwise(node) and operands and all(operand in found for operand in operands.values()):
        return _evaluated(node, found)
    return None


def _evaluated(node: fx.Node, found: Mapping[fx.Node, Value]) -> Value | None:
    """Run the operator on one element."""
    if any(isinstance(a, fx.Node) and a not in found for a in (*node.args, *node.kwargs.values())):
        return None

    def element(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return torch.full((), found[argument], dtype=argument.meta["val"].dtype)
        return argument

    arguments = [element(argument) for argument in node.args]
    result = node.target(*arguments, **{name: element(a) for name, a in node.kwargs.items()})  # type: ignore[operator]
    return result.item()  # type: ignore[no-any-return]


def _as(value: Any, dtype: torch.dtype) -> Value:
    return torch.full((), value, dtype=dtype).item()


def equal_operand(node: fx.Node, found: Mapping[fx.Node, Value]) -> fx.Node | None:
    """Return the operand that the node is equal to, but for broadcasting, since its other operands are uniform."""
    name, operands = op_name(node), dict(tensor_arguments(node))
    equal = _chosen(name, operands, found) if node.op == "call_function" else None
    if equal is None or equal.meta["val"].dtype != node.meta["val"].dtype:
        return None
    return equal


def _chosen(
    name: str, operands: Mapping[tuple[int, ...], fx.Node], found: Mapping[fx.Node, Value]
) -> fx.Node | None:
    first, second, third = (operands.get((number,)) for number in range(3))
    if first is None:
        return None
    if name == "aten.where" and first in found:
        return second if found[first] else third
    if name == "aten.masked_fill" and second is not None and found.get(second) is False:
        return first
    if second is None or third is not None:
        return None
    boolean = first.meta["val"].dtype == second.meta["val"].dtype == torch.bool
    neutral = True if name in AND and boolean else False if name in OR and boolean else 1 if name == "aten.mul" else None
    if neutral is None:
        return None
    if _is(found.get(second), neutral):
        return first
    return second if _is(found.get(first), neutral) else None


def _is(value: Value | None, neutral: Value) -> bool:
    return value is not None and value == neutral
