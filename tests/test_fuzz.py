"""Damaged files from elsewhere get one line: no traceback, no file outside the folder, no hang, bounded memory.

`COLLAPSE_FUZZ` is the number of inputs of each kind, `COLLAPSE_FUZZ_SEED` the seed; `scripts/bench fuzz` sets both.
"""

from __future__ import annotations

import os
import resource
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.fuzzing import READERS, TENSOR, attempt

COUNT = int(os.environ.get("COLLAPSE_FUZZ", "50"))
SEED = int(os.environ.get("COLLAPSE_FUZZ_SEED", "20"))
GROWTH = 1 << 30  # bytes of memory that all inputs of one kind may add to the peak; the largest takes a tenth


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def test_a_whole_header_is_read(tmp_path: Path) -> None:
    assert attempt("header", tmp_path, TENSOR) == "read"


@pytest.mark.parametrize("kind", READERS)
def test_damaged_input_is_read_or_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    before = peak()

    @seed(SEED)
    @settings(max_examples=COUNT, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.tuples(*READERS[kind][1]))
    def run(found: tuple[object, ...]) -> None:
        outcomes[attempt(kind, tmp_path, *found)] += 1

    try:
        run()
    finally:  # a failure needs the seed
        print(f"seed {SEED}, {COUNT} inputs of {kind}: {outcomes['read']} read, {outcomes['refused']} refused")
    assert outcomes["refused"], "damage that nobody finds is none"
    # hypothesis draws other inputs where other modules are imported, and few headers survive any damage
    assert outcomes["read"] or (kind == "header" and COUNT < 500), "readers that refuse everything read nothing"
    assert peak() - before < GROWTH
