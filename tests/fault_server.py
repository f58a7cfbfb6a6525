"""Exports again and again, each time in a fork of a warm process, in which one call to the system goes wrong.

Started as `python -m tests.fault_server SOURCE PLAN OUTPUT SHARD_SIZE`. Each line on standard input is a `Fault` as
JSON; each line on standard output says how the run ended. It imports neither torch nor pytest.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from collapse import staging
from collapse.checkpoint import Checkpoint
from collapse.erase import write_checkpoint
from collapse.errors import CollapseError
from collapse.manifest import write_manifest
from collapse.plan import Plan

CALLS = {
    "write": ("write",),
    "fsync": ("fsync",),
    "rename": ("rename",),
    "close": ("close",),
    "read": ("pread", "preadv"),
    "open": ("open", "mkdir"),
}
KINDS = ("ENOSPC", "EIO", "short", "SIGKILL")
DONE, REFUSED, CRASHED = 0, 2, 3


@dataclass(frozen=True)
class Fault:
    """The call number `at` (from 1; 0 for none) of a group in `CALLS` goes wrong in one of the ways `KINDS`.

    `short` writes a half, and says so; another call does its work first and reports EIO all the same. `exchange` says
    whether the kernel can exchange two directories; after `kill_after` seconds the process is killed from outside.
    """

    group: str = "write"
    at: int = 0
    kind: str = "EIO"
    exchange: bool = True
    kill_after: float | None = None


@dataclass(frozen=True)
class Outcome:
    """Exit status (negative for a signal), what was printed, and the calls of each group."""

    status: int
    message: str
    calls: dict[str, int]


class Server:
    """The other process; a context manager."""

    def __init__(self, source: Path, plan: Path, output: Path, shard_size: int) -> None:
        root = Path(__file__).parent.parent
        command = [sys.executable, "-m", "tests.fault_server", str(source), str(plan), str(output), str(shard_size)]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        self._process = subprocess.Popen(
            command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, fault: Fault) -> Outcome:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(asdict(fault)) + "\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._process.stdout.readline()))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=60)


class Shim:
    """Counts the calls of every group, and lets one of them go wrong."""

    def __init__(self, fault: Fault) -> None:
        self.calls: Counter[str] = Counter()
        self._fault = fault
        self._lock = threading.Lock()
        for group, names in CALLS.items():
            for name in names:
                if hasattr(os, name):
                    setattr(os, name, self._wrapped(group, getattr(os, name)))
        exchange = self._wrapped("rename", staging._exchange)
        staging._exchange = exchange if fault.exchange else lambda left, right: False

    def _wrapped(self, group: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self.calls[group] += 1
                hit = group == self._fault.group and self.calls[group] == self._fault.at
            return self._fail(call, *arguments, **options) if hit else call(*arguments, **options)

        return wrapped

    def _fail(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        kind = self._fault.kind
        if kind == "SIGKILL":
            if call.__name__ == "write":
                call(arguments[0], arguments[1][: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "short" and call.__name__ == "write":
            return call(arguments[0], arguments[1][: (len(arguments[1]) + 1) // 2])
        if kind == "short":
            call(*arguments, **options)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))


def export(source: Path, plan: Path, output: Path, shard_size: int) -> None:
    checkpoint, wanted = Checkpoint.open(source), Plan.load(plan)
    with staging.staged(output, True, checkpoint.root) as stage:
        write_checkpoint(checkpoint, wanted, stage.folder, max_shard_size=shard_size)
        write_manifest(stage.folder, checkpoint, wanted)
        stage.publish()


def in_child(fault: Fault, report: int, arguments: tuple[Path, Path, Path, int]) -> None:
    """Run one export with the fault, and write how it ended to `report`; never returns."""
    write, leave = os.write, os._exit
    status, message = DONE, ""
    shim = Shim(fault)
    try:
        export(*arguments)
    except CollapseError as error:
        status, message = REFUSED, str(error)
    except BaseException as error:
        status, message = CRASHED, f"{type(error).__name__}: {error}"
    write(report, json.dumps({"message": message, "calls": dict(shim.calls)}).encode())
    leave(status)


def forked(fault: Fault, arguments: tuple[Path, Path, Path, int]) -> Outcome:
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        in_child(fault, theirs, arguments)
    os.close(theirs)
    if fault.kill_after is not None:
        time.sleep(fault.kill_after)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(ours) as stream:
        said = json.loads(stream.read() or '{"message": "", "calls": {}}')
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Outcome(status, said["message"], said["calls"])


def main() -> None:
    source, plan, output, shard_size = sys.argv[1:]
    for line in sys.stdin:
        found = forked(Fault(**json.loads(line)), (Path(source), Path(plan), Path(output), int(shard_size)))
        print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main()
