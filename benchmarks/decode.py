"""`scripts/bench decode SOURCE MODEL...`: decode speed of finished models against their source, in one run.

Every turn lets each model generate once, in an order that turns around, so that whatever else the machine does falls on
all of them. The time of a token is that between the first and the last new one: no prefill is in it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import CompileConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from benchmarks.finished import Finished, open_all
from benchmarks.greedy import greedy
from benchmarks.machine import machine
from benchmarks.peers.text import DATA, split_of
from benchmarks.results import ROOT
from benchmarks.spread import Spread, spread
from collapse.canonical import dumps
from collapse.errors import CollapseError
from collapse.plan import Record
from collapse.runtime.decoding import Clock
from collapse.trace import quiet

Mode = Literal["eager", "compile"]
Cache = Literal["dynamic", "static"]
MODES: tuple[Mode, ...] = ("eager", "compile")
DTYPES: dict[str, torch.dtype | str] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "checkpoint": "auto"}
CHARACTERS = 64  # of text for each token of a prompt, which is more than any tokenizer needs of logs


class Timing(Record):
    """One model in one mode. Ratios are its seconds a token by the source's, turn by turn.

    `predicted_ratio` is that of the weight bytes that a token reads. `warm_up` is the seconds of a first generation,
    with its compilation.
    """

    name: str
    mode: Mode
    dtype: str
    cache: Cache
    tokens_per_second: Spread
    ratio: Spread
    predicted_ratio: float
    warm_up: float


class Sizes(Record):
    """What one model holds and reads, as collapse counts it, in the dtype of its files."""

    name: str
    parameters: int
    total_bytes: int
    weight_bytes_per_decode_token: int
    kv_bytes_per_token: int


class DecodeReport(Record):
    """All models of one run."""

    source: str
    digest: str
    prompt: int
    new: int
    turns: int
    threads: int
    sizes: tuple[Sizes, ...]
    timings: tuple[Timing, ...]
    machine: dict[str, str | int]


class _Ticks(StoppingCriteria):  # type: ignore[misc]
    """Notes the time of every new token, and ends nothing."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.times = clock, list[float]()

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.times.append(self.clock())
        return torch.zeros(len(input_ids), dtype=torch.bool)


@dataclass
class Generator:
    """One loaded model that generates `new` tokens after a prompt, [1, tokens], under plain transformers."""

    finished: Finished
    model: PreTrainedModel
    mode: Mode
    ids: torch.Tensor
    new: int
    clock: Clock = time.perf_counter
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode == "compile" and self.cache == "static":
            config = CompileConfig(mode="default")
            config._compile_all_devices = True  # without it transformers compiles for accelerators only
            self.options = {"cache_implementation": "static", "compile_config": config}
        elif self.mode == "compile":
            self.model.forward = torch.compile(self.model.forward, dynamic=True)

    @property
    def cache(self) -> Cache:
        """The cache that it decodes with: a static one where it compiles and transformers says that it can."""
        return "static" if self.mode == "compile" and self.model._can_compile_fullgraph else "dynamic"

    @torch.no_grad()
    def seconds(self) -> float:
        """Generate once, and return the mean seconds of a token after the first."""
        ticks = _Ticks(self.clock)
        with greedy(self.model, self.new, **self.options), quiet():
            mask = torch.ones_like(self.ids)
            self.model.generate(
                input_ids=self.ids, attention_mask=mask, stopping_criteria=StoppingCriteriaList([ticks])
            )
        return (ticks.times[-1] - ticks.times[0]) / (len(ticks.times) - 1)


def take_turns(generators: Sequence[Generator], turns: int, done: Callable[[int], None]) -> list[list[float]]:
    """Return the seconds of a token of each model, [models][turns]."""
    rounds = []
    for number in range(turns):
        order = range(len(generators)) if number % 2 == 0 else reversed(range(len(generators)))
        taken = {place: generators[place].seconds() for place in order}
        rounds.append([taken[place] for place in range(len(generators))])
        done(number + 1)
    return [list(times) for times in zip(*rounds, strict=True)]


