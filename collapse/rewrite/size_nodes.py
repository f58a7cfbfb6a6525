"""Nodes that compute sizes of a call, from the graph's inputs."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch import fx

from collapse.analysis.call_sizes import BATCH, LAST, LAST_ROWS, NEW, PAST
from collapse.errors import PlanError

aten = torch.ops.aten


class SizeNodes:
    """Makes each size once, before everything that might use it."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._inputs = {node.name: node for node in graph.nodes if node.op == "placeholder"}
        self._first = next(node for node in graph.nodes if node.op != "placeholder")
        self._known: dict[sympy.Expr, Any] = {}

    def of(self, size: sympy.Expr) -> Any:
        """Return a number, or the node that computes `size`; raises `PlanError` for what is no sum or product."""
        if size.is_Integer:
            return int(size)
        if size not in self._known:
            self._known[size] = self._made(size)
        return self._known[size]

    def traced(self, size: sympy.Expr) -> int | torch.SymInt:
        """Return the size as it stands in traced shapes."""
        if size.is_Integer:
            return int(size)
        if size.func in _COMBINE:
            first, *rest = (self.traced(part) for part in size.args)
            for part in rest:
                first = _COMBINE[size.func](first, part)
            return first
        ids, mask = (self._inputs[name].meta["val"].shape for name in ("input_ids", "attention_mask"))
        values = {BATCH: ids[0], NEW: ids[1], PAST: mask[1] - ids[1], LAST: torch.sym_min(ids[1], LAST_ROWS)}  # type: ignore[no-untyped-call]
        return values[size]  # type: ignore[no-any-return]

    def _made(self, size: sympy.Expr) -> Any:
        if size.func in _COMBINE:
            first, *rest = (self.of(part) for part in size.args)
            for part in rest:
                first = self._call(_COMBINE[size.func], first, part)
            return first
        if size == PAST:
            total = self._call(aten.sym_size.int, self._inputs["attention_mask"], 1)
            return self._call(operator.sub, total, self.of(NEW))
        if size == LAST:
            return self._call(torch.sym_min, self.of(NEW), LAST_ROWS)
        if size not in (BATCH, NEW):
            raise PlanError(f"a size of the form {size} cannot be rebuilt")
        return self._call(aten.sym_size.int, self._inputs["input_ids"], 0 if size == BATCH else 1)

    def _call(self, target: Any, *arguments: Any) -> fx.Node:
        with self._graph.inserting_before(self._first):
            return self._graph.call_function(target, arguments)


_COMBINE = {sympy.Add: operator.add, sympy.Mul: operator.mul}
