"""`scripts/bench scaling`: time and peak memory of a search, as layers and corpus tokens grow.

The models are Llamas with random weights, the corpus is log text; each point is a `collapse plan` in a process of its
own. What is searched is said by the passes and the budget, so that it can be run again for other passes.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.export import run_once
from benchmarks.machine import machine
from benchmarks.peers.text import DATA, split_of
from benchmarks.plot import Axis, svg
from benchmarks.results import ROOT
from collapse.budget import parse_budgets
from collapse.canonical import dumps
from collapse.errors import CollapseError
from collapse.options import chosen_passes
from collapse.plan import Record
from collapse.progress import FORWARD

REPORT = ROOT / "reports" / "scaling.json"
VOCABULARY = 4096
SECONDS, MEMORY = Axis("seconds", zero=True), Axis("peak memory, MB", unit=1e6, zero=True)
ACROSS = {"layers": Axis("layers", zero=True), "tokens": Axis("corpus tokens", unit=1e3, suffix="k", zero=True)}


class Point(Record):
    """One search. `search_seconds` are those of passes and the model's forwards, `seconds` of all, imports too.

    `cpu_seconds` are of all, on all cores together: they tell how busy the machine was otherwise.
    """

    layers: int
    tokens: int
    parameters: int
    seconds: float
    cpu_seconds: float
    search_seconds: float
    stages: dict[str, float]
    peak_bytes: int


class Growth(Record):
    """The power of layers or tokens with which a figure grows, by least squares of the logarithms."""

    search_seconds: float
    cpu_seconds: float
    peak_bytes: float


class ScalingReport(Record):
    """Points along layers, with the most tokens, and along tokens, with the layers in the middle."""

    passes: tuple[str, ...]
    budget: str
    threads: int
    hidden: int
    points: tuple[Point, ...]
    by_layers: Growth | None
    by_tokens: Growth | None
    machine: dict[str, str | int]


def grid(layers: Sequence[int], tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Return pairs of layers and tokens: all layers with the most tokens, then the middle ones with fewer."""
    layers, tokens = sorted(set(layers)), sorted(set(tokens))
    return [(one, tokens[-1]) for one in layers] + [(layers[len(layers) // 2], one) for one in tokens[:-1]]


def growth(points: Sequence[Point], along: str) -> Growth | None:
    """Return how figures grow along layers or tokens; None for fewer than two different values."""
    at = np.log([getattr(point, along) for point in points])
    if len(set(at.tolist())) < 2:
        return None
    slopes = {
        name: float(np.polyfit(at, np.log([getattr(point, name) for point in points]), 1)[0])
        for name in Growth.model_fields
    }
    return Growth(**slopes)


def along(points: Sequence[Point], what: str) -> list[Point]:
    """Return the points of a line: of layers those with the most tokens, of tokens those of the commonest depth."""
    if what == "layers":
        return [point for point in points if point.tokens == max(one.tokens for one in points)]
    counts = [point.layers for point in points]
    return [point for point in points if point.layers == max(counts, key=counts.count)]


def search_seconds(stages: dict[str, float]) -> float:
    """Return the seconds of passes and of forwards of the model."""
    return sum(value for name, value in stages.items() if name.startswith("pass ") or name == FORWARD)


def train(text: str) -> Tokenizer:
    """Return a byte-level BPE of the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def write_model(folder: Path, layers: int, hidden: int, tokenizer: Tokenizer) -> int:
    """Write a Llama with random weights and return how many parameters it has."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=3 * hidden, num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 96), vocab_size=VOCABULARY, max_position_embeddings=2048, bos_token_id=0,
        eos_token_id=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return int(model.num_parameters())


def corpus_of(text: str, tokenizer: Tokenizer, tokens: int) -> str:
    """Return as many whole lines of the text as have `tokens` tokens; raises `CollapseError` where it is shorter."""
    count, lines = 0, list[str]()
    for line in text.splitlines(keepends=True):
        if count >= tokens:
            return "".join(lines)
        lines.append(line)
        count += len(tokenizer.encode(line).ids)
    if count < tokens:
        raise CollapseError(f"the corpus has {count} tokens, not {tokens}", where="scaling", fix="give fewer --tokens")
    return text


def children_cpu() -> float:
    """Return the CPU seconds of all processes that this one has waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(options: argparse.Namespace, text: str) -> Iterator[Point]:
    """Yield the points one by one."""
    tokenizer = train(text)
    with tempfile.TemporaryDirectory() as name:
        for layers, tokens in grid(options.layers, options.tokens):
            model, corpus = Path(name, f"llama-{layers}"), Path(name, f"{tokens}.log")
            parameters = write_model(model, layers, options.hidden, tokenizer)
            corpus.write_text(corpus_of(text, tokenizer, tokens), encoding="utf-8")
            passes = [part for one in options.passes for part in ("--pass", one)]
            command = [sys.executable, "-P", "-m", "collapse", "plan", str(model), "--schema", "log", "--quiet"]
            command += ["--corpus", str(corpus), "--budget", options.budget, *passes]
            before = children_cpu()
            run = run_once(command, Path(name, "timings.json"))
            yield Point(
                layers=layers, tokens=tokens, parameters=parameters, seconds=run.seconds, stages=run.stages,
                cpu_seconds=children_cpu() - before,
                search_seconds=search_seconds(run.stages), peak_bytes=run.peak_bytes,
            )  # fmt: skip


def plots(report: ScalingReport) -> Iterator[tuple[str, str]]:
    """Yield name and SVG of each plot: time and memory, along layers and along tokens."""
    for what, axis in ACROSS.items():
        line = along(report.points, what)
        for name, field, up in (("time", "search_seconds", SECONDS), ("memory", "peak_bytes", MEMORY)):
            points = [(float(getattr(point, what)), float(getattr(point, field))) for point in line]
            title = f"{', '.join(report.passes)} at {report.budget}: {name} by {what}"
            yield f"{name}-{what}", svg(title, {"search" if name == "time" else "process": points}, axis, up)


def save(report: ScalingReport, path: Path) -> None:
    """Write the report and its plots."""
    path.write_text(dumps(report.model_dump(mode="json")), encoding="utf-8")
    for name, plot in plots(report):
        path.with_name(f"{path.stem}-{name}.svg").write_text(plot, encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Measure all points; write the record and its plots after each."""
    options = _parser().parse_args(arguments)
    chosen_passes(options.passes)
    parse_budgets(options.budget)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # the searches inherit it
    text = "\n".join(source.text for source in split_of("log", options.data).calibration)
    points: list[Point] = []
    for point in measure(options, text):
        points.append(point)
        print(
            f"{point.layers:3} layers {point.tokens:7} tokens: search {point.search_seconds:8.2f} s, whole "
            f"{point.seconds:8.2f} s, {point.peak_bytes / 1e6:7.0f} MB", flush=True,
        )  # fmt: skip
        grown = {f"by_{what}": growth(along(points, what), what) for what in ACROSS}
        report = ScalingReport(
            passes=tuple(options.passes), budget=options.budget, threads=options.threads, hidden=options.hidden,
            points=tuple(points), machine=machine(), **grown,
        )  # fmt: skip
        save(report, options.report)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench scaling", description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16, 30])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--hidden", type=int, default=384, help="width of the models, a multiple of 96")
    parser.add_argument("--passes", nargs="+", default=["layers"], help="that search")
    parser.add_argument("--budget", default="params=-10%", help="that they search for")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the folder logs")
    parser.add_argument("--report", type=Path, default=REPORT, help="where the record goes; its plots go beside it")
    return parser
