"""Takes out of a graph what an attention mask of ones leaves without effect."""

from __future__ import annotations

import torch
from torch import fx

from collapse.analysis.call_sizes import Shapes
from collapse.analysis.flop_rules import op_name
from collapse.analysis.reachability import remove_dead_nodes, written_storage
from collapse.analysis.uniform import FILLED, FILLED_WITH, Value, equal_operand, uniform_values
from collapse.program import Program
from collapse.rewrite.copying import copy_graph
from collapse.rewrite.size_nodes import SizeNodes

aten = torch.ops.aten


def without_uniform(program: Program, *, unpadded: bool) -> Program:
    """Replace nodes that are equal to an operand, and uniform ones that others read, by the simplest that is equal."""
    graph = copy_graph(program.graph)
    own = program.with_graph(graph)
    shapes, values = Shapes(program), uniform_values(own, unpadded=unpadded)
    sizes, (roots, written) = SizeNodes(graph.graph), written_storage(graph.graph)
    kept = {item.placeholder for item in program.inputs if item.role == "input"}
    for node in list(graph.graph.nodes):
        equal = None if node in values else equal_operand(node, values)
        if equal is not None and roots[node] not in written and roots[equal] not in written:
            node.replace_all_uses_with(_expanded(graph.graph, equal, node, shapes, sizes))
    remove_dead_nodes(graph.graph, keep=kept)
    for node in list(graph.graph.nodes):
        if node in values and node.op == "call_function" and any(user not in values for user in node.users):
            _fill(graph.graph, node, values[node], shapes, sizes)
    remove_dead_nodes(graph.graph, keep=kept)
    graph.recompile()
    return program.with_graph(graph)


def _expanded(graph: fx.Graph, equal: fx.Node, node: fx.Node, shapes: Shapes, sizes: SizeNodes) -> fx.Node:
    shape = shapes(node) or ()
    if shapes(equal) == shape:
        return equal
    with graph.inserting_before(node):
        made = graph.call_function(aten.expand.default, (equal, [sizes.of(size) for size in shape]))
    made.meta = dict(node.meta)
    return made


def _fill(graph: fx.Graph, node: fx.Node, value: Value, shapes: Shapes, sizes: SizeNodes) -> None:
    """Make a uniform tensor from its value, unless it is made so already."""
    if op_name(node) in {*FILLED, *FILLED_WITH}:
        return
    given = node.meta["val"]
    with graph.inserting_before(node):
        options = {"dtype": given.dtype, "device": torch.device("cpu")}
        made = graph.call_function(aten.full.default, ([sizes.of(size) for size in shapes(node) or ()], value), options)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
