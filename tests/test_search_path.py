"""The path of a search as a file: beside a plan, in an output, in the report; and what is no path of the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest

from collapse import Options, export
from collapse.audit import audit
from collapse.budget import parse_budgets
from collapse.checkpoint import Checkpoint
from collapse.errors import PlanError
from collapse.manifest import load_manifest
from collapse.passes.shrink_task import Task
from collapse.pipeline import Result, make_plan
from collapse.plan import DropLayers, Narrow, Plan
from collapse.report.data import Report
from collapse.search_path import PATH_FILE, SearchPath, load_path, path_beside
from tests.command import Command
from tests.test_export import LOG
from tests.test_shrink import idle_llama

BUDGET = "kl<=0.3,params=-12%"


def read(file: Path) -> SearchPath:
    return SearchPath.model_validate_json(file.read_bytes())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return idle_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def planned(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan file, of blocks and neurons, with what stands beside it."""
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    options = Options(passes=("layers", "neurons"), budgets=parse_budgets(BUDGET))
    make_plan(llama, LOG, options, save=file)
    return file


@pytest.fixture(scope="module")
def free(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    options = Options(passes=("neurons",), budgets=parse_budgets("params=-5%"), layout="free", prompts=2, new_tokens=4)
    return export(llama, tmp_path_factory.mktemp("free") / "out", LOG, options)


def test_the_path_beside_a_plan_says_what_its_evidence_says(planned: Path) -> None:
    plan, path = Plan.load(planned), read(path_beside(planned))
    assert path.plan == plan.digest and path == load_path(plan, planned)
    assert (path.layout, path.moves, path.budgets) == ("native", ("layers", "neurons"), ("kl<=0.3", "params=-12%"))
    (taken,) = [point for point in path.points if point.taken]
    figures = plan.rewrites[-1].evidence.figures
    assert taken.kl == figures["calibration_kl"] and path.held_out == figures["split"]
    assert taken.counted == {metric: figures[f"{metric}_share"] for metric in ("params", "flops", "decode")}
    assert taken.shares["params"] == pytest.approx(taken.counted["params"], abs=1e-6)
    assert taken.counted["params"] <= 0.88 < 1 == max(1, *(point.shares["params"] for point in path.points))
    gone = [block for one in plan.of_kind(DropLayers) for block in range(one.size) if block not in one.kept]
    assert list(taken.dropped) == gone
    narrows = [one for one in plan.of_kind(Narrow) if one.pass_name == "neurons"]
    blocks = 3 - len(gone)
    assert taken.lost.get("neurons", 0) == sum(one.dropped for one in narrows) // max(1, len(narrows)) * blocks
    (bound,) = taken.bounds
    assert (bound.metric, bound.at_most, bound.met) == ("kl", figures["kl_at_most"], True)
    assert taken.held_out is not None and taken.held_out.kl == pytest.approx(figures["kl_estimate"])
    sizes = [point.shares["params"] for point in path.points]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) > 1, "the walk goes to ever smaller models"
    assert all(point.held_out and point.bounds for point in path.points), "each was judged on the way"


def test_a_reviewed_plan_takes_its_path_along(llama: Path, planned: Path, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "out"
    found = command("export", llama, "--plan", planned, "-o", out, "--prompts", 1, "-q")
    assert found.code == 0, found.err
    assert (out / PATH_FILE).read_bytes() == path_beside(planned).read_bytes()
    assert PATH_FILE in load_manifest(out).files
    assert audit(out, Checkpoint.open(llama)).status == "clean"
    assert command("verify", out, "--source", llama).code == 0
    assert PATH_FILE not in Checkpoint.open(out).side_files, "it is no part of a model that is collapsed again"
    report = Report.load(out / "report.json")
    assert report.search == read(out / PATH_FILE)
    text = (out / "REPORT.md").read_text()
    assert "## What was searched" in text and text.count("| **taken** |") == 1
    (out / PATH_FILE).write_text((out / PATH_FILE).read_text() + " ")
    assert [one.rule for one in audit(out).findings] == ["file-changed"]


def test_in_the_free_layout_each_block_is_told(free: Result) -> None:
    assert free.output is not None and free.report.search is not None
    path = read(free.output / PATH_FILE)
    assert path == free.report.search and path.layout == "free"
    (point,) = [point for point in path.points if point.taken]
    narrows = [one for one in free.plan.of_kind(Narrow) if one.pass_name == "neurons"]
    told = {int(one.site.split(".")[2]): one.dropped for one in narrows}
    assert point.by_block == {"neurons": told} and point.lost == {"neurons": sum(told.values())}
    assert point.bounds == () and point.held_out is not None
    assert point.held_out.kl == narrows[0].evidence.figures["kl"]


@pytest.mark.parametrize("layout", ["native", "free"])
def test_a_shape_is_counted_before_it_is_fitted(
    layout: Literal["native", "free"], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLAPSE_CACHE", str(tmp_path))  # what is counted here is of no use to others
    counted = Task._counted
    more = {"params": 0.01, "flops": 0.0, "decode": 0.0}  # than is reckoned
    monkeypatch.setattr(
        Task, "_counted", lambda self, shape: {name: value + more[name] for name, value in counted(self, shape).items()}
    )
    options = Options(passes=("neurons",), budgets=parse_budgets("params=-5%"), layout=layout)
    path = make_plan(llama, LOG, options).report.search
    assert path is not None
    (point,) = path.points
    assert point.taken and point.counted["params"] <= 0.95
    assert point.shares["params"] == pytest.approx(point.counted["params"] - 0.01, abs=1e-6)


def test_where_nothing_is_taken_the_path_says_why(llama: Path) -> None:
    options = Options(passes=("neurons",), budgets=parse_budgets("confident-flips<=0.0001%"))
    result = make_plan(llama, LOG, options)
    path = result.report.search
    assert result.plan.rewrites == () and path is not None
    assert [point.taken for point in path.points] == [False] and path.points[0].bounds[0].met is False


def test_without_a_budget_there_is_no_path_and_an_earlier_one_goes(llama: Path, tmp_path: Path) -> None:
    path_beside(tmp_path / "plan.json").write_text("of an earlier plan of the name")
    result = make_plan(llama, LOG, Options(passes=("neurons",)), save=tmp_path / "plan.json")
    assert result.report.search is None and [one.name for one in tmp_path.iterdir()] == ["plan.json"]
    assert load_path(result.plan, tmp_path / "plan.json") is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda body: body.update(plan="0" * 64), "is the path to the plan 000000000000, this one is"),
        (lambda body: body.update(format="collapse-path/2"), "field format"),
        (lambda body: body["points"][0].pop("kl"), "field points.0.kl"),
        (lambda body: body["points"][0].update(shares={"params": 1.0}), "points.0.shares.*no flops"),
        (lambda body: body["points"][0].update(weights=[1.0]), "field points.0.weights"),
    ],
)
def test_a_path_that_is_not_that_of_the_plan_is_one_line(planned: Path, tmp_path: Path, change, said: str) -> None:
    body = json.loads(path_beside(planned).read_bytes())
    change(body)
    path_beside(tmp_path / "plan.json").write_text(json.dumps(body))
    with pytest.raises(PlanError, match=said) as caught:
        load_path(Plan.load(planned), tmp_path / "plan.json")
    assert "\n" not in str(caught.value)
