"""`scripts/bench last-token MODEL`: a prefill as a graph, with logits of all positions and of the last one alone.

Both graphs run in one process on the same weights, by turns, and the medians are compared. A third graph, with a slice
before the head and nowhere else, is what plain `generate` computes: the pass saves what lies between it and the second.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks.machine import machine
from benchmarks.results import ROOT
from collapse.analysis.flops import cost
from collapse.analysis.row_rules import END
from collapse.canonical import dumps
from collapse.plan import Record
from collapse.program import Program
from collapse.progress import Stopwatch
from collapse.rewrite.copying import copy_graph
from collapse.rewrite.last_token import last_token
from collapse.source_model import source_weights
from collapse.sources import resolve
from collapse.trace import load_config, trace

REPORT = ROOT / "reports" / "bench-last-token.json"
ALL, HEAD, LAST = "all positions", "head of the last position", "last-token"


class Summary(Record):
    """Medians over runs, in seconds by graph. FLOPs are of matrix work, executed, the head counted once.

    `max_abs_diff` is that of the last logits from those of the graph with a slice before the head; the other one is
    from those of the graph of all positions, whose head is a product of many rows and rounds otherwise.
    """

    model: str
    prompt: int
    runs: int
    seconds: dict[str, float]
    prefill_flops_before: int
    prefill_flops_after: int
    max_abs_diff: float
    max_abs_diff_all_positions: float
    argmax_equal: bool
    threads: int
    machine: dict[str, str | int]


def head_only(program: Program) -> Program:
    """Return the program with a slice of the last position before the operator that gives the logits."""
    graph = copy_graph(program.graph)
    logits = next(node for node in graph.graph.nodes if node.op == "output").args[0][0]
    with graph.graph.inserting_before(logits):
        row = graph.graph.call_function(torch.ops.aten.slice.Tensor, (logits.args[0], 1, -1, END))
    logits.args = (row, *logits.args[1:])
    graph.recompile()
    return program.with_graph(graph)


def measure(
    programs: Mapping[str, Program], weights: Mapping[str, torch.Tensor], ids: torch.Tensor, runs: int
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return the median seconds of a prefill by graph, and the last logits; each runs once to warm up."""
    mask = torch.ones_like(ids)
    last = {name: program.run(weights, ids, mask)[0][:, -1] for name, program in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(runs):
        for name, program in programs.items():
            start = time.perf_counter()
            program.run(weights, ids, mask)
            seconds[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in seconds.items()}, last


def summarise(model: str, prompt: int, runs: int) -> Summary:
    """Trace `model`, run the graphs on random token ids, and count their FLOPs."""
    source = resolve(model)
    config = load_config(source)
    whole = trace(config)
    programs = {ALL: whole, HEAD: head_only(whole), LAST: last_token(whole)}
    weights = source_weights(source, Stopwatch(quiet=True))
    ids = torch.randint(0, config.get_text_config().vocab_size, (1, prompt), generator=torch.Generator().manual_seed(0))
    seconds, last = measure(programs, weights, ids, runs)
    before, after = (cost(programs[name], prompt=prompt, element_bytes=4).prefill_flops for name in (ALL, LAST))
    return Summary(
        model=source.label, prompt=prompt, runs=runs, seconds=seconds, prefill_flops_before=before,
        prefill_flops_after=after, max_abs_diff=float((last[HEAD] - last[LAST]).abs().max()),
        max_abs_diff_all_positions=float((last[ALL] - last[LAST]).abs().max()),
        argmax_equal=bool((last[ALL].argmax(-1) == last[LAST].argmax(-1)).all()), threads=torch.get_num_threads(),
        machine=machine(),
    )  # fmt: skip


def show(summary: Summary) -> str:
    """Return the summary as text."""
    lines = [f"{summary.model}, a prefill of {summary.prompt} tokens: median of {summary.runs} runs"]
    lines += [f"  {name:<28}{seconds:8.3f} s" for name, seconds in summary.seconds.items()]
    saved = summary.prefill_flops_before - summary.prefill_flops_after
    share = saved / summary.prefill_flops_before
    lines.append(f"FLOPs with the head counted once: {saved:,} of {summary.prefill_flops_before:,} saved ({share:.2%})")
    differences = f"{summary.max_abs_diff:.3g}, {summary.max_abs_diff_all_positions:.3g} from those of all positions"
    lines.append(f"largest difference of the last logits: {differences}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run the measurement, print the summary and write it to `reports/bench-last-token.json`."""
    parser = argparse.ArgumentParser(prog="scripts/bench last-token", description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="model directory, GGUF file or hub id")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--report", type=Path, default=REPORT, help="where the summary goes as JSON")
    options = parser.parse_args(arguments)
    summary = summarise(options.model, max(1, options.prompt), max(1, options.runs))
    print(show(summary))
    options.report.write_text(dumps(summary.model_dump(mode="json")), encoding="utf-8")
    return 0
