"""Checks the model by running it: reloaded from disk with plain transformers, against the source and the graph.

One model is in memory at a time: the source runs first, what is compared is kept, then the output is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig

from collapse.checkpoint import Checkpoint
from collapse.errors import PlanError
from collapse.plan import Narrow, Plan, Specialise
from collapse.program import Program
from collapse.progress import Stopwatch
from collapse.rewrite.origin import origins
from collapse.rewrite.specialise import Specialised
from collapse.rewrite.tensors import token_narrow
from collapse.schema import InputSchema
from collapse.sequences import attention_windows, longest_allowed
from collapse.trace import quiet
from collapse.verdict import Check
from collapse.verify.compare import (
    EQ,
    OTHER_SHAPE,
    Counterexample,
    Finding,
    Tolerance,
    cached_blocks,
    compare_greedy,
    compare_logits,
    compare_pieces,
    full_blocks,
    padded_blocks,
    piecewise,
    rounding,
)
from collapse.verify.computed import Exact, Weights, beside_source, exact_check, in_source_ids, rebuilt, says_of_source
from collapse.verify.coverage import coverage
from collapse.verify.job import Job, Settings, make_job
from collapse.verify.loading import load_and_run, loading_check, not_loaded, one_line, run_source
from collapse.verify.observe import Observation, ProgramRunner, observe
from collapse.verify.quantised import quantised_checks
from collapse.verify.specialised import specialised_checks
from collapse.verify.weights import weights_check


class Rewritten(NamedTuple):
    """The collapsed program with its weights; `specialised` where the plan edits the graph beyond the checkpoint.

    `exact` is the source's program after the exact rewrites alone, where the others say nothing of the source.
    """

    program: Program
    weights: Mapping[str, torch.Tensor]
    specialised: Specialised | None = None
    exact: tuple[Program, Mapping[str, torch.Tensor]] | None = None


Given = Rewritten | tuple[Program, Mapping[str, torch.Tensor]] | tuple[Program, Weights, None, Exact | None]
Reference = Given | Callable[[], Given]


def dynamic_checks(
    output: Path,
    source: Checkpoint,
    plan: Plan,
    samples: Sequence[Sequence[int]],
    *,
    reference: Reference | None = None,
    settings: Settings | None = None,
    watch: Stopwatch | None = None,
) -> tuple[tuple[Check, ...], Counterexample | None]:
    """Run source, output and, if given, the rewritten graph on in-schema `samples` of source token ids.

    Returns the checks and the first counterexample. Raises `CheckpointError` where the source itself cannot be
    loaded whole.
    """
    narrow = token_narrow(plan)
    inside, check, example = _inside(samples, narrow, _vocabulary(source))
    if not check.passed:
        return (check,), example
    try:
        context = min((bound for bound in (_context(source.root, output), _reach(plan)) if bound), default=None)
    except Exception as error:  # transformers raises many kinds for a bad config
        return (not_loaded(error),), None
    columns = list(narrow.kept) if narrow else None
    job = make_job(inside, len(columns) if columns else _vocabulary(source), context, settings or Settings())
    ran, example = _compare(output, source, plan, job, columns, reference, watch or Stopwatch(quiet=True))
    allowed = longest_allowed(source.config, InputSchema.model_validate(plan.input_schema))
    covered = coverage(job, attention_windows(source.config), allowed)
    return (check, _room(output, allowed), covered, *ran), example


def _compare(
    output: Path,
    source: Checkpoint,
    plan: Plan,
    job: Job,
    columns: list[int] | None,
    reference: Reference | None,
    watch: Stopwatch,
) -> tuple[tuple[Check, ...], Counterexample | None]:
    before = run_source(source, job, columns, watch)
    new_job = job.renumbered({old: new for new, old in enumerate(columns)}) if columns else job
    try:
        after = load_and_run(output, new_job, None, watch, digests=reference is not None or not says_of_source(plan))
    except Exception as error:  # whatever stops the load or the run is the finding
        return (not_loaded(error),), None
    loading = [loading_check(after, plan, before.unexpected), *quantised_checks(source, before.way, after.way)]
    sizes = {tuple(seen.full[0].shape) for seen in (before.seen, after.seen)}
    if len(sizes) > 1:
        detail = f"the models give logits of different width: {sorted(size[1] for size in sizes)}"
        return (*loading, Check(name="logits", passed=False, detail=detail)), None
    if says_of_source(plan):
        findings = _against_source(job, before.seen, after.seen, plan, columns)
    else:
        findings = beside_source(job, before.seen, after.seen)
        reference = reference or partial(rebuilt, output, source, plan, watch)
    if reference is not None:
        try:
            pair = Rewritten(*(reference() if callable(reference) else reference))
        except PlanError as error:  # an output whose computed weights are not the plan's gives none to build it with
            return (*loading, Check(name="graph", passed=False, detail=str(error))), None
        names = origins(after.naming, source, plan, pair.program)
        findings.append((weights_check(after.digests, names, pair.weights), None))
        findings += _against_graph(job, new_job, pair, before.seen, after.seen, plan, columns, watch)
    examples = [example for _, example in findings if example is not None]
    return (*loading, *(check for check, _ in findings)), next(iter(examples), None)


def allowed_difference(plan: Plan) -> float:
    """Return the largest logit difference that a rewrite's evidence allows; 0 where all claims are exact."""
    inexact = (
        rewrite.evidence.figures.get("tolerance", 0.0)
        for rewrite in plan.rewrites
        if rewrite.evidence.grade != "proved" and getattr(rewrite, "stage", None) != "fuse"
    )
    return max((float(figure) for figure in inexact), default=0.0)


