"""One way to turn a value into bytes, so that equal values have equal digests on every machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK = 1 << 22


def dumps(value: Any, *, infinite: bool = False) -> str:
    """Return `value` as JSON with sorted keys and a final newline, the form in which every file is written.

    Numbers that JSON lacks are an error unless `infinite` says that their source has them (configs of Mamba do).
    """
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=infinite) + "\n"


def digest(value: Any) -> str:
    """Return the SHA-256 (hex, 64 characters) of the compact canonical JSON of `value`."""
    compact = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(compact.encode()).hexdigest()


def printable(text: str) -> str:
    """Return `text` with control characters and broken Unicode as escapes: a file's name must not forge output."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def chunks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of `path` in pieces of at most 4 MiB."""
    with path.open("rb") as stream:
        while piece := stream.read(CHUNK):
            yield piece


def file_digest(path: Path) -> str:
    """Return the SHA-256 (hex) of the bytes of `path`, read in constant memory."""
    total = hashlib.sha256()
    for piece in chunks(path):
        total.update(piece)
    return total.hexdigest()
