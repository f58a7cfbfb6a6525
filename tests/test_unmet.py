"""A budget that was not met is told where nobody can miss it; what a plan has decided is not asked for beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from collapse.budget import parse_budgets
from collapse.cli import INTERRUPTED
from collapse.plan import Skipped
from collapse.report.unmet import unmet
from collapse.search_path import PathPoint, SearchPath, Sizes
from tests.command import Command
from tests.test_shrink import source_of

MOVES = ("layers", "neurons")
SHARES = {"params": 0.9, "flops": 0.95, "decode": 0.9}
TOO_FAR = Skipped(pass_name="layers", site="model", reason="it cannot be that small")
ONE_BLOCK = Skipped(pass_name="neurons", site="model.layers.0", reason="it has one neuron")
OTHER = Skipped(pass_name="vocabulary", site="model", reason="every row is in use")


def path(*points: PathPoint) -> SearchPath:
    sizes = Sizes(params=1, prefill_flops=1, weight_bytes_per_decode_token=1)
    return SearchPath(
        layout="native", moves=MOVES, budgets=(), choosing="", held_out="", before=sizes, points=points
    )  # fmt: skip


def point(taken: bool, **counted: float) -> PathPoint:
    return PathPoint(shares=SHARES, counted=counted, kl=0.1, tried=1, taken=taken)


@pytest.mark.parametrize(
    ("budget", "found", "said"),
    [
        ("params=-10%", path(point(True)), ()),
        ("params=-9.99999%,kl<=1", path(point(True)), ()),
        ("params=-10%,flops=-5%", path(point(False), point(True)), ()),
        ("params=-11%", path(point(True)), ("Budget not met: params=-11%; with what was taken it is -10.0%",)),
        ("flops=-10%", path(point(True, flops=0.9)), ()),  # counted in the graph, which reckoning is not
        ("flops=-5%", path(point(True, flops=0.96)), ("Budget not met: flops=-5%; with what was taken it is -4.0%",)),
        ("params=-1%", path(point(False)), ("Budget not met: params=-1%; nothing was taken for it",)),
        ("params=-1%", None, ("Budget not met: params=-1%; nothing was taken for it",)),
        ("kl<=0.1", None, ("Nothing was taken within the budget kl<=0.1",)),
        ("kl<=0.1", path(point(True)), ()),
    ],
)
def test_what_is_not_met_is_said_with_the_reason_of_the_search(
    budget: str, found: SearchPath | None, said: tuple[str, ...]
) -> None:
    skipped = (ONE_BLOCK, TOO_FAR, OTHER)
    why = " (it cannot be that small)."
    assert unmet(parse_budgets(budget), found, skipped, MOVES) == tuple(one + why for one in said)


def test_without_a_reason_of_the_search_those_of_sites_are_given() -> None:
    (said,) = unmet(parse_budgets("params=-1%"), None, (ONE_BLOCK, OTHER), MOVES)
    assert said == "Budget not met: params=-1%; nothing was taken for it (it has one neuron)."
    assert unmet((), None, (TOO_FAR,), MOVES) == ()


def test_the_command_says_so_on_standard_error_and_in_the_report(tmp_path: Path, command: Command) -> None:
    source = source_of("llama", tmp_path, num_hidden_layers=1)
    plan = ("plan", source, "--schema", "log", "--pass", "neurons", "--no-cache", "--json", "--budget")
    far = command(*plan, "params=-99%")
    (said,) = json.loads(far.out)["unmet"]
    assert said == (
        "Budget not met: params=-99%; nothing was taken for it (neurons alone cannot make it that small)."
    )  # fmt: skip
    assert (far.code, far.err.strip()) == (0, f"collapse: {said}")
    near = command(*plan, "params=-1%")
    assert (near.code, near.err, json.loads(near.out)["unmet"]) == (0, "", [])


@pytest.mark.parametrize(
    "given",
    [
        ("--schema", "json"), ("--budget", "params=-30%"), ("--layout", "free"), ("--stage", "fuse"),
        ("--pass", "neurons"), ("--heal", "5k"), ("--placeholder",), ("--threshold", "1"),
    ],
)  # fmt: skip
def test_what_a_plan_has_decided_is_refused_beside_it(tmp_path: Path, command: Command, given: tuple[str, ...]) -> None:
    found = command("export", tmp_path / "model", "--plan", tmp_path / "plan.json", "-o", tmp_path / "out", *given)
    assert (found.code, found.out) == (2, "")
    assert found.err == (
        f"collapse: {given[0]}: a reviewed plan is applied as it is; make a new plan with it\n"
    )  # fmt: skip


def test_an_interrupted_command_says_what_became_of_it(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("collapse.pipeline.make_plan", interrupted)
    found = command("plan", "model")
    assert (found.code, found.out.strip()) == (INTERRUPTED, "")
    assert "collapse: interrupted; nothing was published" in found.err