def summarise(generators: Sequence[Generator], times: Sequence[Sequence[float]], warm: Sequence[float]) -> list[Timing]:
    """Return what was measured; the first model is the source."""
    read = [one.finished.figures.weight_bytes_per_decode_token for one in generators]
    return [
        Timing(
            name=one.finished.name, mode=one.mode, dtype=str(one.model.dtype).removeprefix("torch."), cache=one.cache,
            tokens_per_second=spread([1 / seconds for seconds in own]),
            ratio=spread([after / before for before, after in zip(times[0], own, strict=True)]),
            predicted_ratio=size / read[0], warm_up=first,
        )
        for one, own, size, first in zip(generators, times, read, warm, strict=True)
    ]  # fmt: skip


def measure(
    models: Sequence[Finished], mode: Mode, dtype: str, text: str, options: argparse.Namespace
) -> Iterator[Timing]:
    """Load all models, warm them up, and let them take turns."""
    torch.compiler.reset()
    generators = [
        Generator(one, one.load(DTYPES[dtype]), mode, prompt_of(one, text, options.prompt), options.new)
        for one in models
    ]
    warm = []
    for one in generators:
        start = time.perf_counter()
        one.seconds()
        warm.append(time.perf_counter() - start)

    def done(number: int) -> None:
        print(f"\r{mode}, {dtype}: turn {number} of {options.turns}", end="", file=sys.stderr, flush=True)

    times = take_turns(generators, options.turns, done)
    print(file=sys.stderr)
    yield from summarise(generators, times, warm)


def prompt_of(model: Finished, text: str, length: int) -> torch.Tensor:
    """Return the first `length` tokens of a text, [1, length]; raises `CollapseError` where it has fewer."""
    ids = model.tokenizer.encode(text[: CHARACTERS * length]).ids[:length]
    if len(ids) < length:
        raise CollapseError(f"the text has less than {length} tokens", where=model.name, fix="give a smaller --prompt")
    return torch.tensor([ids])


def sizes_of(model: Finished) -> Sizes:
    """Return the sizes of a model."""
    figures = model.figures
    return Sizes(
        name=model.name, parameters=figures.params, total_bytes=figures.bytes,
        weight_bytes_per_decode_token=figures.weight_bytes_per_decode_token,
        kv_bytes_per_token=figures.kv_bytes_per_token,
    )  # fmt: skip


def show(timing: Timing) -> str:
    """Return one line about a timing."""
    how = f"{timing.mode}, {timing.dtype}, {timing.cache} cache"
    return (
        f"{timing.name:<20}{how:<34}tokens/s {timing.tokens_per_second}  time ratio {timing.ratio}, predicted "
        f"{timing.predicted_ratio:.3f}"
    )


def main(arguments: Sequence[str]) -> int:
    """Measure, print a line for each model and mode, and write `reports/decode-MODEL.json`."""
    options = _parser().parse_args(arguments)
    if min(options.prompt, options.turns) < 1 or options.new < 2:
        raise CollapseError("there is nothing to measure", where="decode", fix="give larger numbers")
    models = open_all(options.source, options.models)
    sizes = tuple(sizes_of(one) for one in models)
    text = split_of("log", options.data).evaluation[0].text
    found: list[Timing] = []
    for dtype in options.dtypes:
        for mode in options.modes:
            found += measure(models, mode, dtype, text, options)
            print("\n".join(show(one) for one in found[-len(models) :]), flush=True)
    checkpoint = models[0].checkpoint
    report = DecodeReport(
        source=checkpoint.label, digest=checkpoint.digest, prompt=options.prompt, new=options.new, turns=options.turns,
        threads=torch.get_num_threads(), sizes=sizes, timings=tuple(found), machine=machine(),
    )  # fmt: skip
    path = options.report or ROOT / "reports" / f"decode-{checkpoint.label}.json"
    path.write_text(dumps(report.model_dump(mode="json")), encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench decode", description=__doc__.partition("\n")[0])
    parser.add_argument("source", help="model directory, GGUF file or hub id")
    parser.add_argument("models", nargs="*", metavar="[NAME=]DIR", help="what was made of it")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt, from held-out logs")
    parser.add_argument("--new", type=int, default=128, help="tokens of a generation")
    parser.add_argument("--turns", type=int, default=7, help="generations of each model that are counted")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the folder logs")
    parser.add_argument("--report", type=Path, help="by default reports/decode-MODEL.json")
    return parser
