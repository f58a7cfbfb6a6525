"""Computes the last position of the logits only, and with it all that no other output needs elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from collapse.analysis.call_sizes import LAST, LAST_ROWS, Shapes
from collapse.analysis.flops import head_nodes
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
    _Rewriter(graph.graph, shapes, head_nodes(graph.graph)).apply(rows)
    remove_dead_nodes(graph.graph, keep={item.placeholder for item in program.inputs if item.role == "input"})
    graph.recompile()
    return program.with_graph(graph)


class _Rewriter:
    """Puts beside every node its last rows; what nobody reads any more is dead afterwards.

    From the head on that is the last one, before it the last few (`LAST`): the head then has the bits that it has in
    `generate`, which also asks it for one position.
    """

    def __init__(self, graph: fx.Graph, shapes: Shapes, heads: AbstractSet[fx.Node]) -> None:
        self._graph, self._shapes, self._heads = graph, shapes, heads
        self._first = next(node for node in graph.nodes if node.op != "placeholder")
        self._sizes = SizeNodes(graph)
        self._rows: dict[fx.Node, fx.Node] = {}
        self._counts: dict[fx.Node, sympy.Expr] = {}
        self._taken: dict[tuple[fx.Node, Cut, sympy.Expr], fx.Node] = {}

    def apply(self, rows: Mapping[fx.Node, tuple[Cut, Pull]]) -> None:
        for node, (cut, pulled) in rows.items():
            after_head = node in self._heads or any(self._counts.get(source) == ONE for source in node.all_input_nodes)
            self._counts[node] = ONE if after_head else LAST
            self._rows[node] = self._computed(node, cut, pulled)
        output = next(node for node in self._graph.nodes if node.op == "output")
        logits, *caches = output.args[0]
        output.args = ((self._last(logits, LOGITS_CUT, ONE), *caches),)

    def _last(self, node: fx.Node, cut: Cut, count: sympy.Expr) -> fx.Node:
        """Return the last `count` rows of a node."""
        if node not in self._rows:
            return self._take(node, cut, count)
        if self._counts[node] == count:
            return self._rows[node]
        return self._take(self._rows[node], replace(cut, length=self._counts[node]), count)

    def _take(self, node: fx.Node, cut: Cut, count: sympy.Expr) -> fx.Node:
        """Cut the last rows off a node that has more."""
        key = (node, cut, count)
        if key not in self._taken:
            given = node.op == "placeholder"  # placeholders stay together
            with self._graph.inserting_before(self._first) if given else self._graph.inserting_after(node):
                self._taken[key] = self._plain(*key) if _is_plain(cut) else self._inner(*key)
        return self._taken[key]

    def _plain(self, node: fx.Node, cut: Cut, count: sympy.Expr) -> fx.Node:
        taken = self._graph.call_function(aten.slice.Tensor, (node, cut.dim, -_most(count), END))
        return self._described(taken, node, cut, count)

    def _inner(self, node: fx.Node, cut: Cut, count: sympy.Expr) -> fx.Node:
        sizes = [self._sizes.of(size) for size in (cut.before, cut.length, cut.after)]
        call = self._graph.call_function
        split = call(aten.unflatten.int, (node, cut.dim, sizes))
        with self._graph.inserting_after(split):
            rows = call(aten.slice.Tensor, (split, cut.dim + 1, -_most(count), END))
        with self._graph.inserting_after(rows):
            joined = call(aten.flatten.using_ints, (rows, cut.dim, cut.dim + 2))
        return self._described(joined, node, cut, count)

    def _computed(self, node: fx.Node, cut: Cut, pulled: Pull) -> fx.Node:
        arguments, count = list(node.args), self._counts[node]
        for place, needed in pulled.cuts.items():
            _put(arguments, place, self._last(_at(node, place), needed, count))
        if pulled.resized:
            sizes: list[Any] = list(arguments[1])  # type: ignore[arg-type]
            if sizes[cut.dim] != -1:
                sizes[cut.dim] = self._sizes.of(cut.before * count * cut.after)
            arguments[1] = sizes
        with self._graph.inserting_after(node):
            target: Any = VIEWS.get(node.target, node.target)
            row = self._graph.call_function(target, tuple(arguments), dict(node.kwargs))
        return self._described(row, node, cut, count)

    def _described(self, row: fx.Node, node: fx.Node, cut: Cut, count: sympy.Expr) -> fx.Node:
        """Give the rows the metadata of the node, with their own shape."""
        value = node.meta["val"]
        row.meta = dict(node.meta)
        parts = [self._resized(part, cut, count) for part in _tensors(value)]
        row.meta["val"] = parts[0] if isinstance(value, torch.Tensor) else parts
        return row

    def _resized(self, value: torch.Tensor, cut: Cut, count: sympy.Expr) -> torch.Tensor:
        shape: list[int | torch.SymInt] = list(value.shape)
        shape[cut.dim] = self._sizes.traced(cut.before * count * cut.after)
        return value.new_empty(shape)


def _most(count: sympy.Expr) -> int:
    """Return how many rows to cut off; a slice takes no more than there are."""
    return 1 if count == ONE else LAST_ROWS


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
