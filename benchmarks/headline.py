"""`scripts/bench headline SOURCE MODEL...`: regret and its certified bound against size, on held-out log systems.

Sequences are drawn independently: a system, and a line of it where the sequence starts. Which of the models meets the
budgets is found by testing them from the largest to the smallest, an order that the text has no part in (learn then
test). The bounds in the curve hold for all models together, metric by metric (Bonferroni).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from benchmarks.decode import Sizes, sizes_of
from benchmarks.finished import Finished, open_all
from benchmarks.losses import Comparison, Totals, start_of, totals
from benchmarks.machine import machine
from benchmarks.peers.text import DATA, SPAN, Source, split_of
from benchmarks.plot import Axis, svg
from benchmarks.results import ROOT
from collapse.budget import Budget, format_budgets, parse_budgets
from collapse.canonical import digest, dumps
from collapse.certify.certificate import Bound, Certificate, certify, learn_then_test
from collapse.certify.losses import SequenceLoss
from collapse.certify.metrics import Design
from collapse.errors import CollapseError
from collapse.plan import Record

BUDGETS = "regret<=1%,confident-flips<=1%"
MEGABYTES = Axis("weights, MB", unit=1e6)
PERCENT = Axis("regret, % of the source's loss", unit=0.01, suffix=" %", zero=True)
NATS = Axis("KL, nats a token", log=True)


class Point(Record):
    """One model: its sizes, what it loses, and what it loses at most.

    `certified` says whether it met the budgets as one of a fixed sequence of tests; None where a larger model had
    failed before, so that it was not tested.
    """

    sizes: Sizes
    losses: Totals
    bounds: Certificate
    certified: bool | None


class Headline(Record):
    """The curve, from the largest model to the smallest; `smallest_certified` is the name of the last that is."""

    source: Sizes
    digest: str
    budgets: str
    delta: float
    sequences: int
    length: int
    seed: int
    text: dict[str, Any]
    points: tuple[Point, ...]
    smallest_certified: str | None
    machine: dict[str, str | int]


def draw(sources: Sequence[Source], tokenizers: Sequence[Tokenizer], count: int, length: int, seed: int) -> list[str]:
    """Return texts that begin at a line of a source, both drawn anew for each, and fit into `length` tokens of all."""
    random = Random(f"headline {seed}")
    starts = [_starts(source.text) for source in sources]
    found = []
    for _ in range(count):
        place = random.randrange(len(sources))
        start = random.choice(starts[place])
        found.append(fitting(sources[place].text[start : start + SPAN], tokenizers, length))
    return found


def _starts(text: str) -> list[int]:
    """Return where lines with something on them begin."""
    starts, place = [], 0
    for line in text.splitlines(keepends=True):
        if line.strip():
            starts.append(place)
        place += len(line)
    return starts


def fitting(text: str, tokenizers: Sequence[Tokenizer], length: int) -> str:
    """Return the beginning of a text that has at most `length` tokens for every tokenizer."""
    before = None
    while before != text:
        before = text
        for tokenizer in tokenizers:
            text = start_of(text, tokenizer, length)
    return text


def points_of(
    models: Sequence[Finished], losses: Sequence[Sequence[SequenceLoss]], budgets: Sequence[Budget], design: Design
) -> tuple[Point, ...]:
    """Return the points of models that are ordered from the largest to the smallest."""
    tested = [one.met for one in learn_then_test(losses, budgets, design)]
    verdicts: list[bool | None] = [*tested, *[None] * (len(models) - len(tested))]
    return tuple(
        Point(
            sizes=sizes_of(model), losses=totals(own), certified=verdict,
            bounds=certify(own, budgets, design, tries=len(models)),
        )
        for model, own, verdict in zip(models, losses, verdicts, strict=True)
    )  # fmt: skip


def plots(headline: Headline) -> dict[str, str]:
    """Return the curves as SVG by name: regret with its bound, and KL.

    A bound on capped losses, of which some were beyond the cap, is none on the loss, and is left out.
    """
    regret: dict[str, list[tuple[float, float]]] = {"measured": [(headline.source.total_bytes, 0.0)]}
    kl: dict[str, list[tuple[float, float]]] = {"measured": []}
    for point in headline.points:
        size = point.sizes.total_bytes
        regret["measured"].append((size, point.losses.regret))
        kl["measured"].append((size, point.losses.kl))
        for bound in point.bounds.bounds:
            if bound.metric in {"regret", "kl"} and bound.at_most is not None:
                lines = regret if bound.metric == "regret" else kl
                lines.setdefault(f"at most ({1 - headline.delta:.0%})", []).append((size, bound.at_most))
    title = f"{headline.source.name} on held-out log systems"
    return {"regret": svg(title, regret, MEGABYTES, PERCENT), "kl": svg(title, kl, MEGABYTES, NATS)}


def show(point: Point) -> str:
    """Return one line about a model."""
    sizes, losses = point.sizes, point.losses
    bounds = ", ".join(map(_said, point.bounds.bounds))
    words = {True: "certified", False: "not certified", None: "not tested"}
    return (
        f"{sizes.name:<20}{sizes.total_bytes / 1e6:9.1f}MB  regret {losses.regret:+.2%}  KL {losses.kl:.4f}  flips "
        f"{losses.flips:.2%}  confident {losses.confident_flips:.2%}  [{bounds}]  {words[point.certified]}"
    )


def _said(bound: Bound) -> str:
    if bound.clipped:
        return f"{bound.metric} has no bound: {bound.clipped} texts lost more than the cap"
    return f"{bound.metric} <= {'unknown' if bound.upper is None else f'{bound.upper:.2%}'}"


def compare(models: Sequence[Finished], texts: Sequence[str]) -> list[list[SequenceLoss]]:
    """Return what each model but the first, the source, loses on each text; says how far it is on standard error."""
    source, *others = ((one, one.load()) for one in models)
    found: list[list[SequenceLoss]] = [[] for _ in others]
    for number, row in enumerate(Comparison(source, tuple(others)).losses(texts), 1):
        for own, loss in zip(found, row, strict=True):
            own.append(loss)
        print(f"\rsequence {number} of {len(texts)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def main(arguments: Sequence[str]) -> int:
    """Evaluate all models, print a line for each, and write `reports/headline-MODEL.json` and its plots."""
    options = _parser().parse_args(arguments)
    budgets = parse_budgets(options.budget)
    source, *others = open_all(options.source, options.models)
    others.sort(key=lambda one: (-one.figures.bytes, one.name))
    if not others:
        raise CollapseError("there is no model but the source", where="headline", fix="give outputs of exports")
    models = (source, *others)
    split = split_of("log", options.data)
    texts = draw(split.evaluation, [one.tokenizer for one in models], options.sequences, options.length, options.seed)
    design = Design(split=digest(texts), length=options.length, delta=options.delta)
    points = points_of(others, compare(models, texts), budgets, design)
    checkpoint = source.checkpoint
    certified = [point.sizes.name for point in points if point.certified]
    headline = Headline(
        source=sizes_of(source).model_copy(update={"name": checkpoint.label}), digest=checkpoint.digest,
        budgets=format_budgets(budgets), delta=options.delta, sequences=len(texts), length=options.length,
        seed=options.seed, text=split.record, points=points, machine=machine(),
        smallest_certified=certified[-1] if certified else None,
    )  # fmt: skip
    print("\n".join(map(show, points)))
    path = options.report or ROOT / "reports" / f"headline-{checkpoint.label}.json"
    path.write_text(dumps(headline.model_dump(mode="json")), encoding="utf-8")
    for name, plot in plots(headline).items():
        path.with_name(f"{path.stem}-{name}.svg").write_text(plot, encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench headline", description=__doc__.partition("\n")[0])
    parser.add_argument("source", help="model directory, GGUF file or hub id")
    parser.add_argument("models", nargs="+", metavar="[NAME=]DIR", help="what was made of it, at several budgets")
    parser.add_argument("--sequences", type=int, default=512, help="texts that are drawn")
    parser.add_argument("--length", type=int, default=128, help="tokens of a text at most")
    parser.add_argument(
        "--budget", default=BUDGETS, help=f"losses to be certified, by default {BUDGETS}".replace("%", "%%")
    )
    parser.add_argument("--delta", type=float, default=0.05, help="probability with which a bound may be wrong")
    parser.add_argument("--seed", type=int, default=0, help="of the texts")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the folder logs")
    parser.add_argument("--report", type=Path, help="by default reports/headline-MODEL.json")
    return parser
