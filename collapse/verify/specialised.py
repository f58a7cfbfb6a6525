"""Checks the graph that only `collapse.load_graph` runs: last logits and cached decode, against the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from collapse.progress import Stopwatch
from collapse.rewrite.specialise import Specialised
from collapse.verdict import Check
from collapse.verify.compare import Block, Finding, Tolerance, cached_blocks, compare_logits, padded_blocks
from collapse.verify.job import Job
from collapse.verify.observe import Observation, ProgramRunner, observe


class LastRunner(ProgramRunner):
    """Runs a program whose logits are of the last position only."""

    def __call__(
        self, ids: torch.Tensor, mask: torch.Tensor, cache: Any, positions: Sequence[int]
    ) -> tuple[torch.Tensor, Any]:
        """See `Runner`; the last position is the only one that can be asked for."""
        assert list(positions) == [ids.shape[1] - 1], positions
        return super().__call__(ids, mask, cache, [0])


def specialised_checks(
    job: Job,
    new_job: Job,
    specialised: Specialised,
    weights: Mapping[str, torch.Tensor],
    before: Observation,
    tolerance: Tolerance,
    columns: Sequence[int],
    watch: Stopwatch,
) -> list[Finding]:
    """Compare the specialised graph with what the source said on `job`; `new_job` has the same in the graph's ids.

    Products of a single row run in other kernels than those of many, so `tolerance` is that of another shape.
    """
    narrowed = [_suited(one, specialised) for one in (job, new_job)]
    runner = LastRunner if specialised.next_token else ProgramRunner
    name = "graph: next token" if specialised.next_token else "graph: folded"
    try:
        seen = observe(runner(specialised.program, specialised.weights(weights), watch), narrowed[1])
    except Exception as error:  # the graph before its edits did run
        reason = " ".join((str(error).strip() or type(error).__name__).split())[:300]
        return [(Check(name=name, passed=False, detail=f"the graph cannot be run: {reason}"), None)]
    findings = [compare_logits(name, _blocks(job, narrowed[0], before, seen), tolerance, columns)]
    if seen.cached:
        findings.append(compare_logits(f"{name}, cache", cached_blocks(job, before, seen), tolerance, columns))
    if seen.padded is not None:
        findings.append(compare_logits(f"{name}, left padding", padded_blocks(job, before, seen), tolerance, columns))
    return findings


def _suited(job: Job, specialised: Specialised) -> Job:
    """Ask for what the graph can answer; greedy continuations follow from the logits of the last position."""
    ends = tuple((len(ids) - 1,) for ids in job.sequences)
    positions = ends if specialised.next_token else job.positions
    return replace(job, positions=positions, padded=() if specialised.unpadded else job.padded, prompts=())


def _blocks(job: Job, narrowed: Job, before: Observation, seen: Observation) -> tuple[Block, ...]:
    rows = zip(job.sequences, job.positions, narrowed.positions, before.full, seen.full, strict=True)
    return tuple(
        Block(ids, wanted, reference[[known.index(position) for position in wanted]], found)
        for ids, known, wanted, reference, found in rows
    )
