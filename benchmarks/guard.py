"""`scripts/bench guard OUT`: what the guard of `collapse.load` costs a decode step of the collapsed model in OUT.

Two copies of the model, guarded and not, decode the same tokens step by step in turns, so that whatever else the
machine does falls on both. The check alone is timed on the arguments of such a step.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch

from benchmarks.results import ROOT
from collapse.canonical import dumps
from collapse.errors import CollapseError
from collapse.manifest import load_manifest
from collapse.plan import Plan, Record
from collapse.runtime.decoding import Decoding, in_turns
from collapse.runtime.guard import Guard, check, make_guard
from collapse.runtime.load import load
from collapse.schema import load_schema

REPORT = ROOT / "reports" / "bench-guard.json"
WARM_UP = 8
REPEATS = 200  # of the check, which is far shorter than a step


class Timings(Record):
    """Seconds of each decode step, and of the check alone."""

    guarded: tuple[float, ...]
    unguarded: tuple[float, ...]
    check: tuple[float, ...]


class Summary(Record):
    """Medians in seconds; `check_share` is the check's part of an unguarded step, the figure without noise."""

    model: str
    schema_type: str
    prompt: int
    steps: int
    guarded_step: float
    unguarded_step: float
    step_ratio: float
    check: float
    check_share: float
    machine: dict[str, str | int]


def timed(action: Callable[[], None]) -> float:
    """Return the seconds that `action` takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(guarded: Decoding, unguarded: Decoding, guard: Guard, steps: int) -> Timings:
    """Decode `steps` tokens with each model in turns, after a few for warming up, and time the check."""
    on, off = in_turns((guarded, unguarded), steps, warm_up=WARM_UP)
    arguments = guarded.arguments
    alone = tuple(timed(lambda: check(guard, (), arguments)) for _ in range(REPEATS))
    return Timings(guarded=on, unguarded=off, check=alone)


def summarise(timings: Timings, *, model: str, schema: str, prompt: int) -> Summary:
    """Return the medians and how they relate."""
    on, off, alone = median(timings.guarded), median(timings.unguarded), median(timings.check)
    return Summary(
        model=model,
        schema_type=schema,
        prompt=prompt,
        steps=len(timings.guarded),
        guarded_step=on,
        unguarded_step=off,
        step_ratio=on / off,
        check=alone,
        check_share=alone / off,
        machine={
            "cpus": os.cpu_count() or 0,
            "threads": torch.get_num_threads(),
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "torch": version("torch"),
            "transformers": version("transformers"),
        },
    )


def show(summary: Summary) -> str:
    """Return the summary as text."""
    return "\n".join(
        (
            f"{summary.model}, schema {summary.schema_type}: median of {summary.steps} steps after {summary.prompt}",
            f"  step, guard on   {summary.guarded_step * 1e3:9.3f} ms",
            f"  step, guard off  {summary.unguarded_step * 1e3:9.3f} ms   on / off {summary.step_ratio:.4f}",
            f"  check alone      {summary.check * 1e3:9.3f} ms   {summary.check_share:.3%} of a step",
        )
    )


def fitting(plan: Plan, prompt: int, steps: int) -> None:
    """Raise `CollapseError` where the schema allows no generation of that length."""
    limit, total = load_schema(plan.input_schema).max_tokens, prompt + WARM_UP + steps
    if limit is not None and total > limit:
        raise CollapseError(f"{total} tokens break max_tokens {limit}", where="bench guard", fix="give less --steps")


def main(arguments: Sequence[str]) -> int:
    """Measure, print the summary and write it to `reports/bench-guard.json`."""
    parser = argparse.ArgumentParser(prog="scripts/bench guard", description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path, metavar="OUT", help="what `collapse export` wrote")
    parser.add_argument("--prompt", type=int, default=128, help="tokens in the cache before the first step")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--report", type=Path, default=REPORT, help="where the summary goes as JSON")
    options = parser.parse_args(arguments)
    manifest = load_manifest(options.output)
    fitting(manifest.plan, options.prompt, options.steps)
    with torch.no_grad():
        model = load(options.output)
        guard = make_guard(manifest.plan, model, options.output)
        allowed = sorted(guard.allowed) if guard.allowed is not None else range(guard.rows)
        prompt = torch.tensor([[allowed[number % len(allowed)] for number in range(options.prompt)]])
        unguarded = Decoding(load(options.output, guard="off"), prompt)
        timings = measure(Decoding(model, prompt), unguarded, guard, options.steps)
    schema = str(manifest.plan.input_schema["type"])
    summary = summarise(timings, model=manifest.source.label, schema=schema, prompt=options.prompt)
    print(show(summary))
    options.report.write_text(dumps(summary.model_dump(mode="json")), encoding="utf-8")
    return 0
