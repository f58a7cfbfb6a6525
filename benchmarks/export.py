"""`scripts/bench export MODEL`: stage times and peak memory of whole exports, as medians over several runs.

Each run is a process of its own. The pipeline writes its stages to the file that `COLLAPSE_TIMINGS` names, as
`{stage: seconds}`; stages do not overlap. What is left of the wall time is start-up: imports, mostly.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.machine import machine
from benchmarks.memory import PeakMemory
from benchmarks.results import ROOT
from collapse.canonical import dumps
from collapse.errors import CollapseError
from collapse.plan import Record
from collapse.sources import resolve

REPORT = ROOT / "reports" / "bench-export.json"
FP32_BYTES = 4
STARTUP = "start-up"
MODEL_STAGES = ("forward", "trace")  # the last part of a stage's name when the model or the tracer itself runs


class Run(Record):
    """One run: wall time and stages in seconds, peak resident memory in bytes."""

    seconds: float
    stages: dict[str, float]
    peak_bytes: int


class Summary(Record):
    """Medians over runs. `own_share` is the part of the time outside the model's forward passes and the tracer."""

    model: str
    schema_type: str
    runs: int
    seconds: float
    stages: dict[str, float]
    own_share: float
    peak_bytes: int
    fp32_weight_bytes: int
    peak_over_fp32_weights: float
    machine: dict[str, str | int]


def run_once(command: Sequence[str], timings: Path) -> Run:
    """Run one command to its end; raises `CollapseError` when it fails or writes no timings."""
    timings.unlink(missing_ok=True)
    start = time.perf_counter()
    child = subprocess.Popen(command, env={**os.environ, "COLLAPSE_TIMINGS": str(timings)}, stdout=subprocess.DEVNULL)
    try:
        with PeakMemory(child.pid) as memory:
            status = child.wait()
    finally:
        child.kill()
    seconds = time.perf_counter() - start
    if status != 0:
        raise CollapseError(f"the run ended with status {status}", where=command[-1], fix="run it by hand")
    if not timings.is_file():
        raise CollapseError("the run wrote no timings", where="COLLAPSE_TIMINGS")
    stages = {str(name): float(value) for name, value in json.loads(timings.read_bytes()).items()}
    return Run(seconds=seconds, stages=stages, peak_bytes=memory.peak)


def median_stages(runs: Sequence[Run]) -> dict[str, float]:
    """Return the median of each stage, in the order of the first run, and of what no stage accounts for."""
    names = list(dict.fromkeys(name for run in runs for name in run.stages))
    stages = {name: median(run.stages.get(name, 0.0) for run in runs) for name in names}
    return {**stages, STARTUP: median(run.seconds - sum(run.stages.values()) for run in runs)}


def own_share(stages: Mapping[str, float]) -> float:
    """Return the share of the time that is neither a forward pass of the model nor the tracer."""
    theirs = sum(value for name, value in stages.items() if name.rpartition(".")[2] in MODEL_STAGES)
    return 1 - theirs / sum(stages.values())


def summarise(runs: Sequence[Run], *, model: str, schema: str, fp32: int) -> Summary:
    """Return the medians; `fp32` is the size of the weights in bytes when each takes four."""
    stages = median_stages(runs)
    peak = int(median(run.peak_bytes for run in runs))
    return Summary(
        model=model,
        schema_type=schema,
        runs=len(runs),
        seconds=median(run.seconds for run in runs),
        stages=stages,
        own_share=own_share(stages),
        peak_bytes=peak,
        fp32_weight_bytes=fp32,
        peak_over_fp32_weights=peak / fp32,
        machine=machine(),
    )


def show(summary: Summary) -> str:
    """Return the summary as text, stages in the order in which they ran."""
    total = sum(summary.stages.values())
    lines = [f"{summary.model}, schema {summary.schema_type}: median of {summary.runs} runs"]
    lines += [f"  {name:<28}{value:8.2f} s {value / total:6.1%}" for name, value in summary.stages.items()]
    lines.append(f"  {'whole':<28}{summary.seconds:8.2f} s")
    lines.append(f"outside forward passes and tracer: {summary.own_share:.1%}")
    ratio = f"{summary.peak_over_fp32_weights:.2f} times the weights in fp32 ({summary.fp32_weight_bytes / 1e6:.0f} MB)"
    lines.append(f"peak memory: {summary.peak_bytes / 1e6:.0f} MB, {ratio}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run the exports, print the summary and write it to `reports/bench-export.json`."""
    parser = argparse.ArgumentParser(prog="scripts/bench export", description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="model directory, GGUF file or hub id")
    parser.add_argument("--schema", default="log")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--report", type=Path, default=REPORT, help="where the summary goes as JSON")
    options, more = parser.parse_known_args(arguments)
    source = resolve(options.model)  # a GGUF file is converted here, outside the measurement
    fp32 = FP32_BYTES * sum(info.numel for info in source.tensors.values())
    with tempfile.TemporaryDirectory() as folder:
        timings, output = Path(folder, "timings.json"), Path(folder, "output")
        command = [sys.executable, "-P", "-m", "collapse", "export", options.model, "--schema", options.schema]
        command += ["--output", str(output), "--force", *more]
        runs = [run_once(command, timings) for _ in range(max(1, options.runs))]
    summary = summarise(runs, model=source.label, schema=options.schema, fp32=fp32)
    print(show(summary))
    options.report.write_text(dumps(summary.model_dump(mode="json")), encoding="utf-8")
    return 0
