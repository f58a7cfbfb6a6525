"""Peak memory of a process and everything it starts, sampled from outside so that it costs the process nothing."""

from __future__ import annotations

import threading
from types import TracebackType

import psutil

INTERVAL = 0.02  # seconds; a tensor of a few MB that lives shorter than this may go unseen


def resident(process: psutil.Process) -> int:
    """Return the resident bytes of a process and its descendants; those that just ended count as 0."""
    total = 0
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for member in family:
        try:
            total += member.memory_info().rss
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return total


class PeakMemory:
    """Context manager that samples the process `pid` and its descendants; `peak` is the largest sum in bytes."""

    def __init__(self, pid: int, interval: float = INTERVAL) -> None:
        self.peak = 0
        self._process = psutil.Process(pid)
        self._interval = interval
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.peak = max(self.peak, resident(self._process))
            if self._done.wait(self._interval):
                return