def _tolerance(plan: Plan) -> Tolerance:
    """Return how far source and output may differ: where channels went, products are sums of other lengths."""
    narrowed = any(rewrite.relabels == "channels" for rewrite in plan.of_kind(Narrow))
    return (OTHER_SHAPE if narrowed else EQ).widened(allowed_difference(plan))


def _against_source(
    job: Job, before: Observation, after: Observation, plan: Plan, columns: list[int] | None
) -> list[Finding]:
    ids = columns or list(range(before.full[0].shape[1]))
    own, theirs = list(piecewise(job, after)), list(piecewise(job, before))
    tolerance = _tolerance(plan).rounded(rounding(theirs))
    findings = [compare_logits("logits: prefill", full_blocks(job, before, after), tolerance, ids)]
    if before.cached or after.cached:
        findings.append(_cached(job, before, after, tolerance, ids))
    findings.append(compare_logits("logits: left padding", padded_blocks(job, before, after), tolerance, ids))
    findings.append(compare_pieces("cache and padding", own, theirs))
    findings.append(_greedy("greedy", before, after, tolerance, ids))
    return findings


def _cached(job: Job, before: Observation, after: Observation, tolerance: Tolerance, ids: list[int]) -> Finding:
    blocks = cached_blocks(job, before, after)
    if not blocks:
        return Check(name="logits: cache", passed=False, detail="only one of both models has a cache"), None
    return compare_logits("logits: cache", blocks, tolerance, ids)


def _greedy(name: str, before: Observation, after: Observation, tolerance: Tolerance, ids: list[int]) -> Finding:
    scale = max(logits.abs().max() for logits in before.full)
    slack = 2 * float(tolerance.bound(scale))
    followed = before.greedy[: len(after.greedy)]  # the graph continues fewer prompts
    pairs = list(zip(followed, after.greedy, strict=True))
    return compare_greedy(name, pairs, ids, slack)


