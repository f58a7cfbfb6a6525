"""Puts maps in place of modules, and biases on linear modules, in a graph: what the free layout alone can say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from collapse.errors import PlanError
from collapse.plan import AddBias, Plan, StandIn
from collapse.program import Input, Program
from collapse.rewrite.blocks import inside_of, passed_in
from collapse.rewrite.free import adding
from collapse.rewrite.leaves import leaves_of
from collapse.rewrite.short_circuit import only_leaving, sizes_of, skip_additions

aten = torch.ops.aten


def add_placeholders(graph: fx.Graph, program: Program, plan: Plan, shapes: dict[str, tuple[int, ...]]) -> Program:
    """Give the graph a parameter for each tensor that the plan adds, and `shapes` its shape; return the new inputs.

    Raises `PlanError` for a name that the model has already and that stays.
    """
    added: list[Input] = []
    nodes: Iterable[fx.Node] = graph.nodes
    last = [node for node in nodes if node.op == "placeholder"][-1]
    like = next(node for node in graph.nodes if _is_float(node))
    for rewrite in adding(plan):
        for part, tensor in sorted(rewrite.added.items()):
            item = Input(f"added_{len(added)}", "parameter", f"{rewrite.site}.{part}")
            with graph.inserting_after(last):
                last = graph.placeholder(item.placeholder)
            last.meta["val"] = like.meta["val"].new_empty(tensor.shape)
            shapes[item.target] = tensor.shape
            added.append(item)
    taken = {item.target for item in added}
    kept = tuple(item for item in program.inputs if item.target not in taken)
    return replace(program, inputs=(*kept, *added)) if added else program


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op == "placeholder" and isinstance(value, torch.Tensor) and value.is_floating_point()


def stand_in(graph: fx.Graph, program: Program, rewrite: StandIn) -> tuple[int, ...]:
    """Replace the one tensor that others read of `rewrite.site` by its map of what enters the module.

    Returns the cache entries that only this module writes, which go with it. Raises `PlanError` where others read
    several values of the module, or none or several that enter it have the shape of its output.
    """
    inside = inside_of(graph, rewrite.site)
    _read_input_itself(inside)
    leaves = leaves_of(graph, program, inside)
    node = only_leaving(graph, inside, rewrite.site)
    if rewrite.by == "zero":
        skip_additions(node)
    if node.users:
        with graph.inserting_before(node):
            made = _mapped(graph, program, rewrite, node, inside)
        node.replace_all_uses_with(made)
    return leaves


def _read_input_itself(inside: set[fx.Node]) -> None:
    """Let others read what enters a module instead of the module's cast of it to the dtype that it has already.

    A norm casts its input, and a cast to the same dtype is the tensor itself, which the residual then seems to read
    from within the norm.
    """
    for node in inside:
        source = node.args[0] if node.target is aten.to.dtype else None
        if not isinstance(source, fx.Node) or source in inside or source.meta["val"].dtype != node.meta["val"].dtype:
            continue
        for user in [user for user in node.users if user not in inside]:
            user.replace_input_with(node, source)


def _mapped(graph: fx.Graph, program: Program, rewrite: StandIn, node: fx.Node, inside: set[fx.Node]) -> fx.Node:
    """Build the map, with the node's own sizes; `y = x @ weight.T + bias` is one operator, as in the model."""
    value = node.meta["val"]
    width = int(value.shape[-1])
    parts = {part: _parameter(graph, program, f"{rewrite.site}.{part}") for part in rewrite.added}
    wrong = [part for part in parts if part != "down" and rewrite.added[part].shape[0] != width]
    if wrong:
        reason = f"{wrong[0]} has {rewrite.added[wrong[0]].shape[0]} channels, the module gives {width}"
        raise PlanError(reason, where=rewrite.site, fix="make a new plan")
    stack = _stack(node, rewrite.site)
    if rewrite.by in {"zero", "constant"}:
        sizes = sizes_of(graph, node)
        if rewrite.by == "zero":
            options = {"dtype": value.dtype, "device": torch.device("cpu")}
            return _node(graph, aten.full.default, (sizes, 0.0), value, stack, options)
        return _node(graph, aten.expand.default, (parts["bias"], sizes), value, stack)
    x = passed_in(graph, inside, node, rewrite.site)
    bias = (parts["bias"],) if "bias" in parts else ()
    if rewrite.by == "linear":
        return _node(graph, aten.linear.default, (x, parts["weight"], *bias), value, stack)
    narrow = value.new_empty((*value.shape[:-1], rewrite.added["down"].shape[0]))
    first = _node(graph, aten.linear.default, (x, parts["down"]), narrow, stack)
    return _node(graph, aten.linear.default, (first, parts["up"], *bias), value, stack)


def add_bias(graph: fx.Graph, program: Program, rewrite: AddBias) -> None:
    """Give the one product of the module `rewrite.site` a bias; raises `PlanError` where it is another module."""
    nodes = [node for node in inside_of(graph, rewrite.site) if node.target is aten.linear.default]
    if len(nodes) != 1 or len(nodes[0].args) != 2:
        found = "has a bias already" if len(nodes) == 1 else f"has {len(nodes)} products, not one"
        raise PlanError(f"the module {found}", where=rewrite.site, fix="make a new plan")
    width = int(nodes[0].meta["val"].shape[-1])
    if rewrite.added["bias"].shape != (width,):
        reason = f"the bias has {rewrite.added['bias'].shape[0]} channels, the module gives {width}"
        raise PlanError(reason, where=rewrite.site, fix="make a new plan")
    nodes[0].args = (*nodes[0].args, _parameter(graph, program, f"{rewrite.site}.bias"))


def _parameter(graph: fx.Graph, program: Program, name: str) -> fx.Node:
    wanted = next(item.placeholder for item in reversed(program.inputs) if item.target == name)
    nodes: Iterable[fx.Node] = graph.nodes
    return next(node for node in nodes if node.name == wanted)


def _stack(node: fx.Node, site: str) -> dict[str, Any]:
    """Return the modules around the map: those of the node down to the site, so that it is counted there."""
    found: dict[str, Any] = {}
    for key, module in (node.meta.get("nn_module_stack") or {}).items():
        found[key] = module
        if str(module[0]) == site:
            break
    return found


def _node(
    graph: fx.Graph, target: Any, args: Any, value: Any, stack: dict[str, Any], options: dict[str, Any] | None = None
) -> fx.Node:
    made = graph.call_function(target, args, options or {})
    made.meta = {"val": value, "nn_module_stack": stack}
    return made
