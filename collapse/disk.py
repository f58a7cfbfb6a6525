"""Files on disk: bytes copied by the kernel where it can, and new files that are durable when they are closed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from collapse.errors import CheckpointError

STEP = 1 << 24  # bytes copied at a time: short enough for signals and for the thread that hashes behind
BUFFER = 1 << 20
PAGE = 4096
CANNOT = frozenset((errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.ENOTSUP, errno.EPERM, errno.ETXTBSY, errno.EBADF))
CACHED_SHARE = 4  # up to a quarter of the memory stays in the page cache: who checks the files reads them next

Copy = Callable[[int, int, int, int], int]


def _in_kernel(source: int, target: int, position: int, count: int) -> int:
    return os.copy_file_range(source, target, count, position)


def _by_sendfile(source: int, target: int, position: int, count: int) -> int:
    return os.sendfile(target, source, position, count)


class Copier:
    """Copies ranges between open files by the fastest way that this kernel and these file systems have.

    The kernel copies page by page, and may share blocks, where source and target begin at the same place of a page;
    elsewhere it touches each page twice, which took four times as long as a buffer of ours that stays in the cache.
    """

    def __init__(self) -> None:
        ways: list[Copy] = [_in_kernel] if hasattr(os, "copy_file_range") else []
        if hasattr(os, "sendfile"):
            ways.append(_by_sendfile)
        self._ways = ways
        self._buffer = memoryview(bytearray(BUFFER))

    def copy(self, source: int, target: int, start: int, stop: int) -> Iterator[int]:
        """Append bytes `[start, stop)` of `source` at the position of `target`; yield the size of each part.

        Raises `CheckpointError` where the source ends before `stop`, and `OSError` where the disk fails.
        """
        aligned = (os.lseek(target, 0, os.SEEK_CUR) - start) % PAGE == 0
        while start < stop:
            some = self._in_kernel if aligned else self._by_hand
            count = some(source, target, start, min(STEP, stop - start))
            if not count:
                raise CheckpointError("the file was cut short while it was read", where="source")
            yield count
            start += count

    def _in_kernel(self, source: int, target: int, position: int, count: int) -> int:
        while self._ways:
            try:
                done = self._ways[0](source, target, position, count)
            except OSError as error:
                if error.errno not in CANNOT:
                    raise
                self._ways.pop(0)
                continue
            if done:
                return done
            break  # the end of the file, or a file system that cannot say that it cannot
        return self._by_hand(source, target, position, count)

    def _by_hand(self, source: int, target: int, position: int, count: int) -> int:
        done = os.preadv(source, [self._buffer[:count]], position)
        write_all(target, self._buffer[:done])
        return done


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


def reads_ahead(descriptor: int) -> None:
    """Tell the kernel that a file is read from front to back."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)


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
