"""Matrix products of a block with their weights, and the neurons between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from collapse.analysis.units import Channels, Part
from collapse.plan import Axis
from collapse.program import Program

aten = torch.ops.aten
ELEMENTWISE = frozenset(
    {
        *(aten.mul.Tensor, aten.mul.Scalar, aten.add.Tensor, aten.add.Scalar, aten.pow.Tensor_Scalar, aten.neg.default),
        *(aten.silu.default, aten.gelu.default, aten.relu.default, aten.sigmoid.default, aten.tanh.default),
        *(aten.to.dtype, aten.clone.default, aten.dropout.default, aten.square.default, aten.div.Tensor),
    }
)
RESHAPES = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})


@dataclass(frozen=True)
class Product:
    """`x @ W + b`: `out_dim` and `in_dim` are dimensions of the weight; names are the state dict's."""

    node: fx.Node
    source: fx.Node
    weight: str
    bias: str | None
    out_dim: int
    in_dim: int
    rows: int
    columns: int


@dataclass(frozen=True)
class Slice:
    """Outputs `start` on of a product."""

    product: Product
    start: int


def products_of(program: Program, block: str) -> dict[fx.Node, Product]:
    """Return the products with weights in the module `block`, by node."""
    names = {item.placeholder: item.target for item in program.inputs if item.role == "parameter"}
    found = {}
    for node in program.graph.graph.nodes:
        if is_in(node, block) and (product := _product(node, names, program)) is not None:
            found[node] = product
    return found


def is_in(node: fx.Node, block: str) -> bool:
    """Whether a node was traced within a module."""
    return any(str(path) == block for path, _ in (node.meta.get("nn_module_stack") or {}).values())


def module_of(node: fx.Node) -> str:
    """Return the path of the innermost module of a node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def _product(node: fx.Node, names: Mapping[str, str], program: Program) -> Product | None:
    arguments: Sequence[Any] = node.args
    if node.target is aten.linear.default:
        source, weight, bias = arguments[0], arguments[1], (arguments[2] if len(arguments) > 2 else None)
        out_dim, in_dim = 0, 1
    elif node.target is aten.addmm.default:
        (bias, source, weight), (out_dim, in_dim) = arguments[:3], (1, 0)
    else:
        return None
    name = names.get(weight.name)
    if name is None or (bias is not None and bias.name not in names):
        return None
    shape = program.shapes[name]
    held = None if bias is None else names[bias.name]
    return Product(node, source, name, held, out_dim, in_dim, shape[out_dim], shape[in_dim])


def out_axes(product: Product, files: Mapping[str, str]) -> tuple[Axis, ...]:
    """Return the axes of the files that count a product's outputs; KeyError where the files have them otherwise."""
    weight = Axis(tensor=files[product.weight], dim=product.out_dim)
    return (weight,) if product.bias is None else (weight, Axis(tensor=files[product.bias], dim=0))


def in_axis(product: Product, files: Mapping[str, str]) -> Axis:
    """Return the axis of the files that counts a product's inputs."""
    return Axis(tensor=files[product.weight], dim=product.in_dim)


def neurons_of(products: Mapping[fx.Node, Product], files: Mapping[str, str]) -> Iterator[Channels]:
    """Yield the neurons before every product that has any."""
    for product in products.values():
        sources = _sources(product, products)
        if sources and {product.weight, *(part.product.weight for part in sources)} <= files.keys():
            yield _neurons(product, sources, files)


def _neurons(product: Product, sources: Sequence[Slice], files: Mapping[str, str]) -> Channels:
    count = product.columns
    ranges: dict[fx.Node, list[Slice]] = {}
    for part in sources:
        ranges.setdefault(part.product.node, []).append(part)
    whole = [in_axis(product, files)]
    fused = []
    for parts in ranges.values():
        axes = out_axes(parts[0].product, files)
        if len(parts) == 1:
            whole += axes
        else:
            starts = tuple(sorted((part.start, 1) for part in parts))
            fused.append(Part(axes, parts[0].product.rows, starts))
    site = module_of(product.node).rpartition(".")[0]
    return Channels("neurons", site, count, (Part(tuple(whole), count, ((0, 1),)), *fused), {count: 1})


