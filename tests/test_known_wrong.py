"""Wrong rewrites kept as files: each is exported by the real writer, and the verifier must refute it by name.

A file has the rewrites of a plan, on a tiny seeded model of `benchmarks/faults`, what is wrong with them, and the site
that the verdict must name. `seen` is false for what no logit depends on, so that only the files can tell.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.planted import Planted, judge
from benchmarks.faults.subjects import Subject, make_subject
from collapse.plan import Plan

FILES = sorted((Path(__file__).parent / "known_wrong").glob("*.json"))
Sources = Callable[[str, int], Subject]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return cache(lambda kind, seed: make_subject(kind, tmp_path_factory.mktemp(kind) / "source", seed))


def planted(file: Path, subject: Sources) -> Planted:
    case: dict[str, Any] = json.loads(file.read_bytes())
    source = subject(case["model"], case["seed"])
    kept = case["kept_tokens"] and tuple(case["kept_tokens"])
    plan = Plan.model_validate(source.plan(kept=kept).to_json() | {"rewrites": case["rewrites"]})
    return Planted(source, plan, case["site"], seen=case["seen"])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_known_wrong_plan_is_refuted_by_name(file: Path, subject: Sources, tmp_path: Path) -> None:
    case = planted(file, subject)
    judged = judge(case, tmp_path)
    assert judged.outcome == "refuted", judged.said
    assert case.site in judged.said


def test_there_are_files() -> None:
    assert len(FILES) >= 12
    assert all(json.loads(file.read_bytes())["wrong"] for file in FILES)
