"""The record of the peers' benchmark, `reports/peers-MODEL.json`, and the plots beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from benchmarks.peers.evaluate import Scores
from benchmarks.plot import PARAMETERS, Axis, svg
from collapse.canonical import dumps
from collapse.errors import CollapseError
from collapse.plan import Record, first_problem

CalibratedOn = Literal["generic", "domain"]
EvaluatedOn = Literal["in-domain", "other domain"]
KL = Axis("KL, nats a token", log=True)
SOURCE = "source"  # the method that takes nothing


class Settings(Record):
    """What makes cells comparable. `texts` has names and digests of the sources by kind."""

    model: str
    digest: str
    domain: str
    other: str
    generic: str
    calibration_tokens: int
    search_tokens: int
    healing_tokens: int
    evaluation_tokens: int
    seed: int
    texts: dict[str, Any]


class Cell(Record):
    """One method at one share, on one pair of texts. `share` is what was asked for, parameters are counted."""

    method: str
    share: float
    calibrated_on: CalibratedOn
    evaluated_on: EvaluatedOn
    vocabulary: bool
    parameters: int
    decoder_parameters: int
    dropped_blocks: tuple[int, ...]
    scores: Scores

    @property
    def key(self) -> tuple[str, float, CalibratedOn, EvaluatedOn, bool]:
        """What tells cells apart."""
        return (self.method, self.share, self.calibrated_on, self.evaluated_on, self.vocabulary)


class Report(Record):
    """All cells of one model so far, in order of their keys."""

    settings: Settings
    machine: dict[str, str | int]
    cells: tuple[Cell, ...] = ()

    def has(self, *key: object) -> bool:
        """Whether there is a cell of this key."""
        return any(cell.key == key for cell in self.cells)

    def with_cells(self, *cells: Cell) -> Report:
        """Return the report with more cells."""
        return self.model_copy(update={"cells": tuple(sorted((*self.cells, *cells), key=lambda cell: cell.key))})


def load(path: Path, fresh: Report) -> Report:
    """Return the report in `path`, or `fresh` where there is none; raises where it was made with other settings."""
    if not path.is_file():
        return fresh
    try:
        found = Report.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise CollapseError(first_problem(error), where=path.name, fix="remove it") from None
    if found.settings != fresh.settings:
        raise CollapseError("it was made with other settings", where=path.name, fix="remove it or give --report")
    return found


def save(report: Report, path: Path) -> None:
    """Write the report, and one plot for each pair of texts and vocabulary."""
    path.write_text(dumps(report.model_dump(mode="json")), encoding="utf-8")
    for name, plot in plots(report):
        path.with_name(f"{path.stem}-{name}.svg").write_text(plot, encoding="utf-8")


def plots(report: Report) -> Iterator[tuple[str, str]]:
    """Yield name and SVG of every plot."""
    grids = sorted({(cell.calibrated_on, cell.evaluated_on, cell.vocabulary) for cell in report.cells})
    for calibrated, evaluated, vocabulary in grids:
        lines: dict[str, list[tuple[float, float]]] = {}
        for cell in report.cells:
            if cell.key[2:] == (calibrated, evaluated, vocabulary) and cell.method != SOURCE:
                lines.setdefault(cell.method, []).append((cell.parameters, cell.scores.kl))
        said = {"generic": report.settings.generic, "domain": report.settings.domain}[calibrated]
        text = {"in-domain": report.settings.domain, "other domain": report.settings.other}[evaluated]
        title = f"{report.settings.model}: calibrated on {said}, evaluated on {text}"
        name = f"{calibrated}-{evaluated.replace(' ', '-')}" + ("-vocabulary" if vocabulary else "")
        if lines:
            yield name, svg(title + (", vocabulary cut" if vocabulary else ""), lines, PARAMETERS, KL)
