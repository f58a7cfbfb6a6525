"""Searches streams of bytes for erased rows, in time linear in their length and in bounded memory.

A table says for each fingerprint's highest bits whether any probe has them; the few windows that pass are looked up
among the sorted fingerprints and then compared with the source's bytes, as far as both go on equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from collapse.audit.erased import WINDOW, Bytes, Erased, Places, Probes, Words, fingerprints, row_bytes
from collapse.audit.streams import Part

AT_ONCE = 2_000_000  # probes in memory; more are searched for in further passes over the bytes
CERTAIN = 32  # bytes that must be equal around a window, or the whole tensor where it is shorter
OVERLAP = 2 * CERTAIN  # of consecutive parts of a stream, so that a row across their border is whole in one
REACH = 4096  # bytes to both sides of a window that are compared
MOST_ALIKE = 64  # rows with the same window that are compared


@dataclass(frozen=True)
class Batch:
    """Sorted fingerprints, the tensor and offset of each, and the table of their highest bits."""

    prints: Words
    owner: NDArray[np.int32]
    offsets: Places
    tensors: tuple[Erased, ...]
    table: NDArray[np.bool_]
    shift: np.uint64


@dataclass
class Hit:
    """What was found of one tensor in one file or member: at which offset first, and the numbers of the rows."""

    tensor: Erased
    file: str
    member: str | None
    first: int
    rows: set[int] = field(default_factory=set)


Hits: TypeAlias = dict[tuple[str, str | None, str], Hit]  # by file, member and tensor


def batches(found: Iterable[Probes]) -> Iterator[Batch]:
    """Yield probes in batches of about `AT_ONCE`."""
    held: list[Probes] = []
    count = 0
    for one in found:
        if len(one.prints):
            held.append(one)
            count += len(one.prints)
        if count >= AT_ONCE:
            yield _batch(held)
            held, count = [], 0
    if held:
        yield _batch(held)


def search(root: Path, batch: Batch, parts: Iterable[Part], hits: Hits) -> None:
    """Add to `hits` what the parts hold of the batch's rows; `root` is the source's directory."""
    confirm = _confirmer(root, batch)
    for part in parts:
        data = np.frombuffer(part.data, np.uint8)
        for at, first in _candidates(batch, data):
            equal = [(confirm(part.data, at, probe), probe) for probe in _alike(batch, first)]
            (begin, stop), probe = max(equal, key=lambda one: one[0][1] - one[0][0])
            if stop > begin:
                _note(hits, batch, part, probe, part.start + begin)


def _note(hits: Hits, batch: Batch, part: Part, probe: int, begin: int) -> None:
    tensor = batch.tensors[batch.owner[probe]]
    hit = hits.setdefault((part.file, part.member, tensor.info.name), Hit(tensor, part.file, part.member, begin))
    hit.first = min(hit.first, begin)
    hit.rows.add(int(batch.offsets[probe]) // row_bytes(tensor.info))


def _alike(batch: Batch, first: int) -> Iterator[int]:
    """Yield the probes with the same fingerprint as `first`: rows can begin alike, and go on differently."""
    for probe in range(first, min(first + MOST_ALIKE, len(batch.prints))):
        if batch.prints[probe] != batch.prints[first]:
            return
        yield probe


def _batch(held: list[Probes]) -> Batch:
    prints = np.concatenate([one.prints for one in held])
    owner = np.concatenate([np.full(len(one.prints), number, np.int32) for number, one in enumerate(held)])
    offsets = np.concatenate([one.offsets for one in held])
    order = np.argsort(prints, kind="stable")
    prints = prints[order]
    bits = max(16, math.ceil(math.log2(len(prints))) + 4)
    shift = np.uint64(64 - bits)
    table = np.zeros(1 << bits, bool)
    table[prints >> shift] = True
    return Batch(prints, owner[order], offsets[order], tuple(one.tensor for one in held), table, shift)


def _candidates(batch: Batch, data: Bytes) -> Iterator[tuple[int, int]]:
    """Yield the offsets of `data` whose window has the fingerprint of a probe, and the number of that probe."""
    found = fingerprints(data)
    places = np.flatnonzero(batch.table[found >> batch.shift])
    wanted = found[places]
    probe = np.minimum(np.searchsorted(batch.prints, wanted), len(batch.prints) - 1)
    same = batch.prints[probe] == wanted
    return zip(places[same].tolist(), probe[same].tolist(), strict=True)


def _confirmer(root: Path, batch: Batch) -> Callable[[bytes, int, int], tuple[int, int]]:
    """Return a function that gives the equal bytes of data and source around a window as a span, empty for too few."""

    @lru_cache(maxsize=4096)
    def around(probe: int) -> tuple[bytes, bytes]:
        info = batch.tensors[batch.owner[probe]].info
        at = int(batch.offsets[probe])
        begin = max(at - REACH, 0)
        with (root / info.file).open("rb") as stream:
            stream.seek(info.start + begin)
            data = stream.read(min(at + REACH, info.nbytes) - begin)
        return data[: at - begin], data[at - begin :]

    def confirm(data: bytes, at: int, probe: int) -> tuple[int, int]:
        before, after = around(probe)
        right = _common(after, data[at : at + len(after)])
        left = _common(before[::-1], data[max(at - len(before), 0) : at][::-1])
        needed = min(CERTAIN, batch.tensors[batch.owner[probe]].info.nbytes)
        return (at - left, at + right) if right >= WINDOW and left + right >= needed else (0, 0)

    return confirm


def _common(left: bytes, right: bytes) -> int:
    """Return how many first bytes are equal."""
    size = min(len(left), len(right))
    unlike = np.flatnonzero(np.frombuffer(left[:size], np.uint8) != np.frombuffer(right[:size], np.uint8))
    return int(unlike[0]) if len(unlike) else size
