"""Source and outputs complete the same records of JSON files that nothing was calibrated on."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.finished import Finished, open_all
from benchmarks.json.complete import Outcome, complete
from benchmarks.json.prompts import Prompt, prompts
from benchmarks.json.record import ALPHA, Entry, JsonReport, Shares, judge, marks
from benchmarks.losses import Comparison, Totals, totals
from benchmarks.machine import machine
from benchmarks.peers.text import DATA, split_of
from benchmarks.results import ROOT
from collapse.canonical import dumps


@dataclass(frozen=True)
class Task:
    """The prompts, and how many tokens a model may write."""

    prompts: Sequence[Prompt]
    new: int
    alpha: float

    def outcomes(self, model: Finished) -> list[Outcome]:
        """Let one model complete all prompts, in their order; says on standard error how far it is."""
        found: dict[int, Outcome] = {}
        texts = [one.prompt for one in self.prompts]
        for number, outcome in complete(model.load(), model.tokenizer, texts, self.new):
            found[number] = outcome
            print(f"\r{model.name}: {len(found)} of {len(texts)}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        return [found[number] for number in range(len(texts))]

    def losses(self, source: Finished, model: Finished) -> Totals:
        """Compare one model with the source on the whole records."""
        pair = Comparison((source, source.load()), ((model, model.load()),))
        return totals([loss for (loss,) in pair.losses([one.record for one in self.prompts])])


def entries(task: Task, models: Sequence[Finished]) -> tuple[Entry, ...]:
    """Return what each model did; the first one is the source."""
    source, *others = models
    before = task.outcomes(source)
    found = [_entry(source, before)]
    for model in others:
        after = task.outcomes(model)
        judged = {"losses": task.losses(source, model), "judgement": judge(before, after, task.alpha)}
        found.append(_entry(model, after).model_copy(update=judged))
    return tuple(found)


def _entry(model: Finished, outcomes: Sequence[Outcome]) -> Entry:
    seen = {what: marks(outcomes, what) for what in ("matched", "balanced")}
    sizes = {"parameters": model.figures.params, "bytes": model.figures.bytes}
    return Entry(name=model.name, **sizes, shares=Shares.of(outcomes), **seen)


def show(entry: Entry) -> str:
    """Return one line about a model."""
    shares = entry.shares
    line = (
        f"{entry.name:<20}{entry.parameters / 1e6:9.2f}M  grammar {shares.grammar:6.1%}  matched "
        f"{shares.matched:6.1%}  balanced {shares.balanced:6.1%}  parses {shares.parses:6.1%}"
    )
    if entry.losses is None or entry.judgement is None:
        return line
    tests = (("matched", entry.judgement.matched), ("balanced", entry.judgement.balanced))
    rule = "; ".join(f"{name}: lost {one.lost}, gained {one.gained}, p {one.p_value:.3g}" for name, one in tests)
    return f"{line}  KL {entry.losses.kl:.4f}  {entry.judgement.verdict} ({rule})"


def main(arguments: Sequence[str]) -> int:
    """Run all models, print a line for each, and write `reports/json-MODEL.json`."""
    options = _parser().parse_args(arguments)
    models = open_all(options.source, options.models)
    checkpoint = models[0].checkpoint
    split = split_of("json", options.data)
    chosen = prompts(split.evaluation, models[0].tokenizer, options.count, lengths=options.prompt, new=options.new)
    found = entries(Task(chosen, options.new, options.alpha), models)
    print("\n".join(map(show, found)))
    report = JsonReport(
        source=checkpoint.label, digest=checkpoint.digest, prompts=len(chosen), prompt_tokens=tuple(options.prompt),
        new_tokens=options.new, prompts_by_source=dict(Counter(one.source for one in chosen)), text=split.record,
        entries=found, machine=machine(),
    )  # fmt: skip
    path = options.report or ROOT / "reports" / f"json-{checkpoint.label}.json"
    path.write_text(dumps(report.model_dump(mode="json")), encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench json", description=__doc__)
    parser.add_argument("source", help="model directory, GGUF file or hub id")
    parser.add_argument("models", nargs="*", metavar="[NAME=]DIR", help="what was made of it")
    parser.add_argument("--count", type=int, default=200, help="continuations of each model")
    parser.add_argument(
        "--prompt", type=int, nargs="+", default=[32, 64, 96, 128], help="tokens of a prompt, by the source's tokenizer"
    )
    parser.add_argument("--new", type=int, default=256, help="tokens that a model may write")
    parser.add_argument("--alpha", type=float, default=ALPHA, help="of the test by which a model breaks brackets")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the folder json")
    parser.add_argument("--report", type=Path, help="by default reports/json-MODEL.json")
    return parser
