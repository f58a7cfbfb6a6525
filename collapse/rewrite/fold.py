"""Folds what the schema makes constant: uniform masks, constants, and functions of positions that fit in a table.

What is folded becomes an input of the graph with a name of its own. Its value comes from one call of the graph that
is not yet folded, with the real weights and buffers (`folded_values`): buffers such as inverse frequencies exist only
when a model is built, so a plan and a traced graph can be made without them, and the values are computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from collapse.analysis.call_sizes import NEW, PAST
from collapse.analysis.reachability import remove_dead_nodes
from collapse.analysis.tabular import Source, Tabular, tabular_nodes
from collapse.program import Input, Program
from collapse.rewrite.copying import copy_graph
from collapse.rewrite.prologue import Prologue
from collapse.rewrite.size_nodes import SizeNodes
from collapse.rewrite.uniform import without_uniform

aten = torch.ops.aten
TABLE_BYTES = 16 << 20  # a larger table would cost more memory than the nodes it saves are worth
FOLDED = "collapse.folded"


@dataclass(frozen=True)
class Left:
    """A node that could be folded and was not."""

    node: str
    reason: str


@dataclass(frozen=True)
class Folded:
    """The folded program, and where its new inputs come from.

    Attributes:
        program: the folded program.
        origin: the program to evaluate: uniform values are folded in it, tables are not.
        nodes: name of each new input -> node of `origin` that it holds.
        table_bytes: of all new inputs together.
        left: what was not folded.
    """

    program: Program
    origin: Program
    nodes: Mapping[str, str]
    table_bytes: int
    left: tuple[Left, ...]


def fold(program: Program, *, max_tokens: int | None, unpadded: bool) -> Folded:
    """Fold constants for sequences of at most `max_tokens` tokens; `unpadded` says that no request is padded.

    Without `max_tokens` nothing that depends on positions is folded.
    """
    origin = without_uniform(program, unpadded=unpadded)
    graph = copy_graph(origin.graph)
    by_name = {node.name: node for node in graph.graph.nodes}
    facts = {by_name[node.name]: fact for node, fact in tabular_nodes(origin).items() if _leads(fact)}
    chosen, left = _choose(facts, max_tokens)
    if not chosen:
        return Folded(origin, origin, {}, 0, tuple(left))
    sizes = SizeNodes(graph.graph)
    inputs: list[Input] = []
    for number, (node, fact) in enumerate(chosen.items()):
        inputs.append(Input(f"folded_{number}", "buffer", f"{FOLDED}.{number}"))
        _replace(graph.graph, node, fact, inputs[-1].placeholder, max_tokens or 1, sizes)
    remove_dead_nodes(graph.graph, keep={item.placeholder for item in origin.inputs if item.role == "input"})
    graph.recompile()
    nodes = {item.target: node.name for item, node in zip(inputs, chosen, strict=True)}
    taken = sum(_bytes(node, fact, max_tokens or 1) for node, fact in chosen.items())
    return Folded(_with_inputs(origin, graph, inputs), origin, nodes, taken, tuple(left))


def folded_values(folded: Folded, weights: Mapping[str, torch.Tensor], max_tokens: int | None) -> dict[str, Any]:
    """Return the tensors that the folded program reads beside `weights`: one call of the program before it."""
    values = Prologue(folded.origin, folded.nodes.values()).evaluate(weights, max_tokens or 1)
    positions = {node.name for node, fact in tabular_nodes(folded.origin).items() if "position" in fact.axes}
    return {
        target: (values[node].squeeze(0) if node in positions else values[node]).clone()
        for target, node in folded.nodes.items()
    }


def _leads(fact: Tabular) -> bool:
    """Whether a look-up by `position_ids` gives the node as it is: batch and new are its first dimensions."""
    return fact.axes.get("position", (0, 1)) == (0, 1)


def _choose(facts: Mapping[fx.Node, Tabular], max_tokens: int | None) -> tuple[dict[fx.Node, Tabular], list[Left]]:
    """Choose the last nodes of every chain; a chain of one call gains nothing."""
    chosen: dict[fx.Node, Tabular] = {}
    left: list[Left] = []
    for node, fact in facts.items():
        if node.op == "placeholder" or all(user in facts for user in node.users):
            continue
        if _chain(node, facts) < 2:
            continue
        reason = _reason(node, fact, max_tokens)
        if reason:
            left.append(Left(node.name, reason))
        else:
            chosen[node] = fact
    return chosen, left


def _reason(node: fx.Node, fact: Tabular, max_tokens: int | None) -> str | None:
    """Return why the node is not folded, None where it is."""
    if not fact.is_constant and max_tokens is None:
        return "the schema gives no max_tokens, so a table of positions has no length"
    size = _bytes(node, fact, max_tokens or 1)
    if size > TABLE_BYTES:
        return f"its table would take {size} bytes, more than {TABLE_BYTES}"
    return None


def _chain(node: fx.Node, facts: Mapping[fx.Node, Tabular]) -> int:
    """Count the calls that the node is computed by, itself included."""
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in seen and current.op == "call_function" and current in facts:
            seen.add(current)
            stack.extend(current.all_input_nodes)
    return len(seen)


def _table_shape(node: fx.Node, fact: Tabular, length: int) -> list[int]:
    shape = list(node.meta["val"].shape)
    for source, dims in fact.axes.items():
        for dim in dims:
            shape[dim] = length
        if source == "position":
            shape.pop(dims[0])
    return [int(size) for size in shape]


def _bytes(node: fx.Node, fact: Tabular, length: int) -> int:
    total = int(node.meta["val"].element_size())
    for size in _table_shape(node, fact, length):
        total *= size
    return total


def _replace(graph: fx.Graph, node: fx.Node, fact: Tabular, name: str, length: int, sizes: SizeNodes) -> None:
    value = node.meta["val"]
    last = [given for given in graph.nodes if given.op == "placeholder"][-1]
    with graph.inserting_after(last):
        table = graph.placeholder(name)
    table.meta["val"] = value.new_empty(_table_shape(node, fact, length))
    made = table
    with graph.inserting_before(node):
        for source, dims in fact.axes.items():
            made = _looked_up(graph, made, source, dims, sizes)
            made.meta["val"] = value
    if made is not table:
        made.meta = dict(node.meta)
    node.replace_all_uses_with(made)


def _looked_up(graph: fx.Graph, table: fx.Node, source: Source, dims: tuple[int, ...], sizes: SizeNodes) -> fx.Node:
    """Take the rows of this call; beyond the table's end both operators raise."""
    if source == "position":
        positions = next(node for node in graph.nodes if node.op == "placeholder" and node.name == "position_ids")
        return graph.call_function(aten.index.Tensor, (table, [positions]))
    start, length = (sizes.of(PAST), sizes.of(NEW)) if source == "query" else (0, sizes.of(PAST + NEW))
    return graph.call_function(aten.narrow.default, (table, dims[0], start, length))


def _with_inputs(program: Program, graph: fx.GraphModule, added: Iterable[Input]) -> Program:
    """Return the program with the graph's placeholders, in the graph's order."""
    known = {item.placeholder: item for item in (*program.inputs, *added)}
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    return replace(program, graph=graph, inputs=tuple(known[name] for name in names))
