"""Loads a checkpoint as numbers, says what transformers reported of its keys, and runs a job on the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from collapse.checkpoint import Checkpoint
from collapse.errors import CheckpointError
from collapse.memory import release_memory
from collapse.naming import Naming
from collapse.plan import Plan, ShortCircuit
from collapse.progress import Stopwatch
from collapse.rewrite.tensors import erased_names, output_name
from collapse.source_model import Way, load_plain
from collapse.trace import quiet
from collapse.verdict import Check
from collapse.verify.job import Job
from collapse.verify.observe import ModelRunner, Observation, observe
from collapse.verify.weights import fingerprints


@dataclass(frozen=True)
class Loaded:
    """What transformers reported about a checkpoint, and what the model said."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]
    seen: Observation
    digests: Mapping[str, str]
    naming: Naming
    way: Way


def run_source(source: Checkpoint, job: Job, columns: list[int] | None, watch: Stopwatch) -> Loaded:
    """Run the source; raises `CheckpointError` where it cannot be loaded whole, or gives no numbers."""
    found = load_and_run(source.root, job, None if columns is None else torch.tensor(columns), watch)
    if found.missing or found.mismatched:
        name = (*found.missing, *found.mismatched)[0]
        message = f"transformers finds no fitting {name} in the source and would use random numbers"
        raise CheckpointError(message, where=source.label, fix="give a complete checkpoint")
    if any(bool(logits.isnan().any()) for logits in found.seen.full):
        message = "the source itself gives logits that are no numbers (NaN), so nothing can be compared with them"
        raise CheckpointError(message, where=source.label, fix="give a sound checkpoint")
    return found


def load_and_run(
    folder: Path, job: Job, columns: torch.Tensor | None, watch: Stopwatch, *, digests: bool = False
) -> Loaded:
    """Load what is in `folder`, run the job, and let the model go; raises whatever stops that."""
    with quiet():
        loaded = load_plain(Checkpoint.open(folder))
        _align(loaded.model)
        found = fingerprints(loaded.model) if digests else {}
        naming = loaded.naming if digests else Naming()
        seen = observe(ModelRunner(loaded.model, watch), job, columns)
    names = {key: tuple(sorted(str(name) for name in loaded.keys[key])) for key in loaded.keys}
    missing, unexpected, mismatched = (names[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    way = loaded.way
    del loaded
    release_memory()
    return Loaded(missing, unexpected, mismatched, seen, found, naming, way)


def _align(model: PreTrainedModel) -> None:
    """Copy each tensor out of the mapped file: products depend in the last bit on where in memory a matrix starts."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def loading_check(after: Loaded, plan: Plan, inherited: Sequence[str]) -> Check:
    """Unexpected keys are fine only where the plan declares them, or the source has the same."""
    kept = {n for rewrite in plan.of_kind(ShortCircuit) if rewrite.stage != "erase" for n in rewrite.tensors}
    declared = kept | erased_names(plan)[1] | {new for name in inherited for new in (name, output_name(plan, name))}
    strange = [name for name in after.unexpected if name not in declared]
    figures: dict[str, float | int | str] = {
        "missing": len(after.missing),
        "mismatched": len(after.mismatched),
        "unexpected": len(strange),
        "declared": len(after.unexpected) - len(strange),
    }
    problems = [f"missing {name}" for name in after.missing] + [f"unexpected {name}" for name in strange]
    problems += [f"mismatched {name}" for name in after.mismatched]
    detail = f"keys: {', '.join(problems[:5])}" if problems else "every key of the model is in the files, and no other"
    return Check(name="load", passed=not problems, detail=detail, figures=figures)


def not_loaded(error: Exception) -> Check:
    """Return the finding that an output cannot be loaded or run."""
    return Check(name="load", passed=False, detail=f"transformers cannot run the output: {one_line(error)}")


def one_line(error: Exception) -> str:
    """Return the message of an error in at most 300 characters of one line."""
    return " ".join((str(error).strip() or type(error).__name__).split())[:300]
