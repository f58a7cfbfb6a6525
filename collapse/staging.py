"""A staging folder beside the output that becomes the output in one rename, or leaves nothing behind."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from collapse.errors import CollapseError, OutputError
from collapse.manifest import MANIFEST, file_names, load_manifest

DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
ASIDE = ".old"
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@dataclass
class Staging:
    """Where to write; `publish` makes it the output."""

    folder: Path
    output: Path
    force: bool
    published: bool = False
    signals: list[int] = field(default_factory=list)

    def publish(self) -> None:
        """Put the folder under the output's name in one step; a replaced output goes only after that."""
        if self.signals:  # it came while a finalizer ran, where Python drops exceptions
            raise SystemExit(128 + self.signals[0])
        _sync(self.folder)
        try:
            if self.force and self.output.exists():
                _swap(self.folder, self.output)
            else:
                self.folder.rename(self.output)
        except OSError as error:
            raise OutputError(f"cannot be put in place ({error.strerror})", where=str(self.output)) from error
        self.published = True
        _sync(self.output.parent)


@contextmanager
def staged(output: Path, force: bool = False, source: Path | None = None) -> Iterator[Staging]:
    """Give a new folder beside `output`, on the same file system, for the time of the `with` block.

    Unless published it is removed, on errors and signals too; what a killed run left is removed first. `source`
    is the directory that must not be touched. Raises `OutputError` where the output may not be written, or the
    disk does not take it.
    """
    target = Path(os.path.realpath(output))
    check_output(target, force, source)
    with _new_parents(target), _signals_as_exceptions() as signals:
        sweep(target)
        folder = target.parent / f".{target.name}.collapse-{os.getpid()}"
        try:
            folder.mkdir()
            yield Staging(folder, target, force, signals=signals)
        except OSError as error:
            if error.errno in DISK_ERRORS or error.filename == str(folder):
                raise OutputError(
                    f"cannot be written ({error.strerror})", where=str(output), fix=_fix(error)
                ) from error
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def check_output(output: Path, force: bool, source: Path | None) -> None:
    """Refuse an output that is the source, lies in it or holds it, or that we did not write ourselves."""
    if source is not None:
        origin = Path(os.path.realpath(source))
        if output.is_relative_to(origin) or origin.is_relative_to(output):
            raise OutputError(f"overlaps the source {origin.name}", where=str(output), fix="choose another directory")
    if output.is_symlink():  # what is still a link in a resolved path leads in a circle
        raise OutputError("is a link that leads nowhere", where=str(output), fix="choose another name")
    if not output.exists():
        _require_room(output)
        return
    if not output.is_dir():
        raise OutputError("is no directory", where=str(output), fix="choose another name")
    if not any(output.iterdir()):
        return
    if not force:
        raise OutputError("exists and is not empty", where=str(output), fix="choose another name, or use --force")
    _require_own(output)


def sweep(output: Path) -> None:
    """Remove what killed runs left beside `output`; an output that one had moved aside is moved back."""
    pattern = re.compile(rf"\.{re.escape(output.name)}\.collapse-(\d+)(\.old)?")
    for path in sorted(output.parent.iterdir()):
        match = pattern.fullmatch(path.name)
        if not match or path.is_symlink() or _is_running(int(match[1])):
            continue
        if match[2] and not output.exists():
            path.rename(output)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _require_room(output: Path) -> None:
    """Refuse a name below a file or below a directory that may not be written, before any work is done for it."""
    nearest = next(parent for parent in output.parents if parent.exists())
    if not nearest.is_dir():
        raise OutputError(f"cannot be created: {nearest} is no directory", where=str(output), fix="choose another name")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise OutputError(f"cannot be created: {nearest} may not be written", where=str(output), fix="choose another")


def _require_own(output: Path) -> None:
    """Only a directory in which every file is listed in its own manifest may be replaced."""
    try:
        listed = load_manifest(output).files
    except CollapseError:
        message = f"holds no {MANIFEST} of ours, so it may be somebody's work"
        raise OutputError(message, where=str(output), fix="remove it yourself or choose another name") from None
    strangers = [name for name in file_names(output) if name not in listed]
    if strangers:
        message = f"holds {strangers[0]}, which collapse did not write"
        raise OutputError(message, where=str(output), fix="move it out, or choose another name")


def _is_running(pid: int) -> bool:
    """Whether another process `pid` lives; our own number on an old folder is a number used twice."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _swap(folder: Path, output: Path) -> None:
    """Exchange both directories in one step where the kernel can; else move the old one aside and back on failure."""
    if _exchange(folder, output):
        return
    aside = folder.with_name(folder.name + ASIDE)
    output.rename(aside)
    try:
        folder.rename(output)
    except OSError:
        aside.rename(output)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(left: Path, right: Path) -> bool:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}:
        return False
    raise OSError(code, os.strerror(code), str(right))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:  # some file systems cannot sync a directory
            raise
    finally:
        os.close(descriptor)


def _fix(error: OSError) -> str:
    full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    return "make room or choose another disk; nothing was left behind" if full else "nothing was left behind"


@contextmanager
def _new_parents(output: Path) -> Iterator[None]:
    """Create the directories that lead to `output`; those that are still empty at the end go again."""
    missing = [parent for parent in output.parents if not parent.exists()]
    try:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot be created ({error.strerror})", where=str(output.parent)) from error
        yield
    finally:
        for parent in missing:
            try:
                parent.rmdir()
            except OSError:
                break


@contextmanager
def _signals_as_exceptions() -> Iterator[list[int]]:
    """Let SIGTERM and SIGHUP unwind the stack, so that the folder is removed; only the main thread can.

    Yields the list of those that came.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def leave(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise SystemExit(128 + number)

    handled = (signal.SIGTERM, signal.SIGHUP)
    before: dict[signal.Signals, Any] = {number: signal.signal(number, leave) for number in handled}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
