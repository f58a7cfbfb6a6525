"""Computes the last position of the logits only, and with it all that no other output needs elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from collapse.analysis.call_sizes import Shapes
from collapse.analysis.last_rows import LOGITS_CUT, last_rows
from collapse.analysis.reachability import remove_dead_nodes
from collapse.analysis.row_rules import END, ONE, Cut, Place, Pull
from collapse.program import Program
from collapse.rewrite.copying import copy_graph
from collapse.rewrite.in_place import without_writes
from collapse.rewrite.size_nodes import SizeNodes

aten = torch.ops.aten
VIEWS: Mapping[Any, Any] = {aten.view.default: aten.reshape.default}  # rows of a tensor need not be contiguous


def last_token(program: Program) -> Program:
    """Return the program with logits `[batch, 1, vocabulary]` of the last new position; its cache stays complete.

    The last new position is the last real token of every sequence: padding stands on the left.
    """
    graph = copy_graph(program.graph)
    without_writes(graph.graph)
    shapes = Shapes(program)
    rows = last_rows(graph.graph, shapes)
    _Rewriter(graph.graph, shapes).apply(rows)
    remove_dead_nodes(graph.graph, keep={item.placeholder for item in program.inputs if item.role == "input"})
    graph.recompile()
    return program.with_graph(graph)


class _Rewriter:
    """Puts beside every node its last row; what nobody reads any more is dead afterwards."""

    def __init__(self, graph: fx.Graph, shapes: Shapes) -> None:
        self._graph, self._shapes = graph, shapes
        self._first = next(node for node in graph.nodes if node.op != "placeholder")
        self._sizes = SizeNodes(graph)
        self._rows: dict[fx.Node, fx.Node] = {}
        self._taken: dict[tuple[fx.Node, Cut], fx.Node] = {}

    def apply(self, rows: Any) -> None:
        for node, (cut, pulled) in rows.items():
            self._rows[node] = self._computed(node, cut, pulled)
        output = next(node for node in self._graph.nodes if node.op == "output")
        logits, *caches = output.args[0]
        output.args = ((self._last(logits, LOGITS_CUT), *caches),)

    def _last(self, node: fx.Node, cut: Cut) -> fx.Node:
        return self._rows[node] if node in self._rows else self._take(node, cut)

    def _take(self, node: fx.Node, cut: Cut) -> fx.Node:
        """Return the last row of a node that is computed whole."""
        if (node, cut) not in self._taken:
            given = node.op == "placeholder"  # placeholders stay together
            with self._graph.inserting_before(self._first) if given else self._graph.inserting_after(node):
                self._taken[node, cut] = self._plain(node, cut) if _is_plain(cut) else self._inner(node, cut)
        return self._taken[node, cut]

    def _plain(self, node: fx.Node, cut: Cut) -> fx.Node:
        taken = self._graph.call_function(aten.slice.Tensor, (node, cut.dim, -1, END))
        return self._described(taken, node, cut)

    def _inner(self, node: fx.Node, cut: Cut) -> fx.Node:
        sizes = [self._sizes.of(size) for size in (cut.before, cut.length, cut.after)]
        call = self._graph.call_function
        split = call(aten.unflatten.int, (node, cut.dim, sizes))
        with self._graph.inserting_after(split):
            row = call(aten.select.int, (split, cut.dim + 1, -1))
        with self._graph.inserting_after(row):
            return self._described(call(aten.flatten.using_ints, (row, cut.dim, cut.dim + 1)), node, cut)

    def _computed(self, node: fx.Node, cut: Cut, pulled: Pull) -> fx.Node:
        arguments = list(node.args)
        for place, needed in pulled.cuts.items():
            _put(arguments, place, self._last(_at(node, place), needed))
        if pulled.resized:
            sizes: list[Any] = list(arguments[1])  # type: ignore[arg-type]
            if sizes[cut.dim] != -1:
                sizes[cut.dim] = self._sizes.of(cut.before * cut.after)
            arguments[1] = sizes
        with self._graph.inserting_after(node):
            target: Any = VIEWS.get(node.target, node.target)
            row = self._graph.call_function(target, tuple(arguments), dict(node.kwargs))
        return self._described(row, node, cut)

    def _described(self, row: fx.Node, node: fx.Node, cut: Cut) -> fx.Node:
        """Give the row the metadata of the node, with its own shape."""
        value = node.meta["val"]
        row.meta = dict(node.meta)
        parts = [self._resized(part, cut) for part in _tensors(value)]
        row.meta["val"] = parts[0] if isinstance(value, torch.Tensor) else parts
        return row

    def _resized(self, value: torch.Tensor, cut: Cut) -> torch.Tensor:
        shape: list[int | torch.SymInt] = list(value.shape)
        shape[cut.dim] = self._sizes.traced(cut.before * cut.after)
        return value.new_empty(shape)


def _is_plain(cut: Cut) -> bool:
    return bool(cut.before == ONE and cut.after == ONE)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    yield from [value] if isinstance(value, torch.Tensor) else value


def _at(node: fx.Node, place: Place) -> fx.Node:
    found: Any = node.args[place[0]]
    return found if len(place) == 1 else found[place[1]]  # type: ignore[no-any-return]


def _put(arguments: list[Any], place: Place, value: fx.Node) -> None:
    if len(place) == 1:
        arguments[place[0]] = value
        return
    changed = list(arguments[place[0]])
    changed[place[1]] = value
    arguments[place[0]] = changed
