"""What was measured of a model's sites, kept in a file, so that a killed run goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from collapse.analysis import store
from collapse.analysis.exact_cost import Sums
from collapse.analysis.first_order import Estimate


class Content(store.Content):
    """The file: figures by the name of their site."""

    format: Literal["collapse-influence/1"] = "collapse-influence/1"
    estimates: dict[str, Estimate] = Field(default_factory=dict)
    orders: dict[str, list[int]] = Field(default_factory=dict, description="units of a group, least influence first")
    sums: dict[str, dict[str, dict[int, Sums]]] = Field(
        default_factory=dict, description="stand-in -> site -> number of the batch -> losses"
    )


class Store(store.Store[Content]):
    """The figures so far; without a path they are kept in memory alone."""

    def __init__(self, made_for: Mapping[str, Any], path: Path | None = None) -> None:
        super().__init__(Content, made_for, path)

    def batches(self, by: str, site: str) -> dict[int, Sums]:
        """Return the losses of a site by batch, to be added to."""
        return self.content.sums.setdefault(by, {}).setdefault(site, {})


@contextmanager
def opened(folder: Path, made_for: Mapping[str, Any]) -> Iterator[Store]:
    """Open the file in `folder` for figures that depend on `made_for`; nobody else may have it open meanwhile.

    Raises `OutputError` where the folder cannot be written, or the file is damaged, another's or in use.
    """
    with store.locked(folder, made_for) as path:
        yield Store(made_for, path)
