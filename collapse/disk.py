"""Files on disk: new ones that are durable when they are closed, and what the page cache keeps of them."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

AHEAD = 1 << 26  # bytes asked for before they are read
ASKED = 1 << 22  # bytes asked for at a time
FLUSHED = 1 << 23  # bytes written before the disk is told to begin
CACHED_SHARE = 2  # up to half of the memory stays in the page cache: who checks the files reads them next


def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Return Linux's call, which Python's `os` lacks."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


SYNC_FILE_RANGE = _sync_file_range()
SYNC_FILE_RANGE_WRITE = 2  # begin to write what is dirty, and do not wait


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`; a write may take a part only."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


@contextmanager
def new_file(path: Path, mode: int | None = None) -> Iterator[int]:
    """Yield a descriptor, for reading too, of `path`, which must not exist; all of it is on the disk at the end.

    A link under that name is not followed. Without a mode the file has the one that the user's umask leaves.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags, 0o666)
    try:
        if mode is not None:
            _keep_mode(descriptor, mode)
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_new(path: Path, data: Iterable[bytes], mode: int | None = None) -> None:
    """Write `data` to the new file `path`, durably."""
    with new_file(path, mode) as descriptor:
        for part in data:
            write_all(descriptor, part)


def sync(path: Path) -> None:
    """Force a file or a directory to the disk; some file systems cannot do that for a directory."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
    finally:
        os.close(descriptor)


def fits_cache(size: int) -> bool:
    """Whether `size` bytes may stay in the page cache without pushing out what others need."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return True
    return size <= memory // CACHED_SHARE


class ReadAhead:
    """Asks the kernel for what is read next, so that the disk works while its caller writes.

    `ranges` are the stretches that will be read, in order, as (descriptor, start, stop); nothing is asked for before
    the first `read`.
    """

    def __init__(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        self._parts = _parts(ranges) if hasattr(os, "posix_fadvise") else iter(())
        self._reach = AHEAD

    def read(self, count: int) -> None:
        """Say that the next `count` bytes of the ranges are being read."""
        self._reach += count
        while self._reach > 0 and (part := next(self._parts, None)):
            with suppress(OSError):  # whoever reads will see it
                os.posix_fadvise(*part, os.POSIX_FADV_WILLNEED)
            self._reach -= part[2]


def _parts(ranges: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Cut the ranges into parts of at most `ASKED` bytes, as (descriptor, start, count)."""
    for descriptor, start, stop in ranges:
        for first in range(start, stop, ASKED):
            yield descriptor, first, min(ASKED, stop - first)


class Flushing:
    """Starts to bring a growing file to the disk while more is written, so that little is left for its fsync.

    Where the system lacks `sync_file_range`, or the file system refuses it, nothing happens. What the disk refuses
    meanwhile is left for fsync to report, since nobody waits here.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._started = self._written = 0

    def wrote(self, count: int) -> None:
        """Say that `count` more bytes were written."""
        self._written += count
        if SYNC_FILE_RANGE is not None and self._written - self._started >= FLUSHED:
            SYNC_FILE_RANGE(self._descriptor, self._started, self._written - self._started, SYNC_FILE_RANGE_WRITE)
            self._started = self._written


def uncache(descriptor: int, start: int = 0, count: int = 0) -> None:
    """Let the kernel forget the clean pages of a range, of all of the file by default."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, count, os.POSIX_FADV_DONTNEED)


def uncache_file(path: Path) -> None:
    """Let the kernel forget the clean pages of the file at `path`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        uncache(descriptor)
    finally:
        os.close(descriptor)


def _keep_mode(descriptor: int, mode: int) -> None:
    """File systems without modes refuse to set them; the content matters more."""
    try:
        os.fchmod(descriptor, mode)
    except OSError as error:
        if error.errno not in {errno.EPERM, errno.ENOTSUP, errno.EINVAL}:
            raise
