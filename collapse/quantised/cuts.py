"""What cutting one dimension of a quantised weight means for each of its tensors, in rows of the files.

Nothing is dequantised: a cut is possible where whole blocks go, and where no tensor that stays says anything about
the rows that went.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from collapse.quantised.scheme import Form, Scheme

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """How one dimension of a weight is cut.

    Attributes:
        block: only whole blocks of so many rows of the weight can go.
        tensors: name within the module -> (its dimension, rows of the weight in one of its rows); tensors that are
            not named stay whole.
    """

    block: int
    tensors: Mapping[str, tuple[int, int]]


def weight_shape(scheme: Scheme, form: Form, shapes: Mapping[str, Shape], nbytes: int) -> tuple[Shape | None, int]:
    """Return the weight's sizes and number of elements; no sizes where only the bytes of its tensors tell them.

    `nbytes` is the size of the main tensor, which a word that is not full can make larger than its elements ask for.
    """
    main = shapes[form.main]
    count = nbytes * 8 // scheme.bits if scheme.bits and form.main != "weight" else prod(main)
    if scheme.method == "gptq":
        return (main[1], main[0] * 32 // scheme.bits), count
    if scheme.method == "awq":
        return (main[1] * 32 // scheme.bits, main[0]), count
    if scheme.method == "bitsandbytes-4bit":
        return None, nbytes * 2
    return (None if form.main == "weight_packed" else main), count


def cuts(scheme: Scheme, form: Form, shapes: Mapping[str, Shape]) -> dict[int, Cut | str]:
    """Return, for each dimension of the weight, how its tensors are cut, or why they cannot be."""
    if scheme.method == "gptq":
        return _gptq(scheme, shapes)
    if scheme.method == "awq":
        return _awq(scheme, shapes)
    if scheme.method == "bitsandbytes-4bit":
        reason = "its quant_state holds the shape, and its blocks run across rows"
        return {0: reason, 1: reason}
    if form.main == "weight_packed":
        return dict.fromkeys((0, 1), "its weight_shape holds the shape")
    if scheme.method == "bitsandbytes-8bit":
        return {0: Cut(1, {form.main: (0, 1), "SCB": (0, 1)}), 1: Cut(1, {form.main: (1, 1)})}
    return {dim: _grid(scheme, form, shapes, dim) for dim in range(len(shapes[form.main]))}


def _gptq(scheme: Scheme, shapes: Mapping[str, Shape]) -> dict[int, Cut | str]:
    packed = 32 // scheme.bits
    columns: Cut | str = "its g_idx counts groups of input channels, so the values in it would change"
    if shapes["scales"][0] == 1:
        columns = Cut(packed, {"qweight": (0, packed), **({"g_idx": (0, 1)} if "g_idx" in shapes else {})})
    return {0: Cut(packed, {"qweight": (1, 1), "scales": (1, 1), "qzeros": (1, packed)}), 1: columns}


def _awq(scheme: Scheme, shapes: Mapping[str, Shape]) -> dict[int, Cut | str]:
    packed, groups = 32 // scheme.bits, shapes["scales"][0]
    columns = Cut(1, {"qweight": (0, 1)})
    if groups > 1:
        size = scheme.group
        columns = Cut(size, {"qweight": (0, 1), "scales": (0, size), "qzeros": (0, size)})
    return {0: Cut(packed, {"qweight": (1, packed), "scales": (1, 1), "qzeros": (1, packed)}), 1: columns}


def _grid(scheme: Scheme, form: Form, shapes: Mapping[str, Shape], dim: int) -> Cut | str:
    """Cut a weight that is stored in its own shape, and the scales and zero points that form a grid over it."""
    if "weight_g_idx" in shapes and dim == len(shapes[form.main]) - 1:
        return "its weight_g_idx counts groups of input channels, so the values in it would change"
    tensors, block = {form.main: (dim, 1)}, 1
    size = shapes[form.main][dim]
    for part in (*form.required, "weight_zero_point"):
        shape = shapes.get(part, ())
        if len(shape) <= dim or shape[dim] == 1 < size:  # a scale for all rows
            continue
        step = 1 if shape[dim] == size else _block_size(scheme, len(shapes[form.main]) - dim)
        if step < 1 or -(-size // step) != shape[dim]:
            return f"{shape[dim]} rows of {part} do not fit {size} of the weight in blocks of {step}"
        tensors[part], block = (dim, step), max(block, step)
    return Cut(block, tensors)


def _block_size(scheme: Scheme, from_end: int) -> int:
    """Return how many rows of the dimension, 2 for rows and 1 for columns, share a scale; 0 where none is said."""
    if scheme.block is not None and from_end <= 2:
        return scheme.block[2 - from_end]
    return scheme.group if from_end == 1 else 0
