"""What a plan does to a traced graph: short-circuit sites, drop blocks and rows, and erase what nothing reads then."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from collapse.analysis.reachability import remove_dead_nodes
from collapse.errors import PlanError
from collapse.plan import DropLayers, Narrow, Plan, Rewrite, ShortCircuit
from collapse.program import Program
from collapse.rewrite.blocks import drop_blocks, inside_of, leaving_values, passed_in
from collapse.rewrite.channels import experts_of, is_channels, narrow_channels
from collapse.rewrite.computed import replaced_names, replaced_weights
from collapse.rewrite.copying import copy_graph
from collapse.rewrite.leaves import drop_leaves, leaves_of
from collapse.rewrite.specialise import specialise
from collapse.rewrite.values import Values

aten = torch.ops.aten


def rewrite_program(
    program: Program, plan: Plan, config: Mapping[str, Any] | None = None, *, graph_edits: bool = False
) -> Program:
    """Return the collapsed program; the given one is left as it is.

    By default it is what the collapsed checkpoint computes in plain transformers, with logits of every position.
    With `graph_edits` it is also specialised as the plan says; `next-token` then leaves logits of the last one.
    `config` is the source's config.json; only narrowed channels need it.

    Raises `PlanError` for a site that the graph does not have, or that cannot be cut out, and for a tensor that cannot
    be replaced.
    """
    replaced_names(program, plan)
    program = _with_channels_narrowed(program, plan, config)
    graph = copy_graph(program.graph)
    remove_dead_nodes(graph.graph, keep=_user_inputs(program))
    shapes = dict(program.shapes)
    for rewrite in plan.of_kind(Narrow):
        if rewrite.relabels != "channels":
            _narrow_placeholders(graph.graph, program, rewrite, shapes)
    leaves = {leaf: rewrite.site for rewrite in plan.rewrites for leaf in _cut_out(graph.graph, program, rewrite)}
    cache = drop_leaves(graph.graph, program, leaves)
    remove_dead_nodes(graph.graph, keep=_user_inputs(program))
    graph.recompile()
    outputs = ("logits", *(f"cache.{number}" for number in range(len(cache))))
    collapsed = program.with_graph(graph, shapes=shapes, cache=cache, outputs=outputs)
    return specialise(collapsed, plan).program if graph_edits else collapsed


def _with_channels_narrowed(program: Program, plan: Plan, config: Mapping[str, Any] | None) -> Program:
    shapes = {name: list(shape) for name, shape in program.shapes.items()}
    for rewrite in plan.rewrites:
        if is_channels(program, rewrite):
            for name, dim in _narrowed(program, rewrite):  # type: ignore[arg-type]
                shapes[name][dim] = len(rewrite.kept)  # type: ignore[union-attr]
    return narrow_channels(program, plan, config, {name: tuple(shape) for name, shape in shapes.items()})


def _user_inputs(program: Program) -> set[str]:
    return {item.placeholder for item in program.inputs if item.role == "input"}


def _cut_out(graph: fx.Graph, program: Program, rewrite: Rewrite) -> tuple[int, ...]:
    """Cut modules out of the graph; return the cache entries that go with them."""
    if isinstance(rewrite, DropLayers) and not is_channels(program, rewrite):
        return drop_blocks(graph, program, rewrite)
    if isinstance(rewrite, ShortCircuit) and rewrite.stage != "fuse":
        return short_circuit(graph, program, rewrite)
    return ()


def rewrite_weights(
    program: Program,
    weights: Mapping[str, torch.Tensor],
    plan: Plan,
    config: Mapping[str, Any] | None = None,
    *,
    values: Values | None = None,
    graph_edits: bool = False,
) -> dict[str, torch.Tensor]:
    """Return what the collapsed program reads: `weights` with the rows that the plan keeps, and replaced tensors.

    Replaced tensors come from `values`, whose digests are not looked at here; without, a plan with such raises
    `PlanError`. With `graph_edits` also the folded values, and nothing that the specialised program does not read.
    Tensors that no rewrite narrows or replaces are shared with `weights`, not copied.
    """
    result = dict(weights)
    for rewrite in plan.rewrites:
        if not isinstance(rewrite, Narrow | DropLayers):
            continue
        kept = torch.tensor(list(rewrite.kept))
        sliced: dict[int, torch.Tensor] = {}
        for name, dim in _narrowed(program, rewrite):
            source = result[name]
            if id(source) not in sliced:
                sliced[id(source)] = source.index_select(dim, kept)
            result[name] = sliced[id(source)]
    result |= replaced_weights(program, result, plan, values)
    return specialise(rewrite_program(program, plan, config), plan).weights(result) if graph_edits else result


def _narrowed(program: Program, rewrite: Narrow | DropLayers) -> list[tuple[str, int]]:
    """Return (state-dict name, dimension) of everything that the rewrite narrows, tied names included.

    Dropped experts are rows of the tensors that transformers makes of theirs; other dropped blocks narrow nothing.
    """
    if isinstance(rewrite, DropLayers):
        return [(name, 0) for name in sorted(experts_of(program, rewrite))]
    found: set[tuple[str, int]] = set()
    for axis in rewrite.axes:
        name, merged = program.naming.resolve(axis.tensor)
        if name is None:
            raise PlanError("the model has no such tensor", where=axis.tensor)
        if merged:
            raise PlanError("is only a part of a tensor of the model, whose axes are others", where=axis.tensor)
        found.update((alias, axis.dim) for alias in program.aliases(name))
    return sorted(found)


def short_circuit(graph: fx.Graph, program: Program, rewrite: ShortCircuit) -> tuple[int, ...]:
    """Replace the one tensor that others read of `rewrite.site` by zero, by the module's input, or by a constant.

    Returns the cache entries that only this module writes, which go with it. Raises `PlanError` where other modules
    read several values of it, cache entries included.
    """
    inside = inside_of(graph, rewrite.site)
    leaves = leaves_of(graph, program, inside)
    leaving = leaving_values(graph, inside)
    if len(leaving) != 1:
        found = "is not in the graph" if not leaving else f"gives {len(leaving)} values, not one"
        raise PlanError(f"the module {found}", where=rewrite.site, fix="trace the model and look at its modules")
    node = leaving[0]
    if rewrite.by == "identity":
        node.replace_all_uses_with(passed_in(graph, inside, node, rewrite.site))
        return leaves
    if rewrite.by == "zero":
        _skip_additions(node)
    if node.users:
        with graph.inserting_before(node):
            node.replace_all_uses_with(_constant(graph, node, rewrite))
    return leaves


def _skip_additions(node: fx.Node) -> None:
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
    sizes = [_size(graph, size) for size in value.shape]
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


def _narrow_placeholders(
    graph: fx.Graph, program: Program, rewrite: Narrow, shapes: dict[str, tuple[int, ...]]
) -> None:
    """Give the narrowed tensors their new shape; the operators that read them take any number of rows."""
    by_name = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    for name, dim in _narrowed(program, rewrite):
        shape = list(shapes[name])
        shape[dim] = len(rewrite.kept)
        shapes[name] = tuple(shape)
        node = by_name.get(program.parameters.get(name, ""))
        if node is not None:
            node.meta = {**node.meta, "val": node.meta["val"].new_empty(shape)}
