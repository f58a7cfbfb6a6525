"""The benchmark of how a search grows: its grid, its powers, its corpus, and one search in a process of its own."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from benchmarks import scaling
from benchmarks.scaling import Point, ScalingReport, along, corpus_of, grid, growth, train
from collapse.errors import CollapseError, PlanError
from tests.small_tokenizers import CORPUS


def point(layers: int, tokens: int, seconds: float = 1.0, peak: int = 100) -> Point:
    return Point(
        layers=layers, tokens=tokens, parameters=1, seconds=9.0, cpu_seconds=2 * seconds, search_seconds=seconds,
        stages={}, peak_bytes=peak,
    )  # fmt: skip


def text(lines: int = 1500) -> str:
    random = Random(0)
    return "".join(" ".join(random.sample(CORPUS[0].split(), 5)) + f" {random.randrange(999)}\n" for _ in range(lines))


def test_layers_are_tried_with_the_most_tokens_and_tokens_with_the_layers_in_the_middle() -> None:
    assert grid([30, 4, 8], [100, 400, 200]) == [(4, 400), (8, 400), (30, 400), (8, 100), (8, 200)]
    assert grid([2], [50]) == [(2, 50)]


def test_a_line_has_the_points_that_differ_in_one_size_alone() -> None:
    points = [point(*sizes) for sizes in grid([4, 8, 30], [100, 200, 400])]
    assert [one.layers for one in along(points, "layers")] == [4, 8, 30]
    assert sorted(one.tokens for one in along(points, "tokens")) == [100, 200, 400]


def test_growth_is_the_power_of_a_power_law() -> None:
    points = [point(layers, 1, 3.0 * layers**2, 5000 * layers) for layers in (2, 4, 8)]
    found = growth(points, "layers")
    assert found is not None
    assert (found.search_seconds, found.cpu_seconds, found.peak_bytes) == pytest.approx((2.0, 2.0, 1.0))
    assert growth(points[:1], "layers") is None
    assert growth(points, "tokens") is None


def test_the_corpus_is_as_many_whole_lines_as_have_the_tokens() -> None:
    whole = text(300)
    tokenizer = train(whole)
    part = corpus_of(whole, tokenizer, 500)
    count = sum(len(tokenizer.encode(line).ids) for line in part.splitlines(keepends=True))
    last = len(tokenizer.encode(part.splitlines(keepends=True)[-1]).ids)
    assert whole.startswith(part) and part.endswith("\n")
    assert count - last < 500 <= count
    with pytest.raises(CollapseError, match="tokens, not 1000000; give fewer --tokens"):
        corpus_of(whole, tokenizer, 1_000_000)


def test_the_search_is_passes_and_forwards() -> None:
    assert scaling.search_seconds({"pass layers": 2.0, "trace": 9.0, "model.forward": 5.0, "pass x": 1.0}) == 8.0


@pytest.mark.parametrize(
    ("wrong", "message"), [(["--passes", "nosuch"], "unknown pass"), (["--budget", "x"], "budget")]
)
def test_a_search_that_there_is_not_is_refused_before_any_is_run(wrong: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        scaling.main(wrong)


def test_a_search_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    logs = tmp_path / "data" / "logs"
    logs.mkdir(parents=True)
    (logs / "A.log").write_text(text())
    report = tmp_path / "scaling.json"
    run = ["--layers", "2", "--tokens", "8000", "--hidden", "96", "--data", str(tmp_path / "data"), "--threads", "1"]
    assert scaling.main([*run, "--budget", "kl<=100", "--report", str(report)]) == 0
    found = ScalingReport.model_validate_json(report.read_bytes())
    (only,) = found.points
    assert (only.layers, only.tokens, found.by_layers, found.by_tokens) == (2, 8000, None, None)
    assert only.stages["pass layers"] > 0 and 0 < only.search_seconds < only.seconds
    assert only.cpu_seconds > 1  # the imports alone
    assert only.peak_bytes > 4 * only.parameters
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == [
        f"scaling-{what}-{by}.svg" for what in ("memory", "time") for by in ("layers", "tokens")
    ]
