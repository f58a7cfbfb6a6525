"""Reads the bytes of output tensors from the source's files, in constant memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np

from collapse.canonical import CHUNK
from collapse.checkpoint import Checkpoint, TensorInfo
from collapse.errors import CheckpointError
from collapse.rewrite.tensors import OutputTensor, Piece


class SourceReader:
    """Keeps the source's weight files open for reading; a context manager."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._root = checkpoint.root
        self._files: dict[str, int] = {}
        self._open = ExitStack()

    def __enter__(self) -> SourceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def chunks(self, tensor: OutputTensor) -> Iterator[bytes]:
        """Yield the data of `tensor` in chunks of up to 8 MiB; short pieces are joined."""
        held: list[bytes] = []
        size = 0
        for part in self._parts(tensor):
            held.append(part)
            size += len(part)
            if size >= CHUNK:
                yield b"".join(held)
                held, size = [], 0
        if held:
            yield b"".join(held)

    def _parts(self, tensor: OutputTensor) -> Iterator[bytes]:
        for piece in tensor.pieces():
            if isinstance(piece, Piece):
                yield from self._read(piece)
            else:
                yield piece

    def _read(self, piece: Piece) -> Iterator[bytes]:
        descriptor = self._descriptor(piece.file)
        position = piece.start
        while position < piece.stop:
            part = os.pread(descriptor, min(CHUNK, piece.stop - position), position)
            if not part:
                raise CheckpointError("the file was cut short while it was read", where=piece.file)
            yield part
            position += len(part)

    def _descriptor(self, name: str) -> int:
        if name not in self._files:
            stream = self._open.enter_context((self._root / name).open("rb", buffering=0))
            self._files[name] = stream.fileno()
        return self._files[name]


def differences(path: Path, info: TensorInfo, expected: Iterator[bytes]) -> Iterator[tuple[int, int]]:
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
