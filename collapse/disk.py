"""Files on disk: new ones that are durable when they are closed, and what the page cache keeps of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

AHEAD = 1 << 25  # bytes asked for at a time
CACHED_SHARE = 2  # up to half of the memory stays in the page cache: who checks the files reads them next


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
    """Asks the kernel for what will be read next of a file, so that the disk works while others write and hash."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._asked = (0, 0)

    def reach(self, position: int, stop: int) -> None:
        """Say that bytes from `position` on are read, and that `stop` is where this stretch ends."""
        start, end = self._asked
        if not start <= position <= end:
            start = end = position
        if position + AHEAD // 2 >= end and end < stop and hasattr(os, "posix_fadvise"):
            count = min(AHEAD, stop - end)
            os.posix_fadvise(self._descriptor, end, count, os.POSIX_FADV_WILLNEED)
            end += count
        self._asked = (start, end)


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
