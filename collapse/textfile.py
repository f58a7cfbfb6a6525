"""Read text files whole, plain or gzip, and say where a file is not what it claims to be."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from collapse.errors import SchemaError

MAX_BYTES = 2 << 30
MAX_RATIO = 200
PIECE = 1000
LONGEST_PIECE = 2000
_RATIO_APPLIES_ABOVE = 16 << 20
_CHUNK = 1 << 20
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_FIELD = re.compile(r"(?P<path>.+\.jsonl(?:\.gz)?):(?P<field>.+)", re.DOTALL)


def split_field(name: str | Path) -> tuple[Path, str | None]:
    """Return the path and the field of `path.jsonl:field`; a file of exactly that name wins."""
    matched = _FIELD.fullmatch(str(name))
    if matched is None or Path(name).exists():
        return Path(name), None
    return Path(matched["path"]), matched["field"]


def suffix(path: Path) -> str:
    """Return the lower-case suffix of `path` without a final `.gz`."""
    name = path.name.lower()
    return Path(name.removesuffix(".gz")).suffix


def read_text(path: Path, *, limit: int = MAX_BYTES, ratio: int = MAX_RATIO) -> str:
    """Return the text of the UTF-8 file `path`, every line end as it is; `.gz` is expanded.

    Raises `SchemaError` if it cannot be read, is not a regular file, has a NUL byte or invalid UTF-8 (with
    the byte offset, after expansion), has more than `limit` bytes, or, above 16 MiB, expands more than
    `ratio` fold.
    """
    if not path.is_file():
        problem = "is a directory" if path.is_dir() else "is not a regular file"
        raise SchemaError(problem if path.exists() else "no such file", where=str(path), fix="name text files")
    try:
        data = _expanded(path, limit, ratio) if path.name.lower().endswith(".gz") else _plain(path, limit)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SchemaError(f"not a whole gzip file ({error})", where=str(path), fix="compress it again") from None
    except OSError as error:
        raise SchemaError(f"cannot be read ({error.strerror})", where=str(path)) from error
    return _decoded(data, path)


def lines(text: str) -> list[str]:
    """Return the lines of `text`, each with its line end; only LF ends a line, so CR LF stays together."""
    pieces = text.split("\n")
    whole = [piece + "\n" for piece in pieces[:-1]]
    return [*whole, pieces[-1]] if pieces[-1] else whole


def pieces(text: str) -> Iterator[str]:
    """Yield consecutive pieces of `text`, cut after a blank line where one comes within 1 to 2 kB."""
    piece: list[str] = []
    size = 0
    for line in lines(text):
        if size and size + len(line) > LONGEST_PIECE:
            yield "".join(piece)
            piece, size = [], 0
        piece.append(line)
        size += len(line)
        if size >= PIECE and not line.strip():
            yield "".join(piece)
            piece, size = [], 0
    if piece:
        yield "".join(piece)


def field_texts(text: str, field: str | None, name: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each JSON record of a `.jsonl` file; blank lines are left out.

    Without a field the text is the line itself. With one it is that field's string; dots go into objects.
    Raises `SchemaError` naming file and line if a line is not JSON or has no such string.
    """
    for number, line in enumerate(lines(text), start=1):
        if not line.strip():
            continue
        where = f"{name}: line {number}"
        record = parsed(line, where)
        yield number, line if field is None else _string_at(record, field, where)


def parsed(text: str, where: str) -> object:
    """Return the value of the JSON `text`; raises `SchemaError` at `where`."""
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"not JSON ({error})", where=where, fix="correct it or leave the file out") from None


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return each path's shortest ending that is its alone, so that reports carry no absolute paths."""
    parts = [path.absolute().parts for path in paths]
    deepest = max(map(len, parts), default=1)
    depths = [1] * len(paths)
    for _ in range(deepest):
        names = ["/".join(part[-depth:]) for part, depth in zip(parts, depths, strict=True)]
        if len(set(names)) == len(names):
            return names
        depths = [depth + (names.count(name) > 1) for depth, name in zip(depths, names, strict=True)]
    twice = next(path for path, name in zip(paths, names, strict=True) if names.count(name) > 1)
    raise SchemaError("named twice", where=str(twice), fix="name each file once")


def _plain(path: Path, limit: int) -> bytes:
    size = path.stat().st_size
    if size > limit:
        raise SchemaError(f"{size} bytes are more than {limit}", where=str(path), fix="give a part of it")
    return path.read_bytes()


def _expanded(path: Path, limit: int, ratio: int) -> bytes:
    packed = path.stat().st_size
    pieces, total = [], 0
    with gzip.open(path, "rb") as stream:
        for piece in _chunks(stream):
            total += len(piece)
            if total > limit or (total > _RATIO_APPLIES_ABOVE and total > ratio * packed):
                bound = f"{limit} bytes" if total > limit else f"{ratio} times its {packed} bytes"
                raise SchemaError(f"expands to more than {bound}", where=str(path), fix="give a part of it")
            pieces.append(piece)
    return b"".join(pieces)


def _chunks(stream: gzip.GzipFile | BinaryIO) -> Iterator[bytes]:
    while piece := stream.read(_CHUNK):
        yield piece


def _decoded(data: bytes, path: Path) -> str:
    if data.startswith(_UTF16):
        raise SchemaError("UTF-16 text at byte 0", where=str(path), fix="convert it with `iconv -t UTF-8`")
    if (at := data.find(b"\0")) >= 0:
        raise SchemaError(f"NUL byte at byte {at}", where=str(path), fix="give text files")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SchemaError(f"invalid UTF-8 at byte {error.start}", where=str(path), fix="convert it") from None


def _string_at(record: object, field: str, where: str) -> str:
    value = record
    for name in [field] if isinstance(record, dict) and field in record else field.split("."):
        if not isinstance(value, dict) or name not in value:
            known = ", ".join(sorted(value)[:12]) if isinstance(value, dict) else "none"
            raise SchemaError(f"no field {field!r}; fields there are {known}", where=where, fix="name another")
        value = value[name]
    if not isinstance(value, str):
        kind = type(value).__name__
        raise SchemaError(f"field {field!r} holds no text but {kind}", where=where, fix="name another field")
    return value
