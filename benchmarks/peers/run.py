"""The grid: {generic, domain} calibration x {in-domain, other domain} evaluation x shares x vocabulary off and on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from transformers import PreTrainedModel

from benchmarks.machine import machine
from benchmarks.peers.calibration import Calibration
from benchmarks.peers.cut import Removal
from benchmarks.peers.evaluate import Reference, evaluate
from benchmarks.peers.methods import METHODS
from benchmarks.peers.record import SOURCE, CalibratedOn, Cell, EvaluatedOn, Report, Settings, load, save
from benchmarks.peers.structure import Structure, parameters, structure_of
from benchmarks.peers.text import DATA, Split, draw, split_of
from benchmarks.peers.vocabulary import Vocabulary, narrow, vocabulary_of
from benchmarks.results import ROOT
from collapse.checkpoint import Checkpoint
from collapse.progress import Stopwatch
from collapse.source_model import load_source
from collapse.sources import resolve
from collapse.tokenizer import TokenizerFile

GENERIC = "text"
Place = tuple[EvaluatedOn, bool]  # on which text, and whether the vocabulary is cut


@dataclass(frozen=True)
class Bench:
    """One model with its texts; `references` are the source on each evaluation text, under each vocabulary."""

    model: PreTrainedModel
    structure: Structure
    vocabulary: Vocabulary | None
    calibrations: dict[CalibratedOn, Calibration]
    references: dict[Place, Reference]

    def cells(self, removal: Removal, share: float, calibrated_on: CalibratedOn, report: Report) -> Iterator[Cell]:
        """Build the smaller model, evaluate it wherever the report has no cell yet, and yield the cells."""
        plain = removal.apply(self.model, self.structure)
        for (evaluated_on, cut), reference in self.references.items():
            if report.has(removal.method, share, calibrated_on, evaluated_on, cut):
                continue
            smaller = narrow(plain, self.vocabulary.kept) if cut and self.vocabulary else plain
            yield Cell(
                method=removal.method, share=share, calibrated_on=calibrated_on, evaluated_on=evaluated_on,
                vocabulary=cut, parameters=parameters(smaller),
                decoder_parameters=self.structure.decoder_parameters(smaller), dropped_blocks=removal.gone,
                scores=evaluate(reference, smaller),
            )  # fmt: skip


def bench_of(
    checkpoint: Checkpoint,
    settings: Settings,
    splits: dict[str, Split],
    evaluations: Sequence[EvaluatedOn],
    *,
    cut: bool,
) -> Bench:
    """Load the model, draw all rows, and cut the vocabulary to the domain's calibration text where asked."""
    structure, domain = structure_of(checkpoint), splits[settings.domain]
    model, _ = load_source(checkpoint, Stopwatch(quiet=True))
    tokenizer = TokenizerFile.read(checkpoint.root).encoder()
    vocabulary = vocabulary_of(checkpoint, settings.domain, domain.calibration) if cut else None

    def calibration(split: Split) -> Calibration:
        tokens = (settings.calibration_tokens, settings.search_tokens)
        ids, search = (draw(split.calibration, tokenizer, count, seed=settings.seed).ids for count in tokens)
        healing = draw(
            split.calibration, tokenizer, settings.healing_tokens, seed=settings.seed + 1, at_lines=False
        ).ids  # what begins at lines alone has few first tokens, and these are what attention rests on
        return Calibration(model, structure, ids, search, healing)

    def reference(place: EvaluatedOn, vocabulary: Vocabulary | None) -> Reference:
        split = domain if place == "in-domain" else splits[settings.other]
        encoder = vocabulary.tokenizer if vocabulary else tokenizer
        rows = draw(split.evaluation, encoder, settings.evaluation_tokens, seed=settings.seed)
        return Reference(model, structure, rows, vocabulary.kept if vocabulary else None)

    vocabularies = (None, vocabulary) if vocabulary else (None,)
    references = {(place, one is not None): reference(place, one) for place in evaluations for one in vocabularies}
    calibrations: dict[CalibratedOn, Calibration] = {
        "domain": calibration(domain),
        "generic": calibration(splits[settings.generic]),
    }
    return Bench(model, structure, vocabulary, calibrations, references)