def _sources(product: Product, products: Mapping[fx.Node, Product]) -> list[Slice] | None:
    """Return the product outputs that, elementwise, make the input of `product`; None where anything else does."""
    found: dict[tuple[fx.Node, int], Slice] = {}
    seen: set[fx.Node] = set()
    stack = [product.source]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        part = _slice_of(node, products)
        if part is not None:
            found[(part.product.node, part.start)] = part
            seen |= {part.product.node, *_between(node, part.product.node)}
            continue
        if not _passes(node, product.columns):
            return None
        stack += [source for source in node.all_input_nodes if _is_wide(source, product.columns)]
    covered = _covered(found.values(), product.columns)
    return list(found.values()) if found and covered and _is_closed(seen, product) else None


def _passes(node: fx.Node, width: int) -> bool:
    if node.target in RESHAPES:
        return _is_wide(node, width) and _is_wide(node.all_input_nodes[0], width)
    return node.target in ELEMENTWISE and _is_wide(node, width)


def _is_wide(node: fx.Node, width: int) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[-1] == width


def _slice_of(node: fx.Node, products: Mapping[fx.Node, Product]) -> Slice | None:
    """Return which outputs of a product a node is: all, or one of the pieces along the last axis."""
    if node in products:
        return Slice(products[node], 0)
    first: Any = node.args[0] if node.args else None
    if str(node.target) == "<built-in function getitem>" and isinstance(first, fx.Node) and first.args:
        base, number = _base(first.args[0], products), node.args[1]
        pieces: Any = first.meta.get("val")
        if base is not None and first.target in PIECES and isinstance(number, int):
            return Slice(products[base], sum(int(piece.shape[-1]) for piece in pieces[:number]))
    if node.target is aten.slice.Tensor and (base := _base(first, products)) is not None:
        start: Any = node.args[2]
        last = node.args[1] in (-1, first.meta["val"].ndim - 1)
        return Slice(products[base], start) if last and isinstance(start, int) else None
    if node.target in RESHAPES and isinstance(first, fx.Node) and first in products:
        return Slice(products[first], 0) if _is_wide(node, products[first].rows) else None
    return None


PIECES = frozenset({aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default})


def _base(node: Any, products: Mapping[fx.Node, Product]) -> fx.Node | None:
    """Return the product that a node is, as it is or as it was reshaped around its last axis."""
    if not isinstance(node, fx.Node):
        return None
    if node in products:
        return node
    first: Any = node.args[0] if node.args else None
    if node.target in RESHAPES and first in products and _is_wide(node, products[first].rows):
        return first  # type: ignore[no-any-return]
    return None


def _between(node: fx.Node, base: fx.Node) -> Iterator[fx.Node]:
    while node is not base:
        yield node
        node = node.all_input_nodes[0]


def _covered(parts: Any, width: int) -> bool:
    """Whether the pieces make up whole products, each piece of the given width."""
    starts: dict[fx.Node, tuple[int, set[int]]] = {}
    for part in parts:
        starts.setdefault(part.product.node, (part.product.rows, set()))[1].add(part.start)
    return all(begin == set(range(0, rows, width)) for rows, begin in starts.values())


def _is_closed(seen: set[fx.Node], product: Product) -> bool:
    """Whether nothing but `product` reads the neurons."""
    allowed = seen | {product.node}
    readers = (user for node in seen for user in node.users if user.target is not aten.sym_size.int)
    return all(user in allowed or user.target in PIECES or _is_piece(user) for user in readers)


def _is_piece(node: fx.Node) -> bool:
    return str(node.target) == "<built-in function getitem>"
