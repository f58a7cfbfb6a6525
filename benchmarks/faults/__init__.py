"""`scripts/bench faults`: the verifier under attack, in reports/faults.json and a table in docs/verify.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Run all cases, write the figures after each model, and fail where a fault was missed or a removal refused."""
    from benchmarks.faults.record import load, merged, save
    from benchmarks.faults.run import CONFIGS, Row, rows

    parser = argparse.ArgumentParser(prog="scripts/bench faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="draws other weights and other faults")
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=list(CONFIGS), metavar="KIND")
    parser.add_argument("--dry-run", action="store_true", help="print only, write nothing")
    options = parser.parse_args(arguments)
    report = load()
    for model in options.models:
        found: list[Row] = []
        for row in rows([model], options.seed):
            found.append(row)
            said = f"{row.outcome:<12}{row.model}: {row.kind} {row.number} (seed {row.seed}): {row.said}"
            print(said, file=sys.stderr)
        report = merged(report, model, found, options.seed)
        if not options.dry_run:
            save(report)
    print(report["totals"])
    return int(bool(report["wrong"]))
