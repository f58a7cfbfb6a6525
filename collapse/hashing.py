"""SHA-256 in threads: of many files at once, and of a file while another thread still writes it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from threading import Event, Thread
from types import TracebackType

from collapse.canonical import file_digest

BUFFER = 1 << 20  # bytes: hashed while they are still in the processor's cache
BUFFERS = 16  # so many the writer may be ahead
WORKERS = min(4, os.cpu_count() or 1)


def file_digests(paths: Sequence[Path]) -> list[str]:
    """Return the SHA-256 (hex) of each file, several files at a time, in constant memory."""
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(file_digest, paths))


class Digest:
    """The digest of one file, and its size so far."""

    def __init__(self) -> None:
        self.size = 0
        self._total = hashlib.sha256()
        self._whole = Event()

    def update(self, data: memoryview) -> None:
        """Take in the next bytes; for the thread that hashes."""
        self._total.update(data)

    def end(self) -> None:
        """Say that all bytes are in; for the thread that hashes."""
        self._whole.set()

    def hexdigest(self) -> str:
        """Wait until all bytes are in, and return the digest (hex)."""
        self._whole.wait()
        return self._total.hexdigest()


class Hashing:
    """Hashes in a thread what another one writes, out of the buffers that it writes from: nothing is read back.

    A context manager; at its end, also when writing failed, the thread is gone.
    """

    def __init__(self) -> None:
        self._free: Queue[memoryview] = Queue()
        self._full: Queue[tuple[Digest, memoryview, int] | None] = Queue()
        for _ in range(BUFFERS):
            self._free.put(memoryview(bytearray(BUFFER)))
        self._thread = Thread(target=self._run, name="hashing", daemon=True)

    def buffer(self) -> memoryview:
        """Return a buffer to fill, to be given back by `add`; waits while all are still to be hashed."""
        return self._free.get()

    def add(self, digest: Digest, buffer: memoryview, count: int) -> None:
        """Hash the first `count` bytes of a buffer; with none the file is whole."""
        digest.size += count
        self._full.put((digest, buffer, count))

    def end(self, digest: Digest) -> None:
        """Say that the file of `digest` is whole."""
        self.add(digest, self.buffer(), 0)

    def _run(self) -> None:
        while (item := self._full.get()) is not None:
            digest, buffer, count = item
            if count:
                digest.update(buffer[:count])
            else:
                digest.end()
            self._free.put(buffer)

    def __enter__(self) -> Hashing:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._full.put(None)
        self._thread.join()
