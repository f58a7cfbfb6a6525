"""Assertions for the tests of projects that serve a collapsed model."""

from __future__ import annotations

from pathlib import Path

from collapse.probe import probe


def assert_erased(folder: str | Path, pattern: str) -> None:
    """Assert that the weights matching `pattern` (a glob, as for `probe`) are gone from the files in `folder`.

    Raises `AssertionError` with the reason, and `CheckpointError` where the pattern matches nothing at all.
    """
    found = probe(Path(folder), pattern)
    if found.status != "ERASED":
        raise AssertionError(f"{pattern} in {Path(folder).name} is {found.status}: {found.reason}")
