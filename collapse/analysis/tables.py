"""Which tables the graph looks up by token id, which by position, and how far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from collapse.program import Program

aten = torch.ops.aten


def position_tables(program: Program) -> dict[str, fx.Node]:
    """Return name -> index node of every table that is looked up by something other than the token ids."""
    weights = {item.placeholder: item.target for item in program.inputs if item.role == "parameter"}
    return {
        weights[table.name]: index
        for table, index in _lookups(program)
        if table.name in weights and not _reads_token_ids(index)
    }


def token_tables(program: Program) -> tuple[str, ...]:
    """Return the names of the tables whose rows are token ids: looked up by the token ids, or giving the logits."""
    weights = {item.placeholder: item.target for item in program.inputs if item.role == "parameter"}
    tables = {weights[table.name] for table, index in _lookups(program) if _reads_token_ids(index)}
    return tuple(sorted(tables | set(_head_tensors(_logits(program), weights))))


def _lookups(program: Program) -> list[tuple[fx.Node, fx.Node]]:
    """Return (table, index) of every embedding look-up."""
    nodes: list[Any] = [node for node in program.graph.graph.nodes if node.target is aten.embedding.default]
    return [(node.args[0], node.args[1]) for node in nodes]


def _logits(program: Program) -> Any:
    nodes: list[Any] = list(program.graph.graph.nodes)
    return nodes[-1].args[0][0]


def _reads_token_ids(index: fx.Node) -> bool:
    return "input_ids" in {source.name for source in _sources(index)}


def _head_tensors(node: Any, weights: Mapping[str, str]) -> list[str]:
    """Follow the logits back through pointwise operators to the linear map that gives them."""
    while isinstance(node, fx.Node):
        if node.target in {aten.linear.default, aten.addmm.default, aten.mm.default}:
            names = {source.name for source in node.all_input_nodes}
            return [target for placeholder, target in weights.items() if placeholder in names]
        node = node.args[0] if node.args else None
    return []


def _sources(node: Any, *, through_sizes: bool = False) -> set[fx.Node]:
    """Return every node that `node` is computed from, itself included; reading a size counts only on request."""
    seen: set[fx.Node] = set()
    stack = [node] if isinstance(node, fx.Node) else []
    while stack:
        current = stack.pop()
        if current not in seen and (through_sizes or current.target is not aten.sym_size.int):
            seen.add(current)
            stack.extend(current.all_input_nodes)
    return seen


def last_row(program: Program, index: fx.Node, length: int) -> int:
    """Return the largest row looked up by a sequence of `length` tokens, in one prefill and as its last token.

    The index is computed from sizes and the attention mask alone; it grows with both, so the longest unpadded
    sequence reaches furthest.
    """
    largest = 0
    for new, past in ((length, 0), (1, length - 1)):
        environment = call_inputs(program, new, past)
        rows = _Evaluator(program.graph, index).evaluate(environment)
        largest = max(largest, int(rows.max()))
    return largest


def call_inputs(program: Program, new: int, past: int) -> list[torch.Tensor]:
    """Return what the placeholders are in an unpadded call of one sequence; weights and the cache hold nothing real."""
    sizes = {"batch": 1, "past": past}
    leaves = iter(program.cache)
    values = []
    for item in program.inputs:
        if item.target == "input_ids":
            values.append(torch.zeros(1, new, dtype=torch.long))
        elif item.target == "attention_mask":
            values.append(torch.ones(1, past + new if program.masks_past else new, dtype=torch.long))
        elif item.target == "position_ids":
            values.append(torch.arange(past, past + new)[None])
        elif item.role == "input":
            leaf = next(leaves)
            shape = [size if isinstance(size, int) else sizes[size] for size in leaf.shape]
            values.append(torch.zeros((), dtype=leaf.dtype).expand(shape))
        else:
            values.append(program.constants.get(item.target, torch.zeros(0)))
    return values


class _Evaluator(fx.Interpreter):
    """Runs only what one node depends on."""

    def __init__(self, module: fx.GraphModule, wanted: fx.Node) -> None:
        super().__init__(module)
        self._wanted = wanted
        self._needed = _sources(wanted, through_sizes=True)

    def evaluate(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        self.args_iter = iter(inputs)
        nodes: Iterable[fx.Node] = self.graph.nodes
        for node in nodes:
            if node.op == "placeholder" or node in self._needed:
                self.env[node] = self.run_node(node)
        value = self.env[self._wanted]
        assert isinstance(value, torch.Tensor)
        return value
