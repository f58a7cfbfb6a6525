"""What the sizes of a traced graph are in a call of other sizes.

A dynamic trace says so by symbols. A static trace, much faster to make, says so when it was made with sizes
that no size of the model is a multiple of: then every multiple in the graph comes from the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from collapse.errors import UnsupportedError
from collapse.program import Program, size_of

Size = int | torch.SymInt
SizeOf = Callable[[Any], int]
META = torch.device("meta")


@dataclass(frozen=True)
class Call:
    """The sizes of one call: sequences, new tokens of each, and tokens of each already in the cache."""

    batch: int
    new: int
    past: int

    @property
    def total(self) -> int:
        """Tokens that the last new token attends to, itself included."""
        return self.past + self.new


def traced_call(program: Program) -> Call | None:
    """Return the sizes that a static program was traced with, None for a dynamic one."""
    shapes = {item.target: program.placeholder(item.placeholder).meta["val"].shape for item in program.inputs
              if item.role == "input"}  # fmt: skip
    batch, new = shapes["input_ids"]
    total = shapes["attention_mask"][1]
    if any(isinstance(size, torch.SymInt) for size in (batch, new, total)):
        return None
    return Call(int(batch), int(new), int(total) - int(new))


def size_reader(program: Program, call: Call) -> SizeOf:
    """Return the function from a size in `program` to what it is in `call`.

    Raises `UnsupportedError` for a static program of other sizes that do not stand out from the model's own.
    """
    traced = traced_call(program)
    if traced is None:
        return _symbolic(program, call)
    if traced == call:
        return int
    if not stands_out(program, traced) or traced.batch != call.batch:
        what = f"a static program traced for {traced} says nothing about {call}"
        raise UnsupportedError(what, where="trace", fix="trace it with dynamic=True")
    factors = ((traced.new, call.new), (traced.total, call.total), (traced.past, call.past))

    def rescale(size: Size) -> int:
        left, scale = int(size), 1
        for before, after in factors:
            while left and left % before == 0:
                left, scale = left // before, scale * after
        return left * scale

    return rescale


def stands_out(program: Program, traced: Call) -> bool:
    """Whether no dimension of a weight is a multiple of a size that the program was traced with."""
    return sizes_stand_out({size for shape in program.shapes.values() for size in shape}, traced)


def sizes_stand_out(dimensions: set[int], traced: Call) -> bool:
    """Whether new, past and total are apart, more than 16, and divide none of `dimensions`."""
    sizes = (traced.new, traced.past, traced.total)
    if min(sizes) <= 16 or any(a % b == 0 for a in sizes for b in sizes if a != b):
        return False
    return not any(dimension % size == 0 for dimension in dimensions if dimension for size in sizes)


def _symbolic(program: Program, call: Call) -> SizeOf:
    bindings = program.bindings(batch=call.batch, new=call.new, past=call.past)
    known: dict[Any, int] = {}

    def evaluate(size: Size) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr
        if expression not in known:
            known[expression] = size_of(size, bindings)
        return known[expression]

    return evaluate


def shape_reader(program: Program, call: Call) -> Callable[[fx.Node], tuple[int, ...]]:
    """Return the function from a node to its shape in `call`.

    Views and casts of a weight are evaluated again from the weight's placeholder, since a rewrite narrows
    that one alone.
    """
    size = size_reader(program, call)
    weights = {item.placeholder for item in program.inputs if item.role != "input"}
    views: dict[fx.Node, torch.Tensor | None] = {}

    def fresh(node: Any) -> torch.Tensor | None:
        """Return what a chain of operators makes of one weight, on meta; None for anything that is no such chain."""
        if node not in views:
            views[node] = _evaluate_view(node, weights, fresh)
        return views[node]

    def shape(node: fx.Node) -> tuple[int, ...]:
        weight = fresh(node)
        if weight is not None:
            return tuple(weight.shape)
        return tuple(size(dimension) for dimension in node.meta["val"].shape)

    return shape


def _evaluate_view(
    node: fx.Node, weights: set[str], fresh: Callable[[fx.Node], torch.Tensor | None]
) -> torch.Tensor | None:
    if node.op == "placeholder":
        return torch.empty(node.meta["val"].shape, device="meta") if node.name in weights else None
    inputs = node.all_input_nodes
    if len(inputs) != 1 or not isinstance(node.target, torch._ops.OpOverload) or node.args[:1] != (inputs[0],):
        return None
    source = fresh(inputs[0])
    if source is None or not all(result.alias_info for result in node.target._schema.returns):
        return None
    rest = [META if isinstance(argument, torch.device) else argument for argument in node.args[1:]]
    named = {name: argument for name, argument in node.kwargs.items() if name != "device"}
    value = node.target(source, *rest, **named)
    return value if isinstance(value, torch.Tensor) else None
