"""Takes fingerprints of everything that a plan erases: a 16-byte window of every erased row.

A window holds at least one erased byte. It may hold kept neighbours too, so that columns that were cut out of a row
are found as well where the whole row is back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from collapse.checkpoint import DTYPE_BITS, Checkpoint, TensorInfo
from collapse.errors import CheckpointError
from collapse.plan import Plan
from collapse.rewrite.tensors import OutputTensor, Piece, erased_names, output_tensors
from collapse.rewrite.values import plan_digests

WINDOW = 16  # bytes
SHORTEST_ROW, LONGEST_ROW = 32, 4096  # bytes; shorter rows are taken together, longer ones in parts
LEAST_VALUES = 4  # different bytes of a window that says anything: padding and constant rows have fewer
CHUNK = 1 << 22
STEP = 8  # bytes from one place that is tried to the next
Bytes: TypeAlias = NDArray[np.uint8]
Words: TypeAlias = NDArray[np.uint64]
Places: TypeAlias = NDArray[np.int64]
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)  # odd, with well mixed bits


@dataclass(frozen=True)
class Erased:
    """A tensor of the source that is not wholly in the output; `kept` is what the output has of it, if anything.

    Of one that the plan replaces, nothing is kept.
    """

    info: TensorInfo
    kept: OutputTensor | None
    replaced: bool = False


@dataclass(frozen=True)
class Probes:
    """Fingerprints of windows of one tensor, and their offsets in its data; `mute` rows have no telling window."""

    tensor: Erased
    prints: Words
    offsets: Places
    mute: int


def erased_tensors(source: Checkpoint, plan: Plan) -> tuple[Erased, ...]:
    """Return every tensor of the source that the plan erases, narrows or replaces."""
    gone, replaced = erased_names(plan)[0], plan_digests(plan)
    cut = {
        t.source.name: t
        for t in output_tensors(source, plan)
        if t.source is not None and (t.nbytes < t.source.nbytes or t.digest is not None)
    }
    return tuple(
        Erased(info, None if name in replaced else cut.get(name), name in replaced)
        for name, info in source.tensors.items()
        if name in gone or name in cut
    )


def fingerprints(data: Bytes) -> Words:
    """Return the fingerprint of the window at every offset of `data`: shape [len(data) - 15], empty where shorter."""
    if len(data) < WINDOW:
        return np.empty(0, np.uint64)
    words = np.empty(len(data) - 7, np.uint64)
    for shift in range(8):
        count = (len(data) - shift) // 8
        words[shift::8] = data[shift : shift + 8 * count].view("<u8")
    return _mixed(words[:-8], words[8:])


def window_span(span: tuple[int, int], size: int) -> tuple[int, int]:
    """Return the bytes, of `size`, whose windows have at least one byte in `span`."""
    return max(span[0] - WINDOW + 1, 0), min(span[1] + WINDOW - 1, size)


def probes(root: Path, tensor: Erased) -> Iterator[Probes]:
    """Yield the probes of one tensor, read in chunks; every erased row has one, or is counted as mute."""
    info = tensor.info
    size = row_bytes(info)
    row = min(size * -(-SHORTEST_ROW // size), LONGEST_ROW)
    with (root / info.file).open("rb") as stream:
        for start, mask in erased_masks(tensor, row):
            if not mask.any():
                continue
            stream.seek(info.start + start)
            data = np.frombuffer(stream.read(len(mask)), np.uint8)
            if len(data) != len(mask):
                raise CheckpointError("the file was cut short while it was read", where=info.file)
            offsets, mute = _windows(data, mask, row, max(DTYPE_BITS[info.dtype] // 8, 1))
            yield Probes(tensor, _prints_at(data, offsets), offsets + start, mute)


def row_bytes(info: TensorInfo) -> int:
    """Return the bytes of one row of a tensor, which is what lies along its last dimension."""
    return max((info.shape[-1] if info.shape else 1) * DTYPE_BITS[info.dtype] // 8, 1)


def _chunked(size: int, row: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of whole rows; what is left over at the end is joined to the last."""
    step = max(CHUNK // row, 1) * row
    starts = range(0, max(size - row, 0) + 1, step)
    return ((start, start + step if start + step in starts else size) for start in starts)


def erased_masks(tensor: Erased, row: int) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Yield the data of a tensor in chunks of whole rows of `row` bytes: where each starts, and which bytes go."""
    base = tensor.info.start
    pieces = (piece for piece in (tensor.kept.pieces() if tensor.kept else ()) if isinstance(piece, Piece))
    piece = next(pieces, None)
    for start, stop in _chunked(tensor.info.nbytes, row):
        mask = np.full(stop - start, fill_value=True)
        while piece is not None and piece.start - base < stop:
            mask[max(piece.start - base - start, 0) : piece.stop - base - start] = False
            if piece.stop - base > stop:
                break
            piece = next(pieces, None)
        yield start, mask


def _windows(data: Bytes, mask: NDArray[np.bool_], row: int, element: int) -> tuple[Places, int]:
    """Return the offset of a telling window for each row that has erased bytes, and how many rows have none."""
    whole = len(data) // row * row
    found, mute = _windows_of_rows(data[:whole].reshape(-1, row), mask[:whole].reshape(-1, row), element)
    if whole == len(data):
        return found, mute
    begin = min(whole, max(len(data) - SHORTEST_ROW, 0))
    tail = np.concatenate([np.zeros(whole - begin, bool), mask[whole:]])
    last, silent = _windows_of_rows(data[None, begin:], tail[None], element)
    return np.concatenate([found, last + begin]), mute + silent


def _windows_of_rows(rows: Bytes, mask: NDArray[np.bool_], element: int) -> tuple[Places, int]:
    """As above, of data of shape [rows, bytes] and its mask."""
    size = rows.shape[1]
    left = np.flatnonzero(mask.any(axis=1))
    found: list[Places] = []
    last = size - WINDOW
    for at in sorted({*range(0, last + 1, STEP), last}) if last >= 0 else ():
        if not len(left):
            break
        tells = mask[left, at : at + WINDOW].any(axis=1) & _telling(rows[left, at : at + WINDOW], element)
        found.append(left[tells] * size + at)
        left = left[~tells]
    return np.sort(np.concatenate([np.empty(0, np.int64), *found])), len(left)


def _telling(windows: Bytes, element: int) -> NDArray[np.bool_]:
    """Whether each window of shape [n, 16] could hardly be there by chance: no padding, no constant."""
    ordered = np.sort(windows, axis=1)
    values = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1)
    varies = (windows[:, element:] != windows[:, :-element]).any(axis=1)
    return np.asarray((values >= LEAST_VALUES) & varies)


def _prints_at(data: Bytes, offsets: Places) -> Words:
    if not len(offsets):
        return np.empty(0, np.uint64)
    words = np.ascontiguousarray(data[offsets[:, None] + np.arange(WINDOW)]).view("<u8")
    return _mixed(words[:, 0], words[:, 1])


def _mixed(first: Words, second: Words) -> Words:
    mixed: Words = first * _FIRST + second * _SECOND
    return mixed
