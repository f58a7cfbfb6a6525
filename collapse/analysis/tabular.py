"""Which nodes depend on constants and on positions alone, so that their values can be read off a table.

A lattice of facts: a node is constant, or a function of constants and of the positions along some of its dimensions,
or unknown (it has no entry). Dimensions of a function of positions are of one of these sources:

- `query`: index i of the dimension stands for the position `past + i`
- `key`: index i stands for the position i, of `past + new`
- `position`: two dimensions, batch and new, which stand for `position_ids[b, i]`

Why a table serves: evaluated in one call of `max_tokens` new tokens, no past, batch 1 and positions 0, 1, 2 and so
on, such a node holds its value for every position. Taking rows commutes with each operator of the chain (the rules of
`collapse.analysis.row_rules` hold for any choice of rows), so the rows of any other call are rows of this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import sympy
import torch
from torch import fx

from collapse.analysis.call_sizes import BATCH, NEW, PAST, Shapes
from collapse.analysis.flop_rules import op_name
from collapse.analysis.reachability import written_arguments, written_storage
from collapse.analysis.row_rules import Cut, Place, tensor_arguments
from collapse.analysis.slicing import pull
from collapse.program import Program

Source = Literal["query", "key", "position"]
Dims = tuple[int, ...]
Range = tuple[sympy.Expr, sympy.Expr]  # first value and length of consecutive whole numbers
LENGTHS: Mapping[Source, tuple[sympy.Expr, ...]] = {"position": (BATCH, NEW), "query": (NEW,), "key": (PAST + NEW,)}
PARTS = frozenset({"aten.split", "aten.split_with_sizes", "aten.chunk", "getitem"})  # several results, and one of them
RANGES: Mapping[Range, Source] = {(PAST, NEW): "query", (sympy.Integer(0), PAST + NEW): "key"}


@dataclass(frozen=True)
class Tabular:
    """The dimensions of a node that stand for positions, by source; none of a constant. All other sizes are fixed."""

    axes: Mapping[Source, Dims]

    @property
    def is_constant(self) -> bool:
        """Whether the value is the same in every call."""
        return not self.axes


def tabular_nodes(program: Program) -> dict[fx.Node, Tabular]:
    """Return the fact about every node that is constant or a function of positions; weights are neither."""
    graph, shapes = program.graph.graph, Shapes(program)
    roots, written = written_storage(graph)
    ranges: dict[fx.Node, Range] = {}
    facts = _given(program)
    for node in graph.nodes:
        if node.op != "call_function" or roots[node] in written:
            continue
        counted = _range(node, ranges, shapes)
        if counted is not None:
            ranges[node] = counted
        fact = _of_range(counted) or _fact(node, facts, shapes)
        if fact is not None:
            facts[node] = fact
    return facts


def _given(program: Program) -> dict[fx.Node, Tabular]:
    facts = {}
    for item in program.inputs:
        if item.role in {"buffer", "constant"}:
            facts[program.placeholder(item.placeholder)] = Tabular({})
        elif item.target == "position_ids":
            facts[program.placeholder(item.placeholder)] = Tabular({"position": (0, 1)})
    return facts


def _of_range(counted: Range | None) -> Tabular | None:
    source = RANGES.get(counted) if counted is not None else None
    return Tabular({source: (0,)}) if source else None


def _range(node: fx.Node, ranges: Mapping[fx.Node, Range], shapes: Shapes) -> Range | None:
    """Recognise `arange`, and consecutive numbers with a size of the call added."""
    name = op_name(node)
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype != torch.int64:
        return None
    sizes = [size for argument in node.args if (size := _size(argument, shapes)) is not None]
    if name == "aten.arange" and len(sizes) == len(node.args) <= 2:
        start = sizes[0] if len(sizes) == 2 else sympy.Integer(0)
        return start, sympy.expand(sizes[-1] - start)
    before = ranges.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    if name == "aten.add" and before and len(sizes) == 1 and not node.kwargs:
        return sympy.expand(before[0] + sizes[0]), before[1]
    return None


def _size(argument: Any, shapes: Shapes) -> sympy.Expr | None:
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
    return shapes.size(value) if type(value) is int or isinstance(value, torch.SymInt) else None


def _fact(node: fx.Node, facts: Mapping[fx.Node, Tabular], shapes: Shapes) -> Tabular | None:
    shape = shapes(node)
    operands = dict(tensor_arguments(node))
    if shape is None or not _is_pure(node) or not all(operand in facts for operand in operands.values()):
        return None
    sized = len(node.all_input_nodes) > len(set(operands.values()))  # it also takes sizes of the call
    axes: dict[Source, Dims] = {}
    for source in (source for source in LENGTHS if any(source in facts[operand].axes for operand in operands.values())):
        dims = next(_fitting(node, source, operands, facts, shapes, sized), None)
        if dims is None:
            return None
        axes[source] = dims
    taken = {dim for dims in axes.values() for dim in dims}
    fixed = all(size.is_Integer for dim, size in enumerate(shape) if dim not in taken)
    return Tabular(axes) if fixed and not (sized and not axes) else None


def _is_pure(node: fx.Node) -> bool:
    target = node.target
    if op_name(node) in PARTS:
        return True
    if not isinstance(target, torch._ops.OpOverload) or isinstance(node.meta.get("val"), list | tuple):
        return False
    return not written_arguments(node) and torch.Tag.nondeterministic_seeded not in target.tags


def _fitting(
    node: fx.Node,
    source: Source,
    operands: Mapping[Place, fx.Node],
    facts: Mapping[fx.Node, Tabular],
    shapes: Shapes,
    sized: bool,
) -> Iterator[Dims]:
    """Yield the dimensions of the node along which taking rows means taking rows of just the operands with `source`."""
    shape, lengths = shapes(node) or (), LENGTHS[source]
    choices = ([dim for dim, size in enumerate(shape) if size == length] for length in lengths)
    for dims in product(*choices):
        pairs = enumerate(zip(dims, lengths, strict=True))
        if all(_commutes(node, at, source, Cut(*pair), operands, facts, shapes, sized) for at, pair in pairs):
            yield dims


def _commutes(
    node: fx.Node,
    at: int,
    source: Source,
    cut: Cut,
    operands: Mapping[Place, fx.Node],
    facts: Mapping[fx.Node, Tabular],
    shapes: Shapes,
    sized: bool,
) -> bool:
    pulled = pull(node, cut, shapes)
    if pulled is None or (sized and not pulled.resized):
        return False
    wanted = {
        place: Cut(facts[operand].axes[source][at], cut.length)
        for place, operand in operands.items()
        if source in facts[operand].axes
    }
    return wanted == dict(pulled.cuts)
