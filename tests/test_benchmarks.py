"""README's table, the record behind it, and the arithmetic of the benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import collect, export, guard, readme_table, results
from benchmarks.memory import PeakMemory
from collapse.checkpoint import Checkpoint
from collapse.errors import CollapseError
from collapse.pipeline import make_plan
from collapse.schema import InputSchema
from tests.test_reference_export import REFERENCE
from tests.tiny import plan_for

REPORT: dict[str, Any] = {
    "source": {"name": "tiny", "digest": "d", "model_type": "llama"},
    "schema": {"type": "log"},
    "before": {
        "params": 134515008,
        "bytes": 269030016,
        "prefill_flops": 1000,
        "decode_flops_per_token": 500,
        "weight_bytes_per_decode_token": 269030016,
    },
    "after": {
        "params": 100886256,
        "bytes": 201772512,
        "prefill_flops": 999,
        "decode_flops_per_token": 500,
        "weight_bytes_per_decode_token": 134515008,
    },
    "verified": {"status": "verified"},
}


def result(**changes: Any) -> results.Result:
    return results.Result.from_report({**REPORT, **changes}, model="tiny")


def test_readme_holds_what_the_script_writes() -> None:
    text = readme_table.README.read_text(encoding="utf-8")
    assert readme_table.rewrite(text, readme_table.render(results.load())) == text


def test_the_check_mode_finds_an_edited_table(tmp_path: Path) -> None:
    edited = tmp_path / "README.md"
    text = readme_table.README.read_text(encoding="utf-8")
    edited.write_text(text.replace(readme_table.BEGIN, readme_table.BEGIN + "\n| better figures |"), encoding="utf-8")
    assert readme_table.main(["--check", "--readme", str(edited)]) == 1
    assert readme_table.main(["--readme", str(edited)]) == 0
    assert edited.read_text(encoding="utf-8") == text
    assert readme_table.main(["--check", "--readme", str(edited)]) == 0


def test_one_row_of_the_table() -> None:
    assert readme_table.render([result()]).splitlines()[2] == (
        "| tiny | `log` | 135M → 101M (−25.0 %) | 269MB → 202MB (−25.0 %) | 1k → 999 (−0.1 %) | 500 → 500 (0.0 %) "
        "| 269MB → 135MB (−50.0 %) | yes |"
    )


def test_no_results_make_no_table() -> None:
    assert "|" not in readme_table.render([])


def test_missing_markers_are_an_error() -> None:
    with pytest.raises(CollapseError, match="put the markers back"):
        readme_table.rewrite("no table here", "x")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0"), (999, "999"), (999.6, "1k"), (1000, "1k"), (134515008, "135M"), (999_999_999, "1G"), (2.5e12, "2.5T")],
)
def test_numbers_are_shortened_to_three_digits(value: float, expected: str) -> None:
    assert readme_table.shortened(value) == expected


@settings(deadline=None)
@given(st.integers(1, 10**17))
def test_a_shortened_number_is_within_its_rounding(value: int) -> None:
    text = readme_table.shortened(value)
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}.get(text[-1], 1)
    assert abs(float(text.rstrip("kMGTP")) * scale - value) <= 0.005 * value


@settings(deadline=None)
@given(st.text(alphabet="ab|\n#", max_size=40), st.text(alphabet="xy|\n", max_size=40))
def test_rewriting_twice_is_rewriting_once(around: str, table: str) -> None:
    text = f"{around}{readme_table.BEGIN}old{readme_table.END}{around}"
    once = readme_table.rewrite(text, table)
    assert readme_table.rewrite(once, table) == once
    assert once.startswith(around)
    assert once.endswith(around)


@pytest.mark.parametrize(
    ("verified", "expected"),
    [
        (True, True),
        (False, False),
        ("verified", True),
        ("refuted", False),
        ({"status": "verified"}, True),
        (None, False),
    ],
)
def test_only_a_verified_export_counts_as_one(verified: Any, expected: bool) -> None:
    assert result(verified=verified).verified is expected


def test_a_report_without_a_figure_is_an_error() -> None:
    with pytest.raises(CollapseError, match="no field 'after'"):
        results.Result.from_report({key: value for key, value in REPORT.items() if key != "after"}, model="tiny")


def test_results_survive_their_file_in_one_order(tmp_path: Path) -> None:
    first, second = result(), result(schema={"type": "json"})
    results.save([first, second], tmp_path / "results.json")
    assert results.load(tmp_path / "results.json") == (second, first)
    assert results.load(tmp_path / "none.json") == ()


@pytest.mark.parametrize(("prefix", "model"), [("", "tiny"), ("Mine=", "Mine")])
def test_collect_records_an_export_under_its_models_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, model: str
) -> None:
    record, readme = tmp_path / "results.json", tmp_path / "README.md"
    readme.write_text(f"{readme_table.BEGIN}\n{readme_table.END}\n")
    monkeypatch.setattr(results.load, "__defaults__", (record,))
    monkeypatch.setattr(results.save, "__defaults__", (record,))
    monkeypatch.setattr(readme_table, "README", readme)
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    for _ in range(2):
        assert collect.main([f"{prefix}{tmp_path}"]) == 0
    assert results.load() == (results.Result.from_report(REPORT, model=model),)
    assert f"| {model} | `log` |" in readme.read_text()
    (tmp_path / "report.json").write_text(json.dumps(REPORT | {"source": {}}))
    with pytest.raises(CollapseError, match="does not name its model"):
        collect.main([str(tmp_path)])


RUNS = (
    export.Run(seconds=10.0, stages={"trace": 2.0, "verify.forward": 4.0, "erase": 1.0}, peak_bytes=100),
    export.Run(seconds=12.0, stages={"trace": 3.0, "verify.forward": 5.0, "erase": 1.0}, peak_bytes=300),
    export.Run(seconds=20.0, stages={"trace": 9.0, "verify.forward": 4.0, "erase": 6.0}, peak_bytes=200),
)


def test_stages_are_medians_and_the_rest_is_start_up() -> None:
    assert export.median_stages(RUNS) == {"trace": 3.0, "verify.forward": 4.0, "erase": 1.0, "start-up": 3.0}


def test_the_own_share_leaves_out_forward_passes_and_the_tracer() -> None:
    assert export.own_share({"trace": 3.0, "verify.forward": 4.0, "erase": 1.0, "start-up": 2.0}) == pytest.approx(0.3)
    assert export.own_share({"traced": 1.0, "forwarded": 1.0}) == 1.0


def test_the_summary_relates_memory_to_the_weights() -> None:
    summary = export.summarise(RUNS, model="tiny", schema="log", fp32=80)
    assert summary.peak_over_fp32_weights == 2.5
    assert summary.seconds == 12.0
    assert "2.50 times the weights in fp32" in export.show(summary)


def test_a_run_reads_what_the_pipeline_wrote(tmp_path: Path) -> None:
    program = "import json, os; json.dump({'trace': 1.5}, open(os.environ['COLLAPSE_TIMINGS'], 'w'))"
    run = export.run_once([sys.executable, "-c", program], tmp_path / "timings.json")
    assert run.stages == {"trace": 1.5}
    assert run.peak_bytes > 0


@pytest.mark.parametrize(("program", "reason"), [("raise SystemExit(2)", "ended with status 2"), ("", "no timings")])
def test_a_failed_run_gives_no_figures(program: str, reason: str, tmp_path: Path) -> None:
    stale = tmp_path / "timings.json"
    stale.write_text(json.dumps({"trace": 1.0}))
    with pytest.raises(CollapseError, match=reason):
        export.run_once([sys.executable, "-c", program], stale)


def test_peak_memory_counts_children() -> None:
    size = 64 << 20
    inner = f"data = bytearray(b'x') * {size}; print('ready', flush=True); input()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        with PeakMemory(child.pid) as memory:
            pass
        child.communicate(b"\n")
    assert memory.peak >= size


def test_the_guards_share_is_that_of_the_check_in_an_unguarded_step() -> None:
    timings = guard.Timings(guarded=(4.0, 5.0, 9.0), unguarded=(4.0, 4.0, 2.0), check=(0.25, 0.125, 0.125))
    summary = guard.summarise(timings, model="tiny", schema="log", prompt=7)
    assert (summary.steps, summary.step_ratio, summary.check_share) == (3, 1.25, 0.03125)
    assert "3.125% of a step" in guard.show(summary)


def test_the_guard_is_measured_on_a_collapsed_model(exported: Path, tmp_path: Path) -> None:
    report = tmp_path / "guard.json"
    assert guard.main([str(exported), "--prompt", "5", "--steps", "2", "--report", str(report)]) == 0
    summary = guard.Summary.model_validate_json(report.read_bytes())
    assert (summary.prompt, summary.steps, summary.schema_type) == (5, 2, "log")
    assert min(summary.check, summary.guarded_step, summary.unguarded_step) > 0


def test_a_generation_that_the_schema_does_not_allow_is_not_measured(llama: Checkpoint) -> None:
    schema = InputSchema(type="log", max_tokens=20)
    plan = plan_for(llama, schema=schema.to_json(), schema_digest=schema.digest)
    guard.fitting(plan, 10, 2)
    with pytest.raises(CollapseError, match="21 tokens break max_tokens 20"):
        guard.fitting(plan, 10, 3)


def test_an_unknown_benchmark_is_refused() -> None:
    answer = subprocess.run([sys.executable, "-m", "benchmarks", "nosuch"], cwd=results.ROOT, capture_output=True)
    assert answer.returncode == 2
    assert b"scripts/bench NAME" in answer.stderr


def test_the_record_of_the_reference_model_is_what_a_plan_finds_now() -> None:
    """Its row of README's table: a change of the sample or of a pass makes the record old."""
    (recorded,) = [one for one in results.load() if one.model == "reference"]
    report = make_plan(REFERENCE, "log").report.to_json()
    report["verified"] = {"status": "verified"}
    assert results.Result.from_report(report, model="reference") == recorded
