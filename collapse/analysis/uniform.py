"""Which tensors hold one value everywhere, in every call: what follows from an attention mask that is all ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from collapse.analysis.flop_rules import op_name
from collapse.analysis.reachability import written_storage
from collapse.analysis.row_rules import Place, is_pointwise, tensor_arguments
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
FILLED: Mapping[str, Value] = {"aten.ones": 1, "aten.new_ones": 1, "aten.ones_like": 1, "aten.zeros": 0,
                                     "aten.new_zeros": 0, "aten.zeros_like": 0}  # fmt: skip
FILLED_WITH = {"aten.full": 1, "aten.full_like": 1, "aten.new_full": 2}  # number of the argument with the value


def uniform_values(program: Program, *, unpadded: bool) -> dict[fx.Node, Value]:
    """Return node -> value for every node whose elements all have this value, whatever the sizes of the call.

    `unpadded`: the schema says that no request is padded, so the attention mask is all ones.
    """
    graph = program.graph.graph
    roots, written = written_storage(graph)
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
    value, operands = node.meta.get("val"), dict(tensor_arguments(node))
    if not isinstance(value, torch.Tensor) or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if op_name(node) in REARRANGING:
        return found.get(operands[(0,)])
    filled = _filled(node)
    if filled is not None:
        return torch.full((), filled, dtype=value.dtype).item()
    if value.dtype == torch.bool and (deciding := _decided(node, operands, found)) is not None:
        return deciding
    known = operands and all(operand in found for operand in operands.values())
    return _evaluated(node, found) if known and is_pointwise(node) else None


def _filled(node: fx.Node) -> Value | None:
    """Return the value that a constructor fills its result with."""
    name = op_name(node)
    filling = FILLED.get(name, node.args[FILLED_WITH[name]] if name in FILLED_WITH else None)
    return filling if isinstance(filling, bool | int | float) else None


def _decided(node: fx.Node, operands: Mapping[Place, fx.Node], found: Mapping[fx.Node, Value]) -> bool | None:
    """Return what one operand decides alone: false for `and`, true for `or`."""
    name = op_name(node)
    deciding = name in OR
    if name not in AND | OR or any(operand.meta["val"].dtype != torch.bool for operand in operands.values()):
        return None
    return deciding if any(found.get(operand) is deciding for operand in operands.values()) else None


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


def equal_operand(node: fx.Node, found: Mapping[fx.Node, Value]) -> fx.Node | None:
    """Return the operand that the node is equal to, but for broadcasting, since its other operands are uniform."""
    name, operands = op_name(node), dict(tensor_arguments(node))
    equal = _chosen(name, operands, found) if node.op == "call_function" else None
    if equal is None or equal.meta["val"].dtype != node.meta["val"].dtype:
        return None
    return equal


def _chosen(name: str, operands: Mapping[Place, fx.Node], found: Mapping[fx.Node, Value]) -> fx.Node | None:
    first, second, third = (operands.get((number,)) for number in range(3))
    if first is None or second is None:
        return None
    if name == "aten.where":
        return (second if found[first] else third) if first in found else None
    if name == "aten.masked_fill":
        return first if found.get(second) is False else None
    boolean = first.meta["val"].dtype == second.meta["val"].dtype == torch.bool
    neutral: Value | None = 1 if name == "aten.mul" else None
    if boolean and name in AND | OR:
        neutral = name in AND
    if third is not None or neutral is None:
        return None
    pairs = ((second, first), (first, second))
    return next((other for one, other in pairs if one in found and found[one] == neutral), None)