def _against_graph(
    job: Job,
    new_job: Job,
    reference: Rewritten,
    before: Observation,
    after: Observation,
    plan: Plan,
    columns: list[int] | None,
    watch: Stopwatch,
) -> list[Finding]:
    """The rewritten graph on weights in memory is a second path to the same function; neither reads the other's.

    Of the prompts it continues the first batch. With a cache its arithmetic is another one: eager attention packs the
    query heads of one new token, where the traced one repeats keys and values.
    """
    program, weights, specialised, exact = reference
    try:
        graph = observe(ProgramRunner(program, weights, watch), replace(new_job, prompts=new_job.prompts[:1]))
    except Exception as error:  # an operator that refuses what it is given raises many kinds
        return [(Check(name="graph", passed=None, detail=f"the graph cannot be run: {one_line(error)}"), None)]
    ids = columns or list(range(before.full[0].shape[1]))
    claimed, other = says_of_source(plan), OTHER_SHAPE.widened(allowed_difference(plan))
    noise = rounding(piecewise(job, before))
    same, wide = EQ.rounded(noise), _tolerance(plan).rounded(noise)
    findings = []
    for way, blocks, own, theirs in (
        ("prefill", full_blocks, same, wide),
        ("cache", cached_blocks, OTHER_SHAPE, other),
        ("left padding", padded_blocks, same, wide),
    ):
        if way != "cache" or graph.cached:
            findings.append(compare_logits(f"graph: {way}", blocks(job, graph, after), own, ids))
        if claimed and (way != "cache" or graph.cached):
            findings.append(compare_logits(f"graph and source: {way}", blocks(job, before, graph), theirs, ids))
    if exact is not None:
        findings.append(exact_check(exact, job, new_job, before, ids, watch))
    said = before if claimed else in_source_ids(after, ids)
    findings.append(_greedy("graph: greedy", said, graph, wide, ids))
    if specialised is not None:
        findings += specialised_checks(job, new_job, specialised, weights, said, other, ids, watch)
    return findings


def _inside(
    samples: Sequence[Sequence[int]], narrow: Narrow | None, vocabulary: int
) -> tuple[list[Sequence[int]], Check, Counterexample | None]:
    """Divide samples by whether all their tokens are kept.

    A proved claim leaves no sample outside. A certified one allows a share of them, which is counted.
    """
    kept: Container[int] = frozenset(narrow.kept) if narrow else range(vocabulary)
    strays = {n: at for n, ids in enumerate(samples) if (at := _first_outside(ids, kept)) is not None}
    inside = [ids for n, ids in enumerate(samples) if n not in strays and ids]
    exact = narrow is None or narrow.evidence.grade == "proved"
    figures: dict[str, float | int | str] = {"samples": len(samples), "outside": len(strays)}
    if strays and (exact or not inside):
        number, at = next(iter(strays.items()))
        token = samples[number][at]
        detail = f"sample {number} has token {token} at position {at}, which the output does not have"
        example = {"check": "samples", "ids": list(samples[number]), "position": at, "expected": token, "found": None}
        return inside, Check(name="samples", passed=False, detail=detail, figures=figures), example
    detail = f"{len(inside)} of {len(samples)} samples consist of kept tokens alone"
    return inside, Check(name="samples", passed=True, detail=detail, figures=figures), None


def _first_outside(ids: Sequence[int], kept: Container[int]) -> int | None:
    return next((at for at, token in enumerate(ids) if token not in kept), None)


def _reach(plan: Plan) -> int | None:
    """Return the longest sequence for which the switches of the plan claim anything, continuations included."""
    bounds = (switch.max_tokens for switch in plan.of_kind(Specialise) if switch.graph is None)
    return min((bound for bound in bounds if bound is not None), default=None)


def _context(*folders: Path) -> int | None:
    """Return the longest sequence that all models take; None where no config bounds it."""
    with quiet():
        configs = [AutoConfig.from_pretrained(str(f), local_files_only=True).get_text_config() for f in folders]
    bounds = [getattr(config, "max_position_embeddings", None) for config in configs]
    return min((bound for bound in bounds if isinstance(bound, int) and bound > 0), default=None)


def _room(output: Path, allowed: int | None) -> Check:
    """Samples are cut to what both models take, so that an output which takes too little must be caught apart."""
    room = _context(output)
    figures: dict[str, float | int | str] = {"takes": room or "no bound", "allowed": allowed or "no bound"}
    passed = room is None or (allowed is not None and room >= allowed)
    detail = f"the output takes {figures['takes']} tokens, schema and source allow {figures['allowed']}"
    return Check(name="context", passed=passed, detail=detail, figures=figures)


def _vocabulary(source: Checkpoint) -> int:
    return int(AutoConfig.from_pretrained(str(source.root), local_files_only=True).get_text_config().vocab_size)
