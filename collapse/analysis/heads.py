"""KV groups: which rows of the projections make one key/value head of an attention operator and its query heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from collapse.analysis.products import Product, in_axis, is_in, module_of, out_axes
from collapse.analysis.units import Channels, Part
from collapse.plan import Skipped
from collapse.program import Program

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default
CARRIES = frozenset(
    {
        *(aten.transpose.int, aten.permute.default, aten.contiguous.default, aten.clone.default, aten.to.dtype),
        *(aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.dropout.default),
    }
)


def kv_groups_of(
    program: Program, block: str, products: Mapping[fx.Node, Product], files: Mapping[str, str]
) -> Iterator[Channels | Skipped]:
    """Yield the KV groups of every attention operator of a block, or why they are left alone."""
    for node in program.graph.graph.nodes:
        if node.target is ATTENTION and is_in(node, block):
            site = module_of(node)
            found = _groups(program, node, block, site, products, files)
            yield Skipped(pass_name="kv-groups", site=site, reason=found) if isinstance(found, str) else found


def _groups(
    program: Program,
    node: fx.Node,
    block: str,
    site: str,
    products: Mapping[fx.Node, Product],
    files: Mapping[str, str],
) -> Channels | str:
    arguments: Any = node.args[:3]
    made = [_made_from(argument, block, products) for argument in arguments]
    if any(len(found) != 1 for found, _ in made):
        return f"query, key and value come from {[len(found) for found, _ in made]} products, not one each"
    query, key, value = (next(iter(found)) for found, _ in made)
    out = _reader(node, products)
    if out is None:
        return "what reads the heads is not one product"
    (_, heads, _, width), value_width = arguments[0].meta["val"].shape, arguments[2].meta["val"].shape[3]
    if _norm_over_heads(program, made, width):
        return "a norm is taken over all heads together, so that each depends on the others"
    if {query.weight, key.weight, value.weight, out.weight} - files.keys():
        return "the files do not have its weights as they are in the model"
    parts = _parts(query, key, value, int(heads), int(width), int(value_width), files)
    if isinstance(parts, str) or out.columns != int(heads) * int(value_width):
        return parts if isinstance(parts, str) else f"what reads {heads} heads has {out.columns} inputs"
    groups, found_parts = parts
    each = int(heads) // groups
    outputs = Part((in_axis(out, files),), out.columns, ((0, each * int(value_width)),))
    counts = {int(heads): each, groups: 1}
    return Channels("kv-groups", site, groups, _merged((*found_parts, outputs)), counts, {"head_dim": int(width)})


def _parts(
    query: Product, key: Product, value: Product, heads: int, width: int, value_width: int, files: Mapping[str, str]
) -> tuple[int, tuple[Part, ...]] | str:
    """Return the number of groups and the rows of the projections."""
    if key.rows == value.rows == query.rows and query.node is key.node is value.node:
        return _fused(query, heads, width, files)
    if len({query.node, key.node, value.node}) < 3:
        return "two of query, key and value share a product"
    groups = key.rows // width
    if key.rows % width or value.rows != groups * value_width or query.rows != heads * width or heads % groups:
        return f"rows {query.rows}, {key.rows} and {value.rows} are no whole heads of {width}"
    sizes = ((query, heads // groups * width), (key, width), (value, value_width))
    return groups, tuple(Part(out_axes(product, files), product.rows, ((0, size),)) for product, size in sizes)


def _fused(product: Product, heads: int, width: int, files: Mapping[str, str]) -> tuple[int, tuple[Part, ...]] | str:
    """Rows of one product for all three: one range after the other, or the three of a head together."""
    axes = out_axes(product, files)
    groups = (product.rows // width - heads) // 2
    if groups < 1 or heads % groups or product.rows != (heads + 2 * groups) * width:
        return f"{product.rows} rows are no whole query, key and value heads of {width}"
    starts = _starts(product)
    if starts == {0, heads * width, (heads + groups) * width}:
        ranges = ((0, heads // groups * width), (heads * width, width), ((heads + groups) * width, width))
        return groups, (Part(axes, product.rows, ranges),)
    if _by_head(product, 3 * width) and heads == groups:
        return groups, (Part(axes, product.rows, ((0, 3 * width),)),)
    return "how the fused product is divided into query, key and value is not recognised"


def _starts(product: Product) -> set[int]:
    """Return where the pieces begin that are cut from a fused product's last axis."""
    starts: set[int] = set()
    for node in _same_rows(product):
        for user in node.users:
            value: Any = user.meta.get("val")
            if user.target is aten.slice.Tensor and isinstance(user.args[2], int):
                starts.add(user.args[2])
            elif isinstance(value, list | tuple):
                sizes = [int(piece.shape[-1]) for piece in value]
                starts |= {sum(sizes[:number]) for number in range(len(sizes))}
    return starts


def _same_rows(product: Product) -> list[fx.Node]:
    views = [user for user in product.node.users if user.target in CARRIES]
    return [product.node, *(view for view in views if view.meta["val"].shape[-1] == product.rows)]


def _by_head(product: Product, width: int) -> bool:
    views = (user for node in _same_rows(product) for user in node.users if user.target in CARRIES)
    return any(view.meta["val"].shape[-1] == width for view in views)


def _made_from(
    node: fx.Node, block: str, products: Mapping[fx.Node, Product]
) -> tuple[frozenset[Product], frozenset[fx.Node]]:
    """Return the products that a value comes from within a block, and the placeholders read on the way."""
    found: set[Product] = set()
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current in products:
            found.add(products[current])
        elif current not in seen:
            seen.add(current)
            if is_in(current, block):
                stack += current.all_input_nodes
    return frozenset(found), frozenset(node for node in seen if node.op == "placeholder")


def _norm_over_heads(program: Program, made: Any, width: Any) -> bool:
    """Whether a vector longer than a head scales query or key on its way."""
    names = {item.placeholder: item.target for item in program.inputs if item.role == "parameter"}
    read = {names[node.name] for _, nodes in made for node in nodes if node.name in names}
    return any(len(program.shapes[name]) != 1 or program.shapes[name][0] != int(width) for name in read)


def _reader(node: fx.Node, products: Mapping[fx.Node, Product]) -> Product | None:
    """Return the one product that reads the heads, carried there without arithmetic."""
    found: set[Product] = set()
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user in products:
                found.add(products[user])
            elif user.target in CARRIES:
                stack.append(user)
            elif user.target is not aten.sym_size.int:
                return None
    return next(iter(found)) if len(found) == 1 else None


def _merged(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Join parts with the same rows, so that one rewrite narrows them together."""
    joined: dict[tuple[int, tuple[tuple[int, int], ...]], list[Any]] = {}
    for part in parts:
        joined.setdefault((part.size, part.ranges), []).extend(part.axes)
    return tuple(Part(tuple(axes), size, ranges) for (size, ranges), axes in joined.items())
