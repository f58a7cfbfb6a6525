"""Evaluates some nodes of a program once, in the call that holds the value of every position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from collapse.analysis.reachability import closure
from collapse.program import Input, Program, size_of


class Prologue(fx.Interpreter):
    """Runs only what some nodes depend on, in a call of the longest sequence and nothing before it."""

    def __init__(self, program: Program, wanted: Iterable[str]) -> None:
        super().__init__(program.graph)
        self._program = program
        names = frozenset(wanted)
        self._wanted = [node for node in self.graph.nodes if node.name in names]

    def evaluate(self, weights: Mapping[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
        """Return the values of the wanted nodes by name."""
        needed = closure(self._wanted, set())
        self.args_iter = iter([self._input(item, weights, length) for item in self._program.inputs])
        with torch.no_grad():
            for node in self.graph.nodes:
                if node.op == "placeholder" or node in needed:
                    self.env[node] = self.run_node(node)
        return {node.name: self.env[node] for node in self._wanted}

    def _input(self, item: Input, weights: Mapping[str, torch.Tensor], length: int) -> torch.Tensor:
        if item.role == "constant":
            return self._program.constants[item.target]
        if item.role != "input":
            return weights[item.target]
        if item.target == "position_ids":
            return torch.arange(length)[None]
        value = self._program.placeholder(item.placeholder).meta["val"]
        sizes = self._program.bindings(batch=1, new=length, past=0)
        return torch.ones((), dtype=value.dtype).expand([size_of(size, sizes) for size in value.shape])
