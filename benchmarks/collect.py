"""`scripts/bench collect OUT...`: add finished exports to `reports/results.json` and rewrite README's table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import readme_table, results
from collapse.errors import CollapseError


def main(arguments: Sequence[str]) -> int:
    """Read each report, replace the entry of the same model and schema, and write the record."""
    parser = argparse.ArgumentParser(prog="scripts/bench collect", description=__doc__)
    parser.add_argument("outputs", nargs="+", type=Path, metavar="[NAME=]OUT", help="output directory of an export")
    options = parser.parse_args(arguments)
    known = {(result.model, result.schema_type): result for result in results.load()}
    for argument in options.outputs:
        result = _read(str(argument))
        known[result.model, result.schema_type] = result
    results.save(tuple(known.values()))
    return readme_table.main([])


def _read(argument: str) -> results.Result:
    name, _, folder = argument.rpartition("=")
    report = results.read_report(Path(folder))
    source = report.get("source")
    label = name or (source.get("name") if isinstance(source, dict) else None)
    if not isinstance(label, str):
        raise CollapseError("the report does not name its model", where=folder, fix="give NAME=OUT")
    return results.Result.from_report(report, model=label)
