"""Reads the bytes of output tensors from the source's files, or from a values file, in constant memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from collapse.canonical import CHUNK
from collapse.checkpoint import Checkpoint, TensorInfo
from collapse.disk import ReadAhead
from collapse.errors import CheckpointError, PlanError
from collapse.rewrite import gather
from collapse.rewrite.tensors import OutputTensor, Piece
from collapse.rewrite.values import Values

LONG = 1 << 16  # bytes; shorter runs are read and joined, so that many go into one write


@dataclass(frozen=True)
class Stretch:
    """Bytes `[start, stop)` of the open file `descriptor`."""

    descriptor: int
    start: int
    stop: int
    ahead: ReadAhead

    def read_into(self, buffer: memoryview, position: int) -> int:
        """Fill `buffer` from byte `position` of the file on, not beyond `stop`; return the number of bytes, never 0."""
        view = buffer[: self.stop - position]
        self.ahead.read(len(view))
        count = os.preadv(self.descriptor, [view], position)
        if not count:
            raise _cut_short()
        return count


class SourceReader:
    """Keeps the source's weight files open for reading; a context manager.

    Files are read, never mapped: reading one that somebody cuts short is an error here, not a crash. `expected` are
    the tensors that will be asked for, in order; the disk is told of them ahead. Others can be asked for all the same.
    Computed tensors are read from `values`; without, asking for one raises `PlanError`.
    """

    def __init__(
        self, checkpoint: Checkpoint, expected: Iterable[OutputTensor] = (), *, values: Values | None = None
    ) -> None:
        self._root = checkpoint.root
        self._values = values
        self._files: dict[str, int] = {}
        self._ahead = ReadAhead(place for tensor in expected for place in self._places(tensor))
        self._open = ExitStack()

    def __enter__(self) -> SourceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def chunks(self, tensor: OutputTensor) -> Iterator[bytes | memoryview]:
        """Yield the data of `tensor` in chunks of up to 8 MiB; a view is good until the next is asked for."""
        for part in self.parts(tensor):
            if isinstance(part, Stretch):
                yield from self._read(part)
            else:
                yield part

    def parts(self, tensor: OutputTensor) -> Iterator[Stretch | bytes | memoryview]:
        """Yield the data of `tensor` in order: long runs as places in the source, the rest as bytes."""
        if tensor.source is not None and gather.scattered(tensor):
            yield from self._gathered(tensor, tensor.source)
            return
        held: list[bytes] = []
        size = 0
        for part in self._runs(tensor):
            if held and (isinstance(part, Stretch) or size >= CHUNK):
                yield b"".join(held)
                held, size = [], 0
            if isinstance(part, Stretch):
                yield part
            else:
                held.append(part)
                size += len(part)
        if held:
            yield b"".join(held)

    def _runs(self, tensor: OutputTensor) -> Iterator[Stretch | bytes]:
        for piece in self._pieces(tensor):
            if not isinstance(piece, Piece):
                yield piece
                continue
            stretch = Stretch(self._descriptor(piece.file), piece.start, piece.stop, self._ahead)
            if piece.stop - piece.start >= LONG:
                yield stretch
            else:
                yield b"".join(self._read(stretch))

    def _pieces(self, tensor: OutputTensor) -> Iterator[Piece | bytes]:
        if tensor.values is None:
            yield from tensor.pieces()
        elif self._values is not None:
            yield self._values.piece(tensor.values)
        else:
            raise PlanError("the plan computes the tensor, but no values are given", where=tensor.values)

    def _places(self, tensor: OutputTensor) -> Iterator[tuple[int, int, int]]:
        """Yield what is read of the source's files for a tensor, in order, as (descriptor, start, stop)."""
        if tensor.source is not None and gather.scattered(tensor):
            yield self._descriptor(tensor.source.file), tensor.source.start, tensor.source.stop
            return
        for piece in tensor.pieces() if self._values is None else self._pieces(tensor):
            if isinstance(piece, Piece):
                yield self._descriptor(piece.file), piece.start, piece.stop

    def _gathered(self, tensor: OutputTensor, info: TensorInfo) -> Iterator[memoryview]:
        descriptor = self._descriptor(info.file)
        seen = info.start

        def fill(view: memoryview, start: int) -> None:
            nonlocal seen
            position = info.start + start
            self._ahead.read(position + len(view) - seen)  # what lies between is read with it
            seen = position + len(view)
            while view:
                count = os.preadv(descriptor, [view], position)
                if not count:
                    raise _cut_short()
                view, position = view[count:], position + count

        yield from gather.gathered(fill, tensor)
        self._ahead.read(info.stop - seen)

    def _read(self, stretch: Stretch) -> Iterator[bytes]:
        position = stretch.start
        while position < stretch.stop:
            self._ahead.read(min(CHUNK, stretch.stop - position))
            part = os.pread(stretch.descriptor, min(CHUNK, stretch.stop - position), position)
            if not part:
                raise _cut_short()
            yield part
            position += len(part)

    def _descriptor(self, name: str) -> int:
        if name not in self._files:
            stream = self._open.enter_context((self._root / name).open("rb", buffering=0))
            self._files[name] = stream.fileno()
        return self._files[name]


def _cut_short() -> CheckpointError:
    return CheckpointError("the file was cut short while it was read", where="source")


def differences(path: Path, info: TensorInfo, expected: Iterator[bytes | memoryview]) -> Iterator[tuple[int, int]]:
    """Yield where the data of `info` in the file at `path` differ from `expected`, as ranges of offsets in the data.

    There is at most one range for each chunk of `expected`, from its first byte that differs to its last.
    """
    position = 0
    with path.open("rb") as stream:
        stream.seek(info.start)
        for chunk in expected:
            there = stream.read(len(chunk))
            if there != chunk:
                unlike = np.full(len(chunk), fill_value=True)
                same = len(there)
                unlike[:same] = np.frombuffer(there, np.uint8) != np.frombuffer(chunk, np.uint8)[:same]
                places = np.flatnonzero(unlike)
                yield position + int(places[0]), position + int(places[-1]) + 1
            position += len(chunk)
