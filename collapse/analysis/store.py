"""Figures that cost time, kept in one JSON file, so that a killed run goes on where it was.

The file's name is a digest of all that the figures depend on. It is written anew after each measurement, beside its
place, and renamed; it has a checksum of its own, so that a damaged one is refused rather than believed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import filelock
from pydantic import ValidationError

from collapse.canonical import digest, dumps
from collapse.disk import write_all
from collapse.errors import CollapseError, OutputError, UnsupportedError
from collapse.plan import Record, first_problem
from collapse.untrusted import read_json

LARGEST = 1 << 28  # bytes of a file that is read


class Content(Record):
    """The file; a kind of figures has a `format` of its own, and more fields. `made_for` is what they depend on."""

    format: str = ""
    made_for: dict[str, Any]


Kept = TypeVar("Kept", bound=Content)


class Store(Generic[Kept]):
    """The figures so far; `save` keeps them. Without a path they are kept in memory alone."""

    def __init__(self, kind: type[Kept], made_for: Mapping[str, Any], path: Path | None = None) -> None:
        self._path = path
        self.content = kind(made_for=dict(made_for))
        if path is not None and path.exists():
            self.content = _read(path, self.content)

    def refused(self, reason: str) -> CollapseError:
        """Return the error that says why what was kept cannot be used."""
        return _refused(self._path or Path("memory"), reason)

    def save(self) -> None:
        """Write the file; a crash leaves the old one or the new one."""
        if self._path is not None:
            _write(self._path, self.content)


def place_of(folder: Path, made_for: Mapping[str, Any]) -> Path:
    """Return the file in `folder` of figures that depend on `made_for`."""
    return folder / f"{digest(dict(made_for))[:32]}.json"


def lock_of(path: Path) -> filelock.BaseFileLock:
    """Return the lock that whoever has the file at `path` open holds; it does not wait."""
    return filelock.FileLock(path.with_suffix(".lock"), timeout=0)


@contextmanager
def locked(folder: Path, made_for: Mapping[str, Any]) -> Iterator[Path]:
    """Give the file in `folder` for figures that depend on `made_for`; nobody else may have it open meanwhile.

    Raises `OutputError` where the folder cannot be written, or the file is in use.
    """
    path = place_of(folder, made_for)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock_of(path):
            yield path
    except filelock.Timeout:
        raise OutputError("another run measures the same", where=str(path), fix="wait for it") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"the cache cannot be written ({reason})", where=str(folder), fix="use --cache") from None


def _write(path: Path, content: Content) -> None:
    body = content.model_dump(mode="json")
    try:
        data = dumps(body | {"checksum": digest(body)}).encode()
    except ValueError:
        raise UnsupportedError("without some site the model's logits are not all finite") from None
    part = path.with_suffix(".part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        write_all(descriptor, data)  # not forced to the disk each time: what a power cut spoils the checksum finds
    finally:
        os.close(descriptor)
    part.replace(path)


def _read(path: Path, fresh: Kept) -> Kept:
    if not path.is_file():
        raise _refused(path, "it is no plain file")
    try:
        body = read_json(path, LARGEST)
        checksum = body.pop("checksum", None)
        if body.get("format") != fresh.format:
            raise _refused(path, f"its format is {body.get('format')!r}, not {fresh.format!r}")
        if checksum != digest(body):
            raise _refused(path, "its checksum is wrong")
        content = type(fresh).model_validate(body)
    except ValidationError as error:
        raise _refused(path, first_problem(error)) from None
    except (ValueError, RecursionError) as error:
        raise _refused(path, str(error)) from None
    if content.made_for != fresh.made_for:
        raise _refused(path, "it was made for something else")
    return content


def _refused(path: Path, reason: str) -> CollapseError:
    return OutputError(f"is no cache that can be used: {reason}", where=str(path), fix="delete it")
