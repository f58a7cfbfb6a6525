"""Progress bars on standard error: none when it is no terminal, none under `--quiet`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from torch import nn

TIMINGS = "COLLAPSE_TIMINGS"
FORWARD, GRAPH_FORWARD = "model.forward", "graph.forward"  # the part after the dot tells the benchmark what it is


class Stopwatch:
    """Measures the stages of a run, and shows where it stands.

    With the environment variable `COLLAPSE_TIMINGS` set to a file, `finish` writes seconds by stage there. All times
    of a run are read off `clock`, in seconds.
    """

    def __init__(self, quiet: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        console = Console(stderr=True)
        shown = not quiet and sys.stderr.isatty()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console, transient=True, disable=not shown)
        self._tasks: dict[str, TaskID] = {}
        self._depth = 0
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; nested stages are not counted twice in `seconds` of the outer one."""
        inner_before = sum(self.seconds.values())
        start = self.clock()
        self._enter(name)
        try:
            yield
        finally:
            inner = sum(self.seconds.values()) - inner_before
            self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - start - inner
            self._leave(name)

    def _enter(self, name: str) -> None:
        """Show the outermost stage; those within it are shown by what they `advance`."""
        self._depth += 1
        if self._depth == 1:
            self._tasks[name] = self._bars.add_task(name, total=None)
            self._bars.start()

    def _leave(self, name: str) -> None:
        self._depth -= 1
        if self._depth == 0:
            for task in self._tasks.values():
                self._bars.remove_task(task)
            self._tasks.clear()
            self._bars.stop()

    def advance(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` steps of `what` are over."""
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=done, total=total)
        if done >= total:
            self._bars.remove_task(self._tasks.pop(what))

    def measure_forward(self, model: nn.Module) -> None:
        """Count the model's own forward passes as a stage of their own, wherever they happen."""
        running: list[AbstractContextManager[None]] = []

        def enter(*_: object) -> None:
            running.append(self.stage(FORWARD))
            running[-1].__enter__()

        def leave(*_: object) -> None:
            running.pop().__exit__(None, None, None)

        model.register_forward_pre_hook(enter)
        model.register_forward_hook(leave, always_call=True)

    def finish(self) -> None:
        """Write the timings where they were asked for."""
        if path := os.environ.get(TIMINGS):
            Path(path).write_text(json.dumps(self.seconds, indent=2) + "\n", encoding="utf-8")
