"""Cuts modules out of a graph: what others read of one becomes zero, its input, or a constant."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch import fx

from collapse.errors import PlanError
from collapse.plan import ShortCircuit
from collapse.program import Program
from collapse.rewrite.blocks import inside_of, leaving_values, passed_in
from collapse.rewrite.leaves import leaves_of

aten = torch.ops.aten


def short_circuit(graph: fx.Graph, program: Program, rewrite: ShortCircuit) -> tuple[int, ...]:
    """Replace the one tensor that others read of `rewrite.site` by zero, by the module's input, or by a constant.

    Returns the cache entries that only this module writes, which go with it. Raises `PlanError` where other modules
    read several values of it, cache entries included.
    """
    inside = inside_of(graph, rewrite.site)
    leaves = leaves_of(graph, program, inside)
    node = only_leaving(graph, inside, rewrite.site)
    if rewrite.by == "identity":
        node.replace_all_uses_with(passed_in(graph, inside, node, rewrite.site))
        return leaves
    if rewrite.by == "zero":
        skip_additions(node)
    if node.users:
        with graph.inserting_before(node):
            node.replace_all_uses_with(_constant(graph, node, rewrite))
    return leaves


def only_leaving(graph: fx.Graph, inside: set[fx.Node], site: str) -> fx.Node:
    """Return the one value that others read of the module `site`, whose nodes are `inside`; raises `PlanError`."""
    leaving = leaving_values(graph, inside)
    if len(leaving) != 1:
        found = "is not in the graph" if not leaving else f"gives {len(leaving)} values, not one"
        raise PlanError(f"the module {found}", where=site, fix="trace the model and look at its modules")
    return leaving[0]


def skip_additions(node: fx.Node) -> None:
    """Turn `x + 0` into `x`, where the sum has the shape and dtype of `x`."""
    for user in list(node.users):
        if user.target is not aten.add.Tensor or user.kwargs.get("alpha", 1) != 1 or len(user.all_input_nodes) != 2:
            continue
        other = next(argument for argument in user.all_input_nodes if argument is not node)
        left, right = other.meta["val"], user.meta["val"]
        if left.shape == right.shape and left.dtype == right.dtype:
            user.replace_all_uses_with(other)


def _constant(graph: fx.Graph, node: fx.Node, rewrite: ShortCircuit) -> fx.Node:
    """Build a tensor of the node's shape filled with zero or the constant, from sizes that enter the graph."""
    value = node.meta["val"]
    sizes = sizes_of(graph, node)
    options = {"dtype": value.dtype, "device": torch.device("cpu")}
    if rewrite.by == "zero" or rewrite.constant is None:
        filled = graph.call_function(aten.full.default, (sizes, 0.0), options)
    else:
        row = graph.call_function(torch.tensor, (list(rewrite.constant),), options)
        tail = sizes[2:]
        filled = graph.call_function(
            aten.expand.default, (graph.call_function(aten.reshape.default, (row, tail)), sizes)
        )
    filled.meta["val"] = value
    return filled


def sizes_of(graph: fx.Graph, node: fx.Node) -> list[Any]:
    """Return the sizes of a value: numbers, and nodes that compute them from sizes that enter the graph."""
    return [_size(graph, size) for size in node.meta["val"].shape]


def _size(graph: fx.Graph, size: int | torch.SymInt) -> Any:
    """Return a node that computes a symbolic size from the sizes of the graph's inputs."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return _expression(graph, size.node.expr)


def _expression(graph: fx.Graph, expression: sympy.Expr) -> Any:
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return _symbol(graph, expression)
    combine = {sympy.Add: operator.add, sympy.Mul: operator.mul}.get(expression.func)
    if combine is None:
        raise PlanError(f"a size of the form {expression} cannot be rebuilt")
    total = _expression(graph, expression.args[0])
    for argument in expression.args[1:]:
        part = _expression(graph, argument)
        both_known = isinstance(total, int) and isinstance(part, int)
        total = combine(total, part) if both_known else graph.call_function(combine, (total, part))
    return total


def _symbol(graph: fx.Graph, symbol: sympy.Symbol) -> fx.Node:
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(value, torch.Tensor):
            continue
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                return graph.call_function(aten.sym_size.int, (node, dim))
    raise PlanError(f"no input of the graph has the size {symbol}")
