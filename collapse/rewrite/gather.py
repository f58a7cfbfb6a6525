"""Cuts scattered rows and columns out of blocks in memory, where one read per run would cost more than the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from collapse.checkpoint import DTYPE_BITS
from collapse.plan import IndexSet
from collapse.rewrite.tensors import OutputTensor

BLOCK = 1 << 20  # bytes read and cut at a time: they stay in the processor's cache
RUN_COST = 1 << 17  # bytes that a disk reads in a row in the time of one more jump

Fill = Callable[[memoryview, int], None]
Rows = Mapping[int, NDArray[np.int64]]


def scattered(tensor: OutputTensor) -> bool:
    """Whether what stays are so many runs that it is quicker to read all of the tensor and cut it in memory."""
    if tensor.source is None or not tensor.kept or not tensor.nbytes:
        return False
    last = max(tensor.kept)
    runs = prod(tensor.shape[:last]) * len(tensor.kept[last].runs)
    return runs > 1 and runs * RUN_COST >= tensor.source.nbytes


def gathered(fill: Fill, tensor: OutputTensor) -> Iterator[memoryview]:
    """Yield the data of a tensor for which `scattered` holds; each part is good until the next is asked for.

    `fill(view, start)` reads the source tensor's bytes from offset `start` into all of `view`. Dimensions behind the
    last narrowed one are one item of whole bytes, so packed elements need no arithmetic.
    """
    assert tensor.source is not None
    last = max(tensor.kept)
    sizes = tensor.source.shape[: last + 1]
    item = prod(tensor.source.shape[last + 1 :]) * DTYPE_BITS[tensor.dtype] // 8
    rows = {dim: _numbers(kept) for dim, kept in tensor.kept.items()}
    depth = next(dim for dim in range(last + 1) if dim == last or prod(sizes[dim + 1 :]) * item <= BLOCK)
    outer = [rows.get(dim, np.arange(sizes[dim])) for dim in range(depth)]
    inner = {dim - depth: found for dim, found in rows.items() if dim >= depth}
    strides = [prod(sizes[dim + 1 :]) * item for dim in range(depth)]
    cut = _Cut(fill, sizes[depth:], item, inner)
    for place in product(*outer):
        yield from cut.blocks(sum(int(number) * stride for number, stride in zip(place, strides, strict=True)))


class _Cut:
    """Cuts parts of one shape out of a tensor, some rows at a time, in buffers that are used again."""

    def __init__(self, fill: Fill, sizes: tuple[int, ...], item: int, rows: Rows) -> None:
        self._fill, self._sizes, self._rows = fill, sizes, rows
        self._word = next(size for size in (8, 4, 2, 1) if item % size == 0)
        self._row = prod(sizes[1:]) * item
        self._shape = (*sizes[1:], item // self._word)
        self._wanted = rows.get(0, np.arange(sizes[0]))
        self._step = max(1, BLOCK // self._row)
        self._buffer = np.empty(min(self._step, sizes[0]) * self._row, np.uint8)

    def blocks(self, start: int) -> Iterator[memoryview]:
        """Yield what stays of the part whose first byte is at offset `start` of the tensor."""
        for first in range(0, self._sizes[0], self._step):
            low, high = np.searchsorted(self._wanted, (first, first + self._step))
            if low < high:
                yield self._block(start, self._wanted[low:high])

    def _block(self, start: int, here: NDArray[np.int64]) -> memoryview:
        low, count = int(here[0]), int(here[-1] - here[0]) + 1
        raw = self._buffer[: count * self._row]
        self._fill(raw.data, start + low * self._row)
        block = raw.view(f"u{self._word}").reshape(count, *self._shape)
        if len(here) < count:
            block = block.take(here - low, axis=0)
        for dim in sorted(set(self._rows) - {0}):
            block = block.take(self._rows[dim], axis=dim)
        return np.ascontiguousarray(block).reshape(-1).view(np.uint8).data


def _numbers(kept: IndexSet) -> NDArray[np.int64]:
    return np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in kept.runs])
