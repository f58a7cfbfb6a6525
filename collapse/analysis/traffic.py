"""Bytes: of the weights, of what a decode step reads of them, and of what the KV cache grows by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from torch import fx

from collapse.analysis.flop_rules import op_name
from collapse.checkpoint import DTYPE_BITS, Checkpoint
from collapse.program import Program

ShapeOfNode = Callable[[fx.Node], tuple[int, ...]]
ElementBytes = Mapping[str, float] | float

LOOKUPS = frozenset({"aten.embedding", "aten.index", "aten.index_select", "aten.gather", "aten._unsafe_index"})
GROUPED = frozenset({"aten._grouped_mm", "transformers.grouped_mm_fallback"})


def stored(program: Program) -> dict[str, tuple[fx.Node, ...]]:
    """Map the first name of every tensor that a checkpoint holds to its placeholders, tied names together.

    Buffers that are computed anew on loading are not held.
    """
    nodes = {node.name: node for node in program.graph.graph.nodes if node.op == "placeholder"}
    held: dict[str, list[fx.Node]] = {}
    for item in program.inputs:
        if item.role in {"parameter", "buffer"} and item.target in program.shapes:
            held.setdefault(program.aliases(item.target)[0], []).append(nodes[item.placeholder])
    return {name: tuple(group) for name, group in sorted(held.items())}


def _numel(node: fx.Node) -> int:
    return math.prod(int(size) for size in node.meta["val"].shape)


def _element(program: Program, element_bytes: ElementBytes, name: str) -> float:
    if not isinstance(element_bytes, Mapping):
        return element_bytes
    known = (element_bytes[alias] for alias in program.aliases(name) if alias in element_bytes)
    return next(known, max(element_bytes.values()))


def element_bytes(checkpoint: Checkpoint, program: Program) -> dict[str, float]:
    """Return the bytes of an element of every tensor of the model, tied names included, as the files have it.

    A quantised weight has the bytes of all its tensors.
    """
    sizes: dict[str, float] = {}
    for name, info in checkpoint.tensors.items():
        model_name = program.model_name(name)
        if model_name is not None:
            group = checkpoint.group(name)
            size = DTYPE_BITS[info.dtype] / 8 if group is None else group.nbytes / group.numel
            sizes.update((alias, size) for alias in program.aliases(model_name))
    usual = max(sizes.values(), default=4.0)
    return {name: sizes.get(name, usual) for name in program.shapes}


def parameter_counts(program: Program) -> dict[str, int]:
    """Return the number of elements of every parameter that the program still has, tied ones once."""
    roles = {item.placeholder: item.role for item in program.inputs}
    return {
        name: min(_numel(node) for node in group)
        for name, group in stored(program).items()
        if roles[group[0].name] == "parameter"
    }


def parameter_bytes(program: Program, element_bytes: ElementBytes) -> dict[str, int]:
    """Return the bytes of every parameter and saved buffer that the program still has, tied ones once."""
    return {
        name: math.ceil(min(_numel(node) for node in group) * _element(program, element_bytes, name))
        for name, group in stored(program).items()
    }


def weight_reads(program: Program, shape: ShapeOfNode, element_bytes: ElementBytes) -> dict[str, int]:
    """Return the bytes of each stored tensor that one call reads: of looked-up tensors only the rows asked for.

    Of experts the call reads at most one a row that it routes.
    """
    reads: dict[str, int] = {}
    for name, group in stored(program).items():
        size = min(_numel(node) for node in group)
        count = min(size, sum(_read(node, shape) for node in group))
        if count:
            reads[name] = math.ceil(count * _element(program, element_bytes, name))
    return reads


def _read(node: fx.Node, shape: ShapeOfNode) -> int:
    """Return how many elements the users of a weight, or of a view of it, read."""
    return sum(_read_by(user, node, shape) for user in node.users if user.op != "output")


def _read_by(user: fx.Node, node: fx.Node, shape: ShapeOfNode) -> int:
    name, size = op_name(user), math.prod(shape(node))
    if name == "aten.embedding" and user.args[0] is node:
        return math.prod(shape(user.args[1])) * shape(node)[-1]  # type: ignore[arg-type]
    if name in LOOKUPS and user.args[0] is node:
        return min(size, math.prod(shape(user)))
    if name in GROUPED and user.args[1] is node:
        rows, groups = shape(user.args[0])[0], shape(node)[0]  # type: ignore[arg-type]
        return size * min(rows, groups) // groups
    is_view = len(user.all_input_nodes) == 1 and hasattr(user.target, "_schema")
    if is_view and all(result.alias_info for result in user.target._schema.returns):  # type: ignore[union-attr]
        return min(_read(user, shape), size)
    return size


def kv_bytes(program: Program, element_bytes: ElementBytes, kv: float | None) -> Iterator[tuple[fx.Node, int]]:
    """Yield each output that is a growing cache tensor, and the bytes by which a token makes it grow.

    `kv` is the bytes of an element; by default those of the largest weight. A state of fixed size, as in a
    Mamba, does not grow. A sliding window grows until it is full.
    """
    sizes = parameter_counts(program)
    largest = max(sizes, key=lambda name: (sizes[name], name))
    element = kv if kv is not None else _element(program, element_bytes, largest)
    output = next(node for node in program.graph.graph.nodes if node.op == "output")
    for leaf, node in zip(program.cache, output.args[0][1:], strict=True):
        if "past" in leaf.shape and isinstance(node, fx.Node) and node.op != "placeholder":
            fixed = math.prod(size for size in leaf.shape if isinstance(size, int))
            yield node, math.ceil(fixed * element)
