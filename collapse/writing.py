"""Writes a file in a thread while its caller reads what comes next."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from collapse.disk import Flushing, write_all

BUFFER = 1 << 20  # bytes: they are written while they are still in the processor's cache
BUFFERS = 4


class WritingBehind:
    """Appends to the open file `descriptor`, in the order of `add`, one write at a time.

    A context manager inside the one that closes the file: at its end all bytes are written, or after an error none are
    any more, and the thread is gone. What the disk refuses is raised by `buffer` or at the end.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._flushing = Flushing(descriptor)
        self._free = [memoryview(bytearray(BUFFER)) for _ in range(BUFFERS)]
        self._pending: deque[tuple[Future[None], memoryview]] = deque()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="writing")

    def buffer(self) -> memoryview:
        """Return `BUFFER` bytes to fill, to be given back by `add`; waits while all are still to be written."""
        if not self._free:
            self._settle()
        return self._free.pop()

    def add(self, buffer: memoryview, count: int) -> None:
        """Write the first `count` bytes of a buffer, which is then free again."""
        self._pending.append((self._pool.submit(self._write, buffer[:count]), buffer))

    def _write(self, data: memoryview) -> None:
        write_all(self._descriptor, data)
        self._flushing.wrote(len(data))

    def _settle(self) -> None:
        future, buffer = self._pending.popleft()
        self._free.append(buffer)
        future.result()

    def __enter__(self) -> WritingBehind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            while error is None and self._pending:
                self._settle()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
