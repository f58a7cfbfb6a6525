"""What was measured of a model's sites, kept in one JSON file, so that a killed run goes on where it was.

The file's name is a digest of all that the figures depend on. It is written anew after each measurement, beside its
place, and renamed; it has a checksum of its own, so that a damaged one is refused rather than believed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import filelock
from pydantic import Field, ValidationError

from collapse.analysis.exact_cost import Sums
from collapse.analysis.first_order import Estimate
from collapse.canonical import digest, dumps
from collapse.disk import write_all
from collapse.errors import CollapseError, OutputError, UnsupportedError
from collapse.plan import Record, first_problem
from collapse.untrusted import read_json

LARGEST = 1 << 28  # bytes of a file that is read
FORMAT: Literal["collapse-influence/1"] = "collapse-influence/1"


class Content(Record):
    """The file: figures by the name of their site."""

    format: Literal["collapse-influence/1"] = FORMAT
    made_for: dict[str, Any]
    estimates: dict[str, Estimate] = Field(default_factory=dict)
    orders: dict[str, list[int]] = Field(default_factory=dict, description="units of a group, least influence first")
    sums: dict[str, dict[str, dict[int, Sums]]] = Field(
        default_factory=dict, description="stand-in -> site -> number of the batch -> losses"
    )


class Store:
    """The figures so far; `save` keeps them. Without a path they are kept in memory alone."""

    def __init__(self, made_for: Mapping[str, Any], path: Path | None = None) -> None:
        self._path = path
        self.content = Content(made_for=dict(made_for))
        if path is not None and path.exists():
            self.content = _read(path, self.content.made_for)

    def batches(self, by: str, site: str) -> dict[int, Sums]:
        """Return the losses of a site by batch, to be added to."""
        return self.content.sums.setdefault(by, {}).setdefault(site, {})

    def refused(self, reason: str) -> CollapseError:
        """Return the error that says why what was kept cannot be used."""
        return _refused(self._path or Path("memory"), reason)

    def save(self) -> None:
        """Write the file; a crash leaves the old one or the new one."""
        if self._path is not None:
            _write(self._path, self.content)


@contextmanager
def opened(folder: Path, made_for: Mapping[str, Any]) -> Iterator[Store]:
    """Open the file in `folder` for figures that depend on `made_for`; nobody else may have it open meanwhile.

    Raises `OutputError` where the folder cannot be written, or the file is damaged, another's or in use.
    """
    path = folder / f"{digest(dict(made_for))[:32]}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path.with_suffix(".lock"), timeout=0)
        with lock:
            yield Store(made_for, path)
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


def _read(path: Path, made_for: Mapping[str, Any]) -> Content:
    if not path.is_file():
        raise _refused(path, "it is no plain file")
    try:
        body = read_json(path, LARGEST)
        checksum = body.pop("checksum", None)
        if body.get("format") != FORMAT:
            raise _refused(path, f"its format is {body.get('format')!r}, not {FORMAT!r}")
        if checksum != digest(body):
            raise _refused(path, "its checksum is wrong")
        content = Content.model_validate(body)
    except ValidationError as error:
        raise _refused(path, first_problem(error)) from None
    except (ValueError, RecursionError) as error:
        raise _refused(path, str(error)) from None
    if content.made_for != made_for:
        raise _refused(path, "it was made for something else")
    return content


def _refused(path: Path, reason: str) -> CollapseError:
    return OutputError(f"is no cache that can be used: {reason}", where=str(path), fix="delete it")
