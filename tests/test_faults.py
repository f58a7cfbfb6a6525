"""A seeded slice of the attack on the verifier; `scripts/bench faults` runs all of it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.faults.computed_faults import COMPUTED_FAULTS, COMPUTED_WEIGHTS
from benchmarks.faults.planted import Planted, accept, judge
from benchmarks.faults.record import BEGIN, DOCS, END, REPORT, table
from benchmarks.faults.removals import REMOVALS
from benchmarks.faults.subjects import Subject, make_subject
from benchmarks.faults.wrong_outputs import WRONG_OUTPUTS
from benchmarks.faults.wrong_plans import specialise

SEED = 11


@pytest.fixture(scope="module", params=["gemma3_text"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(request.param, tmp_path_factory.mktemp(request.param) / "source", SEED)


def cases(subject: Subject, make, kind: str, count: int) -> Iterator[Planted]:
    return islice(make(subject, random.Random(f"{subject.kind} {kind} {SEED}")), count)


@pytest.mark.parametrize("kind", WRONG_OUTPUTS)
def test_a_wrong_output_is_refuted_with_its_site(kind: str, subject: Subject, tmp_path: Path) -> None:
    for planted in cases(subject, WRONG_OUTPUTS[kind], kind, 1):
        judged = judge(planted, tmp_path)
        assert judged.outcome == "refuted", f"seed {SEED}: {judged}"
        assert planted.site in judged.said


@pytest.mark.parametrize("kind", COMPUTED_FAULTS)
def test_a_fault_about_computed_weights_is_refuted_with_its_site(kind: str, subject: Subject, tmp_path: Path) -> None:
    for number, planted in enumerate(cases(subject, COMPUTED_FAULTS[kind], kind, 2)):
        judged = judge(planted, tmp_path / str(number))
        assert judged.outcome == "refuted" and planted.site in judged.said, f"seed {SEED}: {judged}"


def test_computed_weights_are_verified(subject: Subject, tmp_path: Path) -> None:
    for number, planted in enumerate(cases(subject, COMPUTED_WEIGHTS["computed weights"], "computed weights", 2)):
        judged = accept(planted, tmp_path / str(number))
        assert judged.outcome == "verified", f"seed {SEED}: {judged}"


@pytest.mark.parametrize("kind", REMOVALS)
def test_a_true_removal_is_verified(kind: str, subject: Subject, tmp_path: Path) -> None:
    for number, planted in enumerate(cases(subject, REMOVALS[kind], kind, 2)):
        judged = accept(planted, tmp_path / str(number))
        assert judged.outcome == "verified", f"seed {SEED}: {judged}"


def test_a_fault_that_changes_nothing_is_not_counted(subject: Subject, tmp_path: Path) -> None:
    idle = specialise("dropout", attention_dropout=0.5)
    assert judge(Planted(subject, subject.plan(idle), "dropout"), tmp_path).outcome == "equivalent"


def test_a_refutation_that_names_another_site_does_not_count(subject: Subject, tmp_path: Path) -> None:
    (planted,) = cases(subject, WRONG_OUTPUTS["one row"], "one row", 1)
    assert judge(replace(planted, site="model.layers.9"), tmp_path).outcome == "unnamed"


def test_the_recorded_attack_missed_nothing_and_the_page_shows_it() -> None:
    report = json.loads(REPORT.read_bytes())
    assert report["wrong"] == []
    assert report["totals"]["faults"]["refuted"] == report["totals"]["faults"]["planted"] >= 300
    assert report["totals"]["removals"]["verified"] == report["totals"]["removals"]["planted"] >= 150
    faults, removals = report["totals"]["faults"], report["totals"]["removals"]
    assert f"| all | {faults['planted']} | {faults['refuted']} | 0 | 0 | {faults['equivalent']} |" in table(report)
    assert f"| all | {removals['planted']} | {removals['verified']} | 0 |" in table(report)
    page = DOCS.read_text(encoding="utf-8")
    assert f"{BEGIN}\n{table(report)}\n{END}" in page
