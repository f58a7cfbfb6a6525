"""One module, node by node, with the shape of every value and the FLOPs of every product."""

from __future__ import annotations

from collections.abc import Mapping

import graphviz
import torch
from torch import fx

from collapse.analysis.flop_rules import RULES, op_name
from collapse.analysis.flops import matrix_work
from collapse.analysis.sizes import Call, shape_reader
from collapse.errors import CollapseError
from collapse.program import Program
from collapse.report.render import digraph
from collapse.report.text import short

MOST_NODES = 400


def module_graph(program: Program, path: str, *, prompt: int) -> graphviz.Digraph:
    """Draw the nodes of the module at `path`, as in a prefill of `prompt` tokens of one sequence.

    Raises `CollapseError` where there is no such module, or it is too large for a picture.
    """
    call = Call(1, prompt, 0)
    inside = [node for node in program.graph.graph.nodes if _is_inside(node, path)]
    if not inside:
        raise CollapseError("no such module in the graph", where=path, fix=_suggestion(program, path))
    if len(inside) > MOST_NODES:
        raise CollapseError(f"{len(inside)} nodes are too many for a picture", where=path, fix="name a module in it")
    flops = {work.node: work.flops for work in matrix_work(program, call)}
    shape = shape_reader(program, call)
    shapes = {node: _shape_text(node, shape) for node in program.graph.graph.nodes}
    weights = {placeholder: name for name, placeholder in program.parameters.items()}
    graph = digraph("module", rankdir="TB", labelloc="t", label=f"{path}\nprefill of {prompt} tokens, executed FLOPs")
    _add_nodes(graph, inside, shapes, flops, weights, path)
    return graph


def _add_nodes(
    graph: graphviz.Digraph,
    inside: list[fx.Node],
    shapes: Mapping[fx.Node, str],
    flops: Mapping[str, int],
    weights: Mapping[str, str],
    path: str,
) -> None:
    members = set(inside)
    entering = dict.fromkeys(source for node in inside for source in node.all_input_nodes if source not in members)
    for node in entering:
        label = weights.get(node.name, node.name).removeprefix(f"{path}.")
        kind = {"style": "filled", "fillcolor": "#f0f0f0", "shape": "note" if node.name in weights else "ellipse"}
        graph.node(node.name, f"{label}\n{shapes[node]}", **kind)
    for node in inside:
        work = f"\n{short(flops[node.name])}FLOPs" if node.name in flops else ""
        style = {"penwidth": "2.2"} if op_name(node) in RULES else {"style": "rounded"}
        graph.node(node.name, f"{op_name(node).removeprefix('aten.')}\n{shapes[node]}{work}", **style)
        for source in node.all_input_nodes:
            graph.edge(source.name, node.name)
    for node in inside:
        if any(user not in members for user in node.users):
            graph.node(f"{node.name}_out", "leaves the module", shape="plaintext")
            graph.edge(node.name, f"{node.name}_out")


def _is_inside(node: fx.Node, path: str) -> bool:
    stack = node.meta.get("nn_module_stack") or {}
    return node.op == "call_function" and any(str(found) == path for found, _ in stack.values())


def _shape_text(node: fx.Node, shape: object) -> str:
    if not isinstance(node.meta.get("val"), torch.Tensor) or not callable(shape):
        return ""
    return " x ".join(map(str, shape(node))) or "scalar"


def _suggestion(program: Program, path: str) -> str:
    last = path.rpartition(".")[2]
    near = sorted(name for name in program.module_types if name and name.rpartition(".")[2] == last)
    known = near or sorted(name for name in program.module_types if name)
    return f"there are, for example, {', '.join(known[:3])}"
