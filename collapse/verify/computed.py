"""What is checked of an output that is another function than its source, by computed weights or lost blocks.

It is compared with the rewritten graph on the same weights, which is a second path to the same function; how far it is
from the source is measured, and nothing is claimed of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from collapse.analysis.ties import config_as_loaded
from collapse.checkpoint import Checkpoint
from collapse.plan import AddBias, DropLayers, Narrow, Plan, Replace, Rewrite, StandIn
from collapse.program import Program
from collapse.progress import Stopwatch
from collapse.rewrite.graph import rewrite_program, rewrite_weights
from collapse.rewrite.tensors import token_narrow
from collapse.rewrite.values import plan_digests, require_digests, values_of
from collapse.source_model import source_weights
from collapse.trace import trace
from collapse.verdict import Check
from collapse.verify.compare import (
    EQ,
    Finding,
    cached_blocks,
    compare_logits,
    compare_pieces,
    figures_of,
    full_blocks,
    padded_blocks,
    piecewise,
    rounding,
)
from collapse.verify.job import Job
from collapse.verify.loading import one_line
from collapse.verify.observe import Observation, ProgramRunner, observe

Weights = Mapping[str, torch.Tensor]
Exact = tuple[Program, Weights]


def says_of_source(plan: Plan) -> bool:
    """Whether the plan claims that source and output say the same, exactly or within a `tolerance` of its evidence."""
    return not any(map(_changes, plan.rewrites))


def _changes(rewrite: Rewrite) -> bool:
    """Whether a rewrite makes another function: computed weights, or the loss of blocks, modules or channels.

    A cut of the vocabulary leaves the logits of kept ids as they are, whatever its grade is about.
    """
    if rewrite.evidence.grade == "proved" or "tolerance" in rewrite.evidence.figures:
        return False
    channels = isinstance(rewrite, Narrow) and rewrite.relabels == "channels"
    return channels or isinstance(rewrite, Replace | DropLayers | StandIn | AddBias)


def exact_part(plan: Plan) -> Plan:
    """Return the plan of the rewrites that leave the source's logits as they are, whatever becomes of the others.

    Those are the proved ones, and a cut of the vocabulary, of which only kept ids are looked at.
    """
    tokens = token_narrow(plan)
    exact = (one for one in plan.rewrites if one.evidence.grade == "proved" or one is tokens)
    return plan.model_copy(update={"rewrites": tuple(exact)})


def exact_graph(program: Program, weights: Weights, plan: Plan, config: Mapping[str, Any]) -> Exact | None:
    """Return the source's program after the exact rewrites alone; None where the plan has no other, or no such."""
    exact = exact_part(plan)
    if says_of_source(plan) or not exact.rewrites:
        return None
    return rewrite_program(program, exact, config), rewrite_weights(program, weights, exact, config)


def exact_check(
    graph: Exact, job: Job, new_job: Job, before: Observation, ids: Sequence[int], watch: Stopwatch
) -> Finding:
    """Compare the graph of the exact rewrites with what the source said; `new_job` is `job` in the graph's ids."""
    name = "exact rewrites"
    try:
        seen = observe(ProgramRunner(*graph, watch), replace(new_job, cached=(), padded=(), prompts=()))
    except Exception as error:  # an operator that refuses what it is given raises many kinds
        return Check(name=name, passed=False, detail=f"the graph cannot be run: {one_line(error)}"), None
    return compare_logits(name, full_blocks(job, before, seen), EQ.rounded(rounding(piecewise(job, before))), ids)


def beside_source(job: Job, before: Observation, after: Observation) -> list[Finding]:
    """Measure how far the output is from its source, and check that the output says the same whole and in pieces."""
    blocks = (*full_blocks(job, before, after), *cached_blocks(job, before, after), *padded_blocks(job, before, after))
    figures = figures_of(blocks)
    gap, where = float(figures["max_abs_diff"]), f"{figures['argmax_differs']} of {figures['positions']} positions"
    detail = f"nothing is claimed: logits differ by up to {gap:.3g}, the likeliest token at {where}"
    measured = Check(name="distance to the source", passed=True, detail=detail, figures=figures)
    pieces = compare_pieces("cache and padding", list(piecewise(job, after)), list(piecewise(job, before)))
    return [(measured, None), pieces]


def in_source_ids(seen: Observation, ids: Sequence[int]) -> Observation:
    """Return what the output said with its continuations in the source's token ids, which `ids` lists by the new."""
    told = tuple(
        replace(one, prompt=tuple(ids[token] for token in one.prompt), tokens=tuple(ids[token] for token in one.tokens))
        for one in seen.greedy
    )
    return replace(seen, greedy=told)


def rebuilt(
    output: Path, source: Checkpoint, plan: Plan, watch: Stopwatch
) -> tuple[Program, Weights, None, Exact | None]:
    """Trace the source and rewrite it by the plan, with the computed weights of `output`; the fields of `Rewritten`.

    Raises `PlanError` where those have not the digests of the plan.
    """
    values = values_of(output, Checkpoint.open(output).tensors.values(), plan)
    require_digests(values, plan_digests(plan))
    program, weights = trace(config_as_loaded(source)), source_weights(source, watch)
    rewritten = rewrite_weights(program, weights, plan, source.config, values=values)
    exact = exact_graph(program, weights, plan, source.config)
    return rewrite_program(program, plan, source.config), rewritten, None, exact
