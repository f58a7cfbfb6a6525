"""The figures of an attack: counted by kind, written as JSON and as a Markdown table."""

from __future__ import annotations

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


def counted(rows: Sequence[Row], kinds: Iterable[str], columns: Sequence[str]) -> dict[str, dict[str, int]]:
    """Count the outcomes by kind; `planted` leaves out what changed nothing."""
    found: dict[str, dict[str, int]] = {}
    for kind in kinds:
        outcomes = [row.outcome for row in rows if row.kind == kind]
        if outcomes:
            counts = {column: outcomes.count(column) for column in columns}  # type: ignore[arg-type]
            found[kind] = {"planted": len(outcomes) - counts.get("equivalent", 0)} | counts
    return found


def summary(rows: Sequence[Row], seed: int) -> dict[str, Any]:
    """Return the report: counts by kind and over all, and each case that went wrong."""
    faults, true = counted(rows, FAULTS, FAULT_COLUMNS), counted(rows, TRUE, TRUE_COLUMNS)
    good = {"refuted", "verified", "equivalent"}
    wrong = [vars(row) for row in rows if row.outcome not in good]
    return {
        "seed": seed,
        "models": sorted({row.model for row in rows}),
        "faults": faults,
        "removals": true,
        "totals": {"faults": _total(faults), "removals": _total(true)},
        "wrong": wrong,
    }


def _total(kinds: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    columns = dict.fromkeys(column for counts in kinds.values() for column in counts)
    return {column: sum(counts[column] for counts in kinds.values()) for column in columns}


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
    faults = _table(("fault", "planted", "refuted", "refuted, site not named", "missed", "equal"), report, "faults")
    removals = _table(("true removal", "planted", "verified", "false alarms"), report, "removals")
    models = f"{len(report['models'])} models, seed {report['seed']}: {', '.join(report['models'])}."
    return f"{models}\n\n{faults}\n\n{removals}"


def _table(header: Sequence[str], report: Mapping[str, Any], part: str) -> str:
    rules = ("---", *("--:" for _ in header[1:]))
    lines = [(kind, *map(str, counts.values())) for kind, counts in report[part].items()]
    total = ("all", *map(str, report["totals"][part].values()))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rules, *lines, total))
