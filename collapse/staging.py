"""A staging folder beside the output that becomes the output in one rename, or leaves nothing behind."""

from __future__ import annotations

import contextlib
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

from collapse.checkpoint import same_file
from collapse.disk import sync
from collapse.errors import CollapseError, OutputError
from collapse.manifest import MANIFEST, file_names, load_manifest

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

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
    source: Path | None = None
    published: bool = False
    signals: list[int] = field(default_factory=list)

    def publish(self) -> None:
        """Put the folder under the output's name in one step; a replaced output goes only after that.

        All of it is on the disk before. If the disk does not take the new name, the old state is put back.
        """
        if self.signals:  # it came while a finalizer ran, where Python drops exceptions
            raise SystemExit(128 + self.signals[0])
        _sync_tree(self.folder)
        check_output(self.output, self.force, self.source)  # somebody may have been there meanwhile
        replaces = self.force and self.output.exists()
        try:
            _place(self.folder, self.output, replaces)
            try:
                sync(self.output.parent)
            except OSError:
                _put_back(self.folder, self.output, replaces)
                raise
        except OSError as error:
            raise OutputError(f"cannot be put in place ({error.strerror})", where=str(self.output)) from error
        self.published = True


@contextmanager
def staged(output: Path, force: bool = False, source: Path | None = None) -> Iterator[Staging]:
    """Give a new folder beside `output`, on the same file system, for the time of the `with` block.

    Unless published it is removed, on errors and signals too; what a killed run left is removed first. `source`
    is the directory that must not be touched. Raises `OutputError` where the output may not be written, or the
    disk does not take it.
    """
    target = located(output)
    sweep(target)
    check_output(target, force, source)
    with _new_parents(target), _signals_as_exceptions() as signals:
        folder = target.parent / f".{target.name}.collapse-{os.getpid()}"
        try:
            with _locked(folder):
                try:
                    yield Staging(folder, target, force, source, signals=signals)
                finally:
                    _remove(folder)
        except OSError as error:
            if error.errno in DISK_ERRORS or error.filename == str(folder):
                raise OutputError(
                    f"cannot be written ({error.strerror})", where=str(output), fix=_fix(error)
                ) from error
            raise


def located(output: Path) -> Path:
    """Return the absolute path of an output; links on the way to it are followed, it itself is not."""
    if output.name in {"", ".."}:
        return Path(os.path.realpath(output))
    return Path(os.path.realpath(output.parent)) / output.name


def check_output(output: Path, force: bool, source: Path | None) -> None:
    """Refuse an output that is the source, lies in it or holds it, or that we did not write ourselves.

    Neither is anything written through a link, nor into a hub cache. Directories are compared by what they are, not
    by their names: a bind mount or another spelling leads to the same one.
    """
    resolved = Path(os.path.realpath(output))
    if source is not None:
        origin = Path(os.path.realpath(source))
        if _lies_in(resolved, origin) or _lies_in(origin, resolved):
            raise OutputError(f"overlaps the source {origin.name}", where=str(output), fix="choose another directory")
    if output.is_symlink():
        nowhere = resolved.is_symlink()  # what is still a link in a resolved path leads in a circle
        what = "is a link that leads nowhere" if nowhere else f"is a link to {resolved}"
        raise OutputError(what, where=str(output), fix="name the directory itself")
    cache = next((parent for parent in (resolved, *resolved.parents) if _is_hub_cache(parent)), None)
    if cache is not None:
        raise OutputError(f"lies in the hub cache of {cache.name}", where=str(output), fix="choose another directory")
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
    """Remove what killed runs left beside `output`; an output that one had moved aside is moved back.

    A run that lives holds a lock on its folder. The number in a name is no proof: systems use them again.
    """
    pattern = re.compile(rf"\.{re.escape(output.name)}\.collapse-\d+({re.escape(ASIDE)})?")
    for path in sorted(output.parent.iterdir()) if output.parent.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if not match or path.is_symlink() or not path.is_dir() or _is_locked(_owner(path)):
            continue
        if match[1] and not output.exists():
            path.rename(output)
        else:
            _remove(path)


def _owner(path: Path) -> Path:
    """Return the folder whose lock says whether the run lives that `path` belongs to."""
    return path.with_name(path.name.removesuffix(ASIDE))


def _is_locked(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Take the lock of an open directory, which the system gives back when we end, however that is.

    Where there are no such locks, nobody else can hold one.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make `folder` and hold its lock.

    Another run that sweeps in the moment between takes the lock and the folder, and this one ends with an error.
    """
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not _lock(descriptor):
            raise OSError(errno.EAGAIN, "another run took it for a leftover", str(folder))
        yield
    finally:
        with contextlib.suppress(OSError):  # what was published stays so
            os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a folder of ours; what cannot go now goes the next time."""
    for _ in range(2):  # a disk that failed once may not fail again
        with contextlib.suppress(OSError):  # it does not ignore errors of closing
            shutil.rmtree(folder, ignore_errors=True)


def _lies_in(path: Path, folder: Path) -> bool:
    """Whether a resolved path is `folder` or lies in it, by whatever names."""
    if path.is_relative_to(folder):
        return True
    return any(same_file(parent, folder) for parent in (path, *path.parents))


def _is_hub_cache(path: Path) -> bool:
    """Whether `path` is the folder of one repository in a hub cache, whose files are shared by links."""
    return (path / "blobs").is_dir() and (path / "snapshots").is_dir()


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


def _place(folder: Path, output: Path, replaces: bool) -> None:
    if replaces:
        _swap(folder, output)
    else:
        folder.rename(output)


def _put_back(folder: Path, output: Path, replaced: bool) -> None:
    """Undo `_place`, as far as the disk still lets us."""
    if replaced and folder.exists():
        _swap(folder, output)
    elif not replaced:
        output.rename(folder)


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
    with contextlib.suppress(OSError):  # the next run knows it under this name too
        aside.rename(folder)


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


def _sync_tree(folder: Path) -> None:
    """Force every file and directory to the disk; for what was synced when it was written that costs nothing."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


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
