"""The bytes in which erased rows are searched for: of files, and of what archives hold, expanded within bounds."""

from __future__ import annotations

import bz2
import gzip
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from collapse.audit.inventory import is_safetensors
from collapse.audit.weights import Span

Stream: TypeAlias = IO[bytes] | gzip.GzipFile | bz2.BZ2File
CHUNK = 1 << 20
RATIO, FREE = 64, 64 << 20  # an archive may expand to so many times its size, and to that many bytes besides
MOST_MEMBERS = 100_000
_ZIP, _XZ = b"PK\x03\x04", b"\xfd7zXZ\x00"
_PACKED: Mapping[bytes, type[gzip.GzipFile] | type[bz2.BZ2File]] = {b"\x1f\x8b": gzip.GzipFile, b"BZh": bz2.BZ2File}
_EXPANDED = (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)  # the others may ask for any amount of memory
_BROKEN = (OSError, EOFError, ValueError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Part:
    """A run of bytes of `file`, or of the data of a `member` of it; `start` is its offset there."""

    file: str
    member: str | None
    start: int
    data: bytes


@dataclass(frozen=True)
class Unread:
    """Why an archive was not searched to its end."""

    file: str
    reason: str


def file_parts(folder: Path, file: str, spans: list[Span], overlap: int) -> Iterator[Part]:
    """Yield the bytes of `spans` of a file; consecutive parts of a span have `overlap` bytes in common."""
    with (folder / file).open("rb") as stream:
        for start, stop in spans:
            stream.seek(start)
            yield from _parts(stream, file, None, start, stop - start, overlap)


def packed_parts(folder: Path, file: str, overlap: int) -> Iterator[Part | Unread]:
    """Yield the expanded data of a file that is a zip archive, or gzip or bzip2 data; nothing for all others.

    Stored members of an archive are bytes of the file itself and are found there.
    """
    path = folder / file
    budget = RATIO * path.stat().st_size + FREE
    try:
        if _is_zip(path):
            yield from _members(path, file, budget, overlap)
            return
        with path.open("rb") as stream:
            start = stream.read(16)
        if is_safetensors(file, start):
            return
        if start.startswith(_XZ):
            yield Unread(file, "holds xz data, which are not expanded")
        opener = next((opener for magic, opener in _PACKED.items() if start.startswith(magic)), None)
        if opener is not None:
            with opener(path) as expanded:
                yield from _bounded(expanded, file, "", budget, overlap)
    except _BROKEN as error:
        yield Unread(file, f"cannot be expanded ({error})")


def _is_zip(path: Path) -> bool:
    """Whether the file is a zip archive, or ends with one; four bytes of a weight file can look like its end."""
    if not zipfile.is_zipfile(path):
        return False
    with path.open("rb") as stream:
        begins = stream.read(len(_ZIP)) == _ZIP
    try:
        zipfile.ZipFile(path).close()
    except zipfile.BadZipFile:
        return begins
    return True


def _members(path: Path, file: str, budget: int, overlap: int) -> Iterator[Part | Unread]:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if len(members) > MOST_MEMBERS:
            yield Unread(file, f"has more than {MOST_MEMBERS} members")
            return
        for member in members:
            for part in _member(archive, member, file, budget, overlap):
                yield part
                budget -= len(part.data) if isinstance(part, Part) else 0
            if budget <= 0:
                return


def _member(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, file: str, budget: int, overlap: int
) -> Iterator[Part | Unread]:
    name = member.filename
    if member.compress_type == zipfile.ZIP_STORED:
        return
    if member.compress_type not in _EXPANDED:
        yield Unread(file, f"member {name} is compressed in a way that is not expanded")
        return
    try:
        with archive.open(member) as stream:
            yield from _bounded(stream, file, name, budget, overlap)
    except _BROKEN as error:
        yield Unread(file, f"member {name} cannot be expanded ({error})")


def _bounded(stream: Stream, file: str, member: str, budget: int, overlap: int) -> Iterator[Part | Unread]:
    """Yield what a compressed stream expands to; at most `budget` bytes of it."""
    for part in _parts(stream, file, member, 0, budget, overlap):
        if part.start == 0 and part.data.startswith(_ZIP):
            yield Unread(file, f"holds an archive within an archive, {member or 'compressed'}, which is not expanded")
        yield part
    if stream.read(1):
        yield Unread(file, f"expands to more than {RATIO} times its size and {FREE} bytes, and was not read to its end")


def _parts(stream: Stream, file: str, member: str | None, start: int, size: int, overlap: int) -> Iterator[Part]:
    """Yield up to `size` bytes of a stream that stands at offset `start`."""
    tail = b""
    while size > 0 and (piece := stream.read(min(CHUNK, size))):
        yield Part(file, member, start - len(tail), tail + piece)
        start, size = start + len(piece), size - len(piece)
        tail = (tail + piece)[-overlap:]
