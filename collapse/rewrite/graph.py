"""What a plan does to a traced graph: short-circuit sites, drop blocks and rows, and erase what nothing reads then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from collapse.analysis.reachability import remove_dead_nodes
from collapse.errors import PlanError
from collapse.plan import AddBias, DropLayers, Narrow, Plan, Rewrite, ShortCircuit, StandIn
from collapse.program import Program
from collapse.rewrite.blocks import drop_blocks
from collapse.rewrite.channels import experts_of, is_channels, narrow_channels
from collapse.rewrite.computed import added_weights, replaced_names, replaced_weights
from collapse.rewrite.copying import copy_graph
from collapse.rewrite.leaves import drop_leaves
from collapse.rewrite.short_circuit import short_circuit
from collapse.rewrite.specialise import specialise
from collapse.rewrite.stand_in import add_bias, add_placeholders, stand_in
from collapse.rewrite.values import Values


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
    program = add_placeholders(graph.graph, program, plan, shapes)
    leaves = {leaf: rewrite.site for rewrite in plan.rewrites for leaf in _cut_out(graph.graph, program, rewrite)}
    cache = drop_leaves(graph.graph, program, leaves)
    if plan.layout == "free" and leaves and not cache:
        reason = "no attention would stay to tell how many tokens were seen"
        raise PlanError(reason, where=next(iter(leaves.values())), fix="keep one")
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
    if isinstance(rewrite, StandIn):
        return stand_in(graph, program, rewrite)
    if isinstance(rewrite, AddBias):
        add_bias(graph, program, rewrite)
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
    """Return what the collapsed program reads: `weights` with the rows that the plan keeps, and computed tensors.

    Replaced and added tensors come from `values`, whose digests are not looked at here; without, a plan with such
    raises `PlanError`. With `graph_edits` also the folded values, and nothing that the specialised program does not
    read. Tensors that no rewrite narrows or replaces are shared with `weights`, not copied.
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
    result |= added_weights(weights, plan, values)
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
