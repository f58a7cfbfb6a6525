"""Sublayers: what a block adds to the residual stream, found in the traced graph.

A block hands on the stream that it got plus one or more summands. Each summand comes out of one module, the *writer*:
an attention, a feed-forward, or the norm that some architectures put behind them. No module is known by its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from collapse.analysis.flop_rules import ATTENTION, op_name
from collapse.analysis.products import RESHAPES, is_in, module_of
from collapse.plan import Skipped
from collapse.program import Program

aten = torch.ops.aten
ADDS = frozenset({aten.add.Tensor, aten.add_.Tensor})
SCALES = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar})
CARRIES = RESHAPES | {aten.dropout.default, aten.to.dtype, aten.clone.default, aten.contiguous.default}


@dataclass(frozen=True)
class Sublayer:
    """One summand of a block.

    Attributes:
        path: the block's own child that holds most of what goes with it, such as its attention.
        writer: the module whose output is added to the stream; without it the block adds nothing here.
        attends: whether it looks at other tokens through a KV cache.
        tensors: parameters that nothing else needs, by their first state-dict name.
        nodes: names of the graph's nodes that nothing else needs.
    """

    path: str
    writer: str
    attends: bool
    tensors: frozenset[str]
    nodes: frozenset[str]


def sublayers_of(program: Program, block: str) -> tuple[Sublayer | Skipped, ...]:
    """Return the sublayers of one block in the order in which the graph runs them, or why it is left alone."""
    out = _stream_out(program, block)
    summands = None if out is None else _summands(out, block, out)
    if summands is None:
        return (_skipped(block, "what it hands on is not the stream that it got plus something"),)
    needed, order = _needed(program, frozenset()), list(program.graph.graph.nodes)
    summands.sort(key=lambda pair: order.index(pair[0]))
    return tuple(_sublayer(program, block, node, add, needed) for node, add in summands)


def _skipped(site: str, reason: str) -> Skipped:
    return Skipped(pass_name="sublayers", site=site, reason=reason)


def _stream_out(program: Program, block: str) -> fx.Node | None:
    """Return the one value of three dimensions that the rest of the model takes from a block."""
    within = [node for node in program.graph.graph.nodes if node.op == "call_function" and is_in(node, block)]
    found = [node for node in within if _rank(node) == 3 and any(_is_outside(user, block) for user in node.users)]
    return found[0] if len(found) == 1 else None


def _is_outside(user: fx.Node, block: str) -> bool:
    return user.op == "call_function" and user.target is not aten.sym_size.int and not is_in(user, block)


def _rank(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.ndim if isinstance(value, torch.Tensor) else 0


def _summands(node: fx.Node, block: str, out: fx.Node) -> list[tuple[fx.Node, fx.Node]] | None:
    """Return (summand, its addition) on the way from the block's input to `node`, in order; None without such a way."""
    if not is_in(node, block):
        return [] if node.op == "call_function" and _is_like(node, out) else None
    inputs = _tensors(node)
    if node.target in CARRIES:
        return _summands(inputs[0], block, out)
    if node.target in ADDS and len(inputs) == 2:
        for stream, summand in (inputs, inputs[::-1]):
            before = _summands(stream, block, out)
            if before is not None:
                return [*before, *((one, node) for one in _split(summand, block))]
    return None


def _is_like(node: fx.Node, out: fx.Node) -> bool:
    value, wanted = node.meta.get("val"), out.meta["val"]
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[-1:] == wanted.shape[-1:]


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [argument for argument in node.args if isinstance(argument, fx.Node) and _rank(argument)]


def _split(node: fx.Node, block: str) -> Iterator[fx.Node]:
    """Yield the summands of a sum that the block itself takes, as blocks with parallel sublayers do."""
    inputs = _carried(node)
    is_sum = node.target in ADDS and module_of(node) == block and len(inputs) == 2
    parts = [part for one in inputs for part in _split(one, block)] if is_sum or _is_carrier(node) else []
    yield from parts if len(parts) > 1 else [node]


def _sublayer(
    program: Program, block: str, summand: fx.Node, add: fx.Node, needed: frozenset[fx.Node]
) -> Sublayer | Skipped:
    written = _written(program, summand, add)
    if written is None:
        return _skipped(block, f"what is added at {add.name} is not the output of one module")
    node, writer = written
    gone = needed - _needed(program, frozenset({node}))
    names = {item.placeholder: item.target for item in program.inputs if item.role == "parameter"}
    tensors = frozenset(program.aliases(names[one.name])[0] for one in gone if one.name in names)
    return Sublayer(
        path=_core(program, block, tensors) or writer,
        writer=writer,
        attends=_attends(program, gone),
        tensors=tensors,
        nodes=frozenset(one.name for one in gone),
    )


def _written(program: Program, node: fx.Node, add: fx.Node) -> tuple[fx.Node, str] | None:
    """Return a module's output that is zero exactly where the summand is, and the outermost such module."""
    around = _stack(add)
    while True:
        for path in (path for path in _stack(node) if path not in around and _holds(program, path)):
            if all(path not in _stack(user) for user in _readers(node)):
                return node, path
        if not _is_carrier(node) or len(_readers(node)) != 1:
            return None
        node = _carried(node)[0]


def _is_carrier(node: fx.Node) -> bool:
    """Whether a node only moves or scales one value, so that it is zero where that one is."""
    return node.target in CARRIES | SCALES and len(_carried(node)) == 1


def _carried(node: fx.Node) -> list[fx.Node]:
    return [one for one in _tensors(node) if one.op != "placeholder"]


def _holds(program: Program, path: str) -> bool:
    """Whether a module has weights; one without, such as dropout, may serve several sublayers."""
    return any(name.startswith(f"{path}.") for name in program.shapes)


def _readers(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.target is not aten.sym_size.int]


def _stack(node: fx.Node) -> list[str]:
    return [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def _needed(program: Program, cut: frozenset[fx.Node]) -> frozenset[fx.Node]:
    """Return the nodes that the logits are computed from when those in `cut` are constants."""
    output = next(node for node in program.graph.graph.nodes if node.op == "output")
    stack, seen = [output.args[0][0]], set(cut)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += node.all_input_nodes
    return frozenset(seen - cut)


def _attends(program: Program, nodes: frozenset[fx.Node]) -> bool:
    """Whether an attention operator is among the nodes, or what makes an entry of a cache that grows."""
    output: Any = next(node for node in program.graph.graph.nodes if node.op == "output").args[0]
    grows = [leaf for leaf, held in zip(output[1:], program.cache, strict=False) if "past" in held.shape]
    return any(op_name(node) in ATTENTION for node in nodes) or any(leaf in nodes for leaf in grows)


def _core(program: Program, block: str, tensors: Iterable[str]) -> str | None:
    """Return the block's child with most of some parameters' elements; the later one of equals."""
    held: dict[str, int] = {}
    for name in tensors:
        child, dot, _ = name.removeprefix(f"{block}.").partition(".")
        if name.startswith(f"{block}.") and dot:
            size = 1
            for length in program.shapes[name]:
                size *= length
            held[f"{block}.{child}"] = held.get(f"{block}.{child}", 0) + size
    order = list(program.module_types)
    return max(held, key=lambda path: (held[path], order.index(path)), default=None)
