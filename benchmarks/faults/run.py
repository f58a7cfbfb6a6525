"""Plants every fault in every tiny model and counts what the verifier says of it."""

from __future__ import annotations

import gc
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.faults.channel_faults import CHANNEL_FAULTS, CHANNEL_REMOVALS
from benchmarks.faults.computed_faults import COMPUTED_FAULTS, COMPUTED_WEIGHTS
from benchmarks.faults.planted import Judged, Outcome, Planted, accept, judge
from benchmarks.faults.removals import REMOVALS
from benchmarks.faults.subjects import CONFIGS, Subject, make_subject
from benchmarks.faults.wrong_outputs import WRONG_OUTPUTS
from benchmarks.faults.wrong_plans import WRONG_PLANS, Make

FAULTS: Mapping[str, Make] = {**WRONG_PLANS, **CHANNEL_FAULTS, **WRONG_OUTPUTS, **COMPUTED_FAULTS}
TRUE: Mapping[str, Make] = {**REMOVALS, **CHANNEL_REMOVALS, **COMPUTED_WEIGHTS}


@dataclass(frozen=True)
class Row:
    """One case: the model, the kind, the seed that draws it again, its number among those, and what became of it."""

    model: str
    kind: str
    seed: int
    number: int
    outcome: Outcome
    said: str


def rows(
    models: Sequence[str], seed: int, faults: Mapping[str, Make] = FAULTS, removals: Mapping[str, Make] = TRUE
) -> Iterator[Row]:
    """Yield the outcome of every case of `models`; the same seed draws the same cases."""
    torch.set_num_threads(1)
    for model in models:
        with tempfile.TemporaryDirectory(prefix="collapse-faults-") as name:
            subject = make_subject(model, Path(name) / "source", seed)
            gc.freeze()  # the verifier collects garbage between models, and a trace is a million objects
            yield from _cases(subject, seed, faults, judge)
            yield from _cases(subject, seed, removals, accept)


def _cases(
    subject: Subject, seed: int, kinds: Mapping[str, Make], decide: Callable[[Planted, Path], Judged]
) -> Iterator[Row]:
    for kind, make in kinds.items():
        for number, planted in enumerate(make(subject, random.Random(f"{subject.kind} {kind} {seed}"))):
            with tempfile.TemporaryDirectory(prefix="collapse-fault-") as folder:
                judged = decide(planted, Path(folder))
            yield Row(subject.kind, kind, seed, number, judged.outcome, judged.said)


__all__ = ["CONFIGS", "FAULTS", "TRUE", "Row", "rows"]
