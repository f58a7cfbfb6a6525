"""SHA-256 in threads: of many files at once, and of a file while another thread still writes it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from types import TracebackType

from collapse.canonical import file_digest

READ = 1 << 20  # bytes at a time: they are hashed while they are in the processor's cache
LAG = 128  # parts of at most `disk.STEP` bytes that the writer may be ahead
WORKERS = min(4, os.cpu_count() or 1)


def file_digests(paths: Sequence[Path]) -> list[str]:
    """Return the SHA-256 (hex) of each file, several files at a time, in constant memory."""
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(file_digest, paths))


class Followed:
    """The digest of a file that grows: it is read back, from the page cache, behind the one who writes it."""

    def __init__(self, pool: ThreadPoolExecutor, descriptor: int) -> None:
        self._ends: Queue[int | None] = Queue(LAG)
        self._end = 0
        self._closed = False
        self._descriptor = os.dup(descriptor)
        self._digest: Future[str] = pool.submit(self._follow)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._end

    def written(self, count: int) -> None:
        """Say that `count` more bytes are in the file; waits while too much is not hashed yet."""
        self._end += count
        self._ends.put(self._end)

    def close(self) -> None:
        """Say that no more bytes come."""
        if not self._closed:
            self._closed = True
            self._ends.put(None)

    def digest(self) -> str:
        """Wait for the digest; raises `OSError` where the file could not be read back."""
        self.close()
        return self._digest.result()

    def _follow(self) -> str:
        total = hashlib.sha256()
        position = 0
        buffer = bytearray(READ)
        try:
            while (end := self._ends.get()) is not None:
                while position < end:
                    count = os.preadv(self._descriptor, [memoryview(buffer)[: end - position]], position)
                    if not count:
                        raise OSError(f"the file ends at byte {position} of {end}")
                    total.update(memoryview(buffer)[:count])
                    position += count
        except BaseException:
            while self._ends.get() is not None:  # whoever writes must not wait for a thread that is gone
                pass
            raise
        finally:
            os.close(self._descriptor)
        return total.hexdigest()


class Hashing:
    """Follows files in a few threads; a context manager that ends them, also when writing failed."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(WORKERS)
        self._files: list[Followed] = []

    def follow(self, descriptor: int) -> Followed:
        """Begin to hash the file that `descriptor`, open for reading too, is written to from its start."""
        self._files.append(Followed(self._pool, descriptor))
        return self._files[-1]

    def __enter__(self) -> Hashing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()
        self._pool.shutdown()
