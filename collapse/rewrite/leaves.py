"""Takes entries of the KV cache out of a graph: those that a dropped block or a cut attention module wrote."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from collapse.analysis.reachability import remove_dead_nodes
from collapse.errors import PlanError
from collapse.program import CacheLeaf, Program

aten = torch.ops.aten
USER_ARGUMENTS = frozenset({"input_ids", "attention_mask", "position_ids"})


def output_node(graph: fx.Graph) -> fx.Node:
    """Return the node that lists what the graph gives: logits, then the cache."""
    nodes: Iterable[fx.Node] = graph.nodes
    return next(node for node in nodes if node.op == "output")


def leaf_placeholders(program: Program) -> tuple[str, ...]:
    """Return the placeholder of every cache entry, in the order of `program.cache`."""
    items = (item for item in program.inputs if item.role == "input" and item.target not in USER_ARGUMENTS)
    return tuple(item.placeholder for item in items)


def leaves_of(graph: fx.Graph, program: Program, inside: Container[fx.Node]) -> tuple[int, ...]:
    """Return the numbers of the cache entries that nodes of `inside` give.

    An entry that is only passed through has no node of its own; it goes with the entry before it, since the entries
    of a layer stand together.
    """
    passed = set(leaf_placeholders(program))
    found: list[int] = []
    for number, node in enumerate(_results(graph, program)[1]):
        follows = number - 1 in found and node.name in passed and len(node.users) == 1
        if node in inside or follows:
            found.append(number)
    return tuple(found)


def _results(graph: fx.Graph, program: Program) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the nodes of the logits and those of the cache entries."""
    values: Any = output_node(graph).args[0]
    first = len(values) - len(program.cache)
    return list(values[:first]), list(values[first:])


def drop_leaves(graph: fx.Graph, program: Program, dropped: Mapping[int, str]) -> tuple[CacheLeaf, ...]:
    """Take the numbered cache entries out of the graph's inputs and outputs; return those that stay, in order.

    Sizes read from an entry that goes are read from one that stays, or from the mask and the ids: all entries have
    the same batch and past length. `dropped` gives the site of each. Raises `PlanError` where something that stays
    reads more of it.
    """
    gone = frozenset(dropped)
    logits, entries = _results(graph, program)
    output_node(graph).args = ((*logits, *(entry for n, entry in enumerate(entries) if n not in gone)),)
    names = leaf_placeholders(program)
    by_name = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    kept = [(by_name[names[n]], leaf) for n, leaf in enumerate(program.cache) if n not in gone]
    for number in sorted(gone):
        _read_sizes_elsewhere(graph, by_name[names[number]], program.cache[number], kept)
    going = {names[number] for number in gone}
    remove_dead_nodes(graph, keep={item.placeholder for item in program.inputs if item.role == "input"} - going)
    for number, site in dropped.items():
        readers = ", ".join(sorted(user.name for user in by_name[names[number]].users))
        if readers:
            raise PlanError(f"what stays reads its cache entry {number} (in {readers})", where=site, fix="keep it")
    return tuple(leaf for _, leaf in kept)


def _read_sizes_elsewhere(
    graph: fx.Graph, node: fx.Node, leaf: CacheLeaf, kept: Iterable[tuple[fx.Node, CacheLeaf]]
) -> None:
    for user in list(node.users):
        if user.target is not aten.sym_size.int:
            continue
        dim: Any = user.args[1]
        measure = leaf.shape[dim]
        with graph.inserting_before(user):
            replacement = _size_elsewhere(graph, measure, kept)
        replacement.meta["val"] = user.meta.get("val")
        user.replace_all_uses_with(replacement)


def _size_elsewhere(graph: fx.Graph, measure: int | str, kept: Iterable[tuple[fx.Node, CacheLeaf]]) -> fx.Node:
    """Return a node that gives the batch, or the past length, from inputs that stay."""
    for other, leaf in kept:
        if measure in leaf.shape and isinstance(measure, str):
            return graph.call_function(aten.sym_size.int, (other, leaf.shape.index(measure)))
    by_name = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    ids, mask = by_name["input_ids"], by_name["attention_mask"]
    if measure == "batch":
        return graph.call_function(aten.sym_size.int, (ids, 0))
    total, new = (graph.call_function(aten.sym_size.int, (node, 1)) for node in (mask, ids))
    return graph.call_function(operator.sub, (total, new))
