"""`scripts/bench fuzz`: damaged files for every reader, many more than the tests try, and what became of them.

The tests themselves run, with other numbers: no traceback, no file outside the folder, no ten seconds, bounded memory.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import ROOT
from collapse.canonical import dumps
from collapse.plan import Record

REPORT = ROOT / "reports" / "fuzz.json"
OUTCOME = re.compile(r"^\.?seed \d+, \d+ inputs of (\w+): (\d+) read, (\d+) refused", re.MULTILINE)


class Summary(Record):
    """How many inputs of each kind were read and refused; a fault of ours ends the run."""

    seed: int
    inputs: int
    read: dict[str, int]
    refused: dict[str, int]
    seconds: float


def summarise(said: str, *, seed: int, seconds: float) -> Summary:
    """Read the counts from what the tests printed."""
    found = OUTCOME.findall(said)
    read, refused = ({kind: int(row[at]) for kind, *row in found} for at in (0, 1))
    total = sum(read.values()) + sum(refused.values())
    return Summary(seed=seed, inputs=total, read=read, refused=refused, seconds=seconds)


def main(arguments: Sequence[str]) -> int:
    """Run the tests, and write the counts to `reports/fuzz.json` unless one failed."""
    parser = argparse.ArgumentParser(prog="scripts/bench fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=3400, help="of each kind")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--report", type=Path, default=REPORT, help="where the counts go as JSON")
    options = parser.parse_args(arguments)
    environment = {**os.environ, "COLLAPSE_FUZZ": str(options.inputs), "COLLAPSE_FUZZ_SEED": str(options.seed)}
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "tests/test_fuzz.py"]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    if done.returncode == 0:
        summary = summarise(done.stdout, seed=options.seed, seconds=round(time.perf_counter() - start, 1))
        options.report.write_text(dumps(summary.model_dump(mode="json")), encoding="utf-8")
    return done.returncode