def wanted(
    bench: Bench, methods: Sequence[str], shares: Sequence[float], calibrated: Sequence[CalibratedOn], report: Report
) -> Iterator[tuple[str, float, CalibratedOn]]:
    """Yield what still lacks a cell."""
    for name in calibrated:
        for method in methods:
            for share in shares:
                if not all(report.has(method, share, name, *place) for place in bench.references):
                    yield method, share, name


def show(cell: Cell) -> str:
    """Return one line about a cell."""
    scores, where = cell.scores, f"{cell.calibrated_on} -> {cell.evaluated_on}" + (" (cut)" if cell.vocabulary else "")
    return (
        f"{cell.method:<10}{cell.share:5.0%}  {where:<32}{cell.parameters / 1e6:9.2f}M  KL {scores.kl:.4f}  "
        f"bits/byte {scores.bits_per_byte:.4f}  flips {scores.flips:.2%}  confident {scores.confident_flips:.2%}"
    )


def main(arguments: Sequence[str]) -> int:
    """Run what is not yet in the report, and write report and plots after every cell."""
    options = _parser().parse_args(arguments)
    checkpoint = resolve(options.model)
    splits = {kind: split_of(kind, options.data) for kind in {options.domain, options.other, GENERIC}}
    settings = Settings(
        model=checkpoint.label, digest=checkpoint.digest, domain=options.domain, other=options.other, generic=GENERIC,
        calibration_tokens=options.tokens, search_tokens=options.search_tokens or options.tokens,
        healing_tokens=options.healing_tokens,
        evaluation_tokens=options.evaluation_tokens or options.tokens, seed=options.seed,
        texts={kind: split.record for kind, split in splits.items()},
    )  # fmt: skip
    path = options.report or ROOT / "reports" / f"peers-{checkpoint.label}.json"
    report = load(path, Report(settings=settings, machine=machine()))
    bench = bench_of(checkpoint, settings, splits, options.evaluations, cut=options.vocabulary)
    shares = [float(share) / 100 for share in options.shares.split(",")]
    todo = [(SOURCE, 0.0, "domain"), *wanted(bench, options.methods, shares, options.calibrations, report)]
    for method, share, name in todo:
        chosen = Removal(SOURCE) if method == SOURCE else METHODS[method](bench.calibrations[name], share)
        for cell in bench.cells(chosen, share, name, report):
            print(show(cell), file=sys.stderr, flush=True)
            report = report.with_cells(cell)
            save(report, path)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench peers", description=__doc__)
    parser.add_argument("model", help="model directory, GGUF file or hub id")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of calibration text")
    parser.add_argument("--evaluation-tokens", type=int, help="as many as --tokens by default")
    parser.add_argument("--search-tokens", type=int, help="what SLEB searches on, as many as --tokens by default")
    parser.add_argument("--healing-tokens", type=int, default=65536, help="what collapse-healed is distilled on")
    parser.add_argument("--shares", default="10,20,30", help="percent of the decoder's parameters")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    for option, texts in (("--calibrations", get_args(CalibratedOn)), ("--evaluations", get_args(EvaluatedOn))):
        parser.add_argument(option, nargs="+", choices=texts, default=texts, help=f"of {', '.join(texts)}")
    parser.add_argument("--domain", choices=("log", "json", "code"), default="log")
    parser.add_argument("--other", choices=("log", "json", "code"), default="code")
    parser.add_argument("--vocabulary", action="store_true", help="also with the vocabulary cut to the domain's")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with logs, json and prose")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="by default reports/peers-MODEL.json")
    return parser
