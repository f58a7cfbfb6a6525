"""What positions and config decide, evaluated at every position that a schema allows.

Rotary tables are often written in several ways that give the same bits: as a product of matrices or of vectors, once
or once for each of three axes that a text has in common. A node that is a function of positions alone takes finitely
many values, so such nodes are compared by evaluating them all rather than by how they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import torch
from torch import fx

from collapse.analysis.tables import call_inputs
from collapse.analysis.tabular import Tabular, tabular_nodes
from collapse.fingerprint import fingerprint
from collapse.program import Program

_CONSTANT = frozenset({"buffer", "constant"})
ValueOf = Callable[[str], torch.Tensor | None]


def position_values(program: Program, value_of: ValueOf, last_position: int) -> dict[fx.Node, Hashable]:
    """Return node -> key of its values, for nodes that depend on positions and on constants of known value alone.

    Two nodes of one key and of one shape have the same value in every call with positions up to `last_position`: they
    stand for positions along the same dimensions, and a value for each position is all that they have.
    """
    facts = {node: fact for node, fact in tabular_nodes(program).items() if fact.axes.keys() <= {"position"}}
    given = _given(program, value_of, last_position + 1)
    runner = _Runner(program.graph, facts, given)
    return {node: ("values", dict(facts[node].axes).get("position"), runner.digests[node]) for node in runner.digests}


def _given(program: Program, value_of: ValueOf, length: int) -> Mapping[str, torch.Tensor | None]:
    """Return what each placeholder is in a call of `length` new tokens; None for weights and unknown constants."""
    inputs = call_inputs(program, length, 0)
    return {
        item.placeholder: tensor
        if item.role == "input"
        else value_of(item.target)
        if item.role != "parameter"
        else None
        for item, tensor in zip(program.inputs, inputs, strict=True)
    }


class _Runner(fx.Interpreter):
    """Runs the nodes of `facts`, and the sizes that they take, and keeps a digest of each value, not the value."""

    def __init__(
        self, module: fx.GraphModule, facts: Mapping[fx.Node, Tabular], given: Mapping[str, torch.Tensor | None]
    ) -> None:
        super().__init__(module)
        self.digests: dict[fx.Node, str] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                if (value := given.get(node.name)) is not None:
                    self.env[node] = value
            elif node.op == "call_function" and self._can_run(node, facts):
                self.env[node] = self.run_node(node)
            if node in facts and isinstance(self.env.get(node), torch.Tensor):
                self.digests[node] = fingerprint(self.env[node])
            self._forget(node)

    def _can_run(self, node: fx.Node, facts: Mapping[fx.Node, Tabular]) -> bool:
        is_size = isinstance(node.meta.get("val"), torch.SymInt | int)
        return (node in facts or is_size) and all(source in self.env for source in node.all_input_nodes)

    def _forget(self, node: fx.Node) -> None:
        for value in self.user_to_last_uses.get(node, ()):
            self.env.pop(value, None)
