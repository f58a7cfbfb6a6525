"""Every case of the architecture suite: what goes, that the result is verified, that plans stay as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.architecture_record import Row, load, plan_digest
from benchmarks.architectures import DOCS, render
from collapse.plan import Plan
from collapse.verify.compare import EQ, OTHER_SHAPE
from tests.architecture_cases import CASES
from tests.architecture_suite import elements_beyond_the_schema, run

ROWS: Mapping[str, Row] = {row.name: row for row in load()}
RENEW = "where this is meant, run `scripts/architectures` and review what changed in reports/architectures.json"
LOGITS = 30.0  # no logit of a tiny model is larger, so tolerances relative to it are bounded
HASHED = ("llama, bf16 with fp32 norms", "gpt2", "mixtral")


@pytest.mark.parametrize("name", CASES)
def test_a_case_gives_what_is_recorded(name: str) -> None:
    """One test for all, since the workers of a parallel run do not share what a case gave."""
    assert name in ROWS, f"{name} is not recorded: {RENEW}"
    row = run(name)
    assert row.stable() == ROWS[name].stable(), RENEW
    if row.refused is None:
        assert_it_loses_what_the_schema_cannot_reach_and_says_the_same(row)


def assert_it_loses_what_the_schema_cannot_reach_and_says_the_same(row: Row) -> None:
    tables = row.removed.get("vocabulary", 0) + row.removed.get("positions", 0)
    assert tables == elements_beyond_the_schema(row.name)
    assert row.greedy_equal
    assert row.prefill_difference is not None
    assert row.prefill_difference <= EQ.absolute + EQ.relative * LOGITS
    assert (row.cache_difference or 0.0) <= OTHER_SHAPE.absolute + OTHER_SHAPE.relative * LOGITS


def test_the_suite_covers_what_it_promises() -> None:
    verified = [row for row in ROWS.values() if row.refused is None]
    assert len({row.kind for row in verified}) >= 40
    assert set(ROWS) == set(CASES), RENEW


def test_every_refusal_is_one_line_that_names_the_site() -> None:
    for row in ROWS.values():
        assert row.refused is None or (": " in row.refused and "\n" not in row.refused)


def test_the_page_holds_what_the_script_writes() -> None:
    assert DOCS.read_text(encoding="utf-8") == render(load()), RENEW


def test_plans_do_not_depend_on_process_or_hash_seed(tmp_path: Path) -> None:
    """Two fresh processes with other hash seeds decide the same, byte for byte, and what is recorded."""
    texts = [_plans(tmp_path / seed, seed) for seed in ("1", "4242")]
    assert texts[0] == texts[1]
    for name, text in zip(HASHED, texts[0].splitlines(), strict=True):
        assert plan_digest(Plan.model_validate(json.loads(text))) == ROWS[name].plan, RENEW


def _plans(folder: Path, seed: str) -> str:
    code = (
        "import json, sys; from pathlib import Path; from tests.architecture_suite import plan_of\n"
        "for name in sys.argv[2:]: print(json.dumps(plan_of(name, Path(sys.argv[1]) / name).to_json()))"
    )
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(folder), *HASHED]
    done = subprocess.run(command, env=environment, cwd=folder.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
