"""The figures of an attack: counted by kind, written as JSON and as a Markdown table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.faults.run import FAULTS, TRUE, Row
from benchmarks.results import ROOT
from collapse.canonical import dumps
from collapse.errors import CollapseError

REPORT, DOCS = ROOT / "reports" / "faults.json", ROOT / "docs" / "verify.md"
BEGIN, END = "<!-- faults:begin -->", "<!-- faults:end -->"
FAULT_COLUMNS = ("refuted", "unnamed", "missed", "equivalent")
TRUE_COLUMNS = ("verified", "false alarm")


def counted(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Count outcomes by kind."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        counts = found.setdefault(row.kind, {})
        counts[row.outcome] = counts.get(row.outcome, 0) + 1
    return found


def merged(report: Mapping[str, Any], model: str, rows: Sequence[Row], seed: int) -> dict[str, Any]:
    """Return the report with what was found in one model in place of what it had of it, and each case gone wrong.

    A report of another seed is begun anew.
    """
    before = report if report.get("seed") == seed else {}
    by_model = {**before.get("models", {}), model: counted(rows)}
    wrong = [case for case in before.get("wrong", []) if case["model"] != model]
    wrong += [vars(row) for row in rows if row.outcome not in {"refuted", "verified", "equivalent"}]
    faults, removals = _kinds(by_model, FAULTS, FAULT_COLUMNS), _kinds(by_model, TRUE, TRUE_COLUMNS)
    totals = {"faults": _total(faults), "removals": _total(removals)}
    return {
        "seed": seed, "models": by_model, "faults": faults, "removals": removals, "totals": totals, "wrong": wrong
    }  # fmt: skip


def _kinds(
    by_model: Mapping[str, Mapping[str, Mapping[str, int]]], kinds: Iterable[str], columns: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Sum over the models; `planted` leaves out what changed nothing."""
    found: dict[str, dict[str, int]] = {}
    for kind in kinds:
        counts = {column: sum(model.get(kind, {}).get(column, 0) for model in by_model.values()) for column in columns}
        if any(counts.values()):
            found[kind] = {"planted": sum(counts.values()) - counts.get("equivalent", 0)} | counts
    return found


def _total(kinds: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    columns = dict.fromkeys(column for counts in kinds.values() for column in counts)
    return {column: sum(counts[column] for counts in kinds.values()) for column in columns}


def load() -> dict[str, Any]:
    """Return the report of earlier runs; empty where there is none."""
    return json.loads(REPORT.read_bytes()) if REPORT.is_file() else {}


def save(report: Mapping[str, Any]) -> None:
    """Write the report, and the table into docs/verify.md; raises `CollapseError` where its markers are gone."""
    REPORT.write_text(dumps(report), encoding="utf-8")
    head, begin, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise CollapseError(f"no {BEGIN} ... {END}", where="docs/verify.md", fix="put the markers back")
    DOCS.write_text(f"{head}{BEGIN}\n{table(report)}\n{END}{tail}", encoding="utf-8")


def table(report: Mapping[str, Any]) -> str:
    """Return two Markdown tables: faults, and true removals."""
    header = ("fault", "planted", "refuted", "refuted, site not named", "missed", "equal")
    faults = _table(header, report, "faults", FAULTS, FAULT_COLUMNS)
    removals = _table(("true removal", "planted", "verified", "false alarms"), report, "removals", TRUE, TRUE_COLUMNS)
    models = f"{len(report['models'])} models, seed {report['seed']}: {', '.join(sorted(report['models']))}."
    return f"{models}\n\n{faults}\n\n{removals}"


def _table(
    header: Sequence[str], report: Mapping[str, Any], part: str, kinds: Iterable[str], columns: Sequence[str]
) -> str:
    counted = {kind: report[part][kind] for kind in kinds if kind in report[part]} | {"all": report["totals"][part]}
    lines = [(kind, *(str(counts[column]) for column in ("planted", *columns))) for kind, counts in counted.items()]
    rules = ("---", *("--:" for _ in header[1:]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rules, *lines))
