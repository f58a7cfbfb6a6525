"""What a planted fault is, and how it is exported and judged."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoConfig

from benchmarks.faults.subjects import LONGEST, Subject, contract
from collapse.auto import auto_class
from collapse.erase import write_checkpoint
from collapse.errors import CollapseError
from collapse.manifest import write_manifest
from collapse.plan import Plan
from collapse.program import Program
from collapse.rewrite.graph import rewrite_program, rewrite_weights
from collapse.rewrite.tensors import token_narrow
from collapse.rewrite.values import Values
from collapse.sequences import sequences
from collapse.trace import quiet
from collapse.verdict import Verdict
from collapse.verify import Settings, verify, with_blame
from collapse.verify.computed import exact_graph
from collapse.verify.dynamic import Rewritten, dynamic_checks
from collapse.verify.samples import inside

Outcome = Literal["refuted", "unnamed", "missed", "equivalent", "verified", "false alarm"]
SMALL = Settings(prompts=2, new_tokens=3, cached=2, decode=2, padded=3)
PROBES = 24  # in-schema sequences, of other seeds than the verifier's, that decide whether a fault is one
REAL = 1e-4  # a smaller difference of logits, relative to the largest logit, is no fault but arithmetic


@dataclass(frozen=True)
class Planted:
    """One wrong plan, or a right plan with a wrong writer or graph interpreter; or a right one, to be accepted.

    `site` must be in the verdict. `tamper` edits the files before the manifest is made. `spoil` edits the graph.
    `seen` says whether the logits can tell; of what they cannot, such as a token id in a config, the files must.
    `values` has the data of tensors that the plan replaces.
    """

    subject: Subject
    plan: Plan
    site: str
    tamper: Callable[[Path], None] | None = None
    spoil: Callable[[Program], Program] | None = None
    seen: bool = True
    values: Values | None = None


@dataclass(frozen=True)
class Judged:
    """What became of one planted case, and which check or finding said so."""

    outcome: Outcome
    said: str


def judge(planted: Planted, folder: Path) -> Judged:
    """Export a wrong case through the real writer and verify it."""
    out = folder / "out"
    try:
        _export(planted, out)
        rewritten = _graph(planted)
    except CollapseError as error:
        named = planted.site in str(error)
        return Judged("refuted" if named else "unnamed", f"refused: {error}")
    if planted.seen and not _differs(planted, out, rewritten):
        return Judged("equivalent", "no in-schema input can tell")
    verdict = _verdict(planted, out, rewritten)
    if verdict.status != "refuted":
        return Judged("missed", verdict.status)
    said = [f"{check.name}: {check.detail}" for check in verdict.failures]
    said += [f"{found.site} ({found.pass_name}): {found.reason}" for found in verdict.blamed]
    naming = next((line for line in reversed(said) if planted.site in line), None)
    return Judged("refuted", naming) if naming else Judged("unnamed", " | ".join(said)[:600])


def accept(planted: Planted, folder: Path) -> Judged:
    """Export a right case and verify it; anything but `verified` is a false alarm."""
    out = folder / "out"
    try:
        _export(planted, out)
        verdict = _verdict(planted, out, _graph(planted))
    except CollapseError as error:
        return Judged("false alarm", f"refused: {error}")
    said = "; ".join(f"{check.name}: {check.detail}" for check in verdict.checks if not check.passed)
    return Judged("verified" if verdict.status == "verified" else "false alarm", said[:600])


def _export(planted: Planted, out: Path) -> None:
    out.mkdir(parents=True)
    write_checkpoint(planted.subject.checkpoint, planted.plan, out, values=planted.values)
    if planted.tamper is not None:
        planted.tamper(out)
    write_manifest(out, planted.subject.checkpoint, planted.plan)


def _graph(planted: Planted) -> Rewritten:
    subject = planted.subject
    rewritten = rewrite_program(subject.program, planted.plan, subject.checkpoint.config)
    if planted.spoil is not None:
        rewritten = planted.spoil(rewritten)
    weights = rewrite_weights(subject.program, subject.weights, planted.plan, values=planted.values)
    exact = exact_graph(subject.program, subject.weights, planted.plan, subject.checkpoint.config)
    return Rewritten(rewritten, weights, exact=exact)


def _verdict(planted: Planted, out: Path, rewritten: Rewritten) -> Verdict:
    """Verify as an export does; of tampered files the static checks are also left out, as if they had the same fault.

    A verdict then counts as refuted only where running the model refutes it too.
    """
    subject, plan = planted.subject, planted.plan
    samples = inside(sequences(subject.checkpoint, _schema(plan), None), plan, 8)
    verdict = verify(out, subject.checkpoint, samples=samples, program=rewritten, plan=plan, settings=SMALL)
    origin = (subject.program, subject.weights)
    if planted.tamper is not None and planted.seen:
        if verdict.status != "refuted":
            return verdict
        ran, example = dynamic_checks(
            out, subject.checkpoint, plan, samples, reference=rewritten, settings=SMALL
        )  # the same fault in the verifier's own idea of the files must not hide it
        verdict = Verdict(checks=ran, counterexample=example)
    return with_blame(verdict, out, subject.checkpoint, samples, origin)


def _schema(plan: Plan):  # type: ignore[no-untyped-def]
    return contract(tuple(plan.input_schema["tokens"]))


def _differs(planted: Planted, out: Path, rewritten: Rewritten) -> bool:
    """Whether the wrong function really is another one in-schema, by eager models and fresh inputs alone.

    What it is compared with is the source or, where weights are computed, the output before it was tampered with.
    """
    draw = random.Random(f"probe {planted.site}")
    tokens = planted.plan.input_schema["tokens"]
    probes = [draw.choices(tokens, k=LONGEST) for _ in range(PROBES)]
    narrow = token_narrow(planted.plan)
    kept = list(narrow.kept) if narrow else None
    if kept is not None and set(tokens) - set(kept):
        return True
    columns = kept or slice(None)
    wanted = _eager(planted.subject.checkpoint.root, probes)[..., columns]
    renumbered = [[kept.index(token) for token in ids] for ids in probes] if kept else probes
    if planted.values is not None and planted.tamper is not None:
        _export(replace(planted, tamper=None), out.with_name("right"))
        wanted = _eager(out.with_name("right"), renumbered)
    if planted.spoil is not None:
        return _spoiled(planted, rewritten, renumbered, wanted)
    try:
        found = _eager(out, renumbered)
    except Exception:  # what cannot be loaded whole and run is another function
        return True
    return found.shape != wanted.shape or _gap(found, wanted) > REAL


def _gap(found: torch.Tensor, wanted: torch.Tensor) -> float:
    gap = (found - wanted).abs().nan_to_num(nan=float("inf"))
    return float(gap.max() / wanted.abs().max().clamp(min=1e-9))


def _eager(folder: Path, ids: Sequence[Sequence[int]]) -> torch.Tensor:
    with quiet(), torch.no_grad():
        config = AutoConfig.from_pretrained(str(folder))
        model, info = auto_class(config).from_pretrained(str(folder), dtype=torch.float32, output_loading_info=True)
        if info["missing_keys"] or info["mismatched_keys"]:
            raise LookupError("not whole")
        logits: torch.Tensor = model.eval()(input_ids=torch.tensor(ids)).logits
        return logits


def _spoiled(planted: Planted, pair: Rewritten, ids: Sequence[Sequence[int]], wanted: torch.Tensor) -> bool:
    """Run a spoilt graph through its cache, as decoding does."""
    program, weights, *_ = pair
    row, cut = torch.tensor(ids), LONGEST // 2
    mask = torch.ones_like(row)
    try:
        _, cache = program.run(weights, row[:, :cut], mask[:, :cut])
        found, _ = program.run(weights, row[:, cut:], mask, cache)
    except Exception:
        return True
    return _gap(found, wanted[:, cut:]) > REAL
