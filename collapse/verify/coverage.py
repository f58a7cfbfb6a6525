"""Says which ways of running were compared, and how long the sequences were against what the schema allows."""

from __future__ import annotations

from collections.abc import Sequence

from collapse.verdict import Check
from collapse.verify.job import Job, cuts


def coverage(job: Job, windows: Sequence[int], allowed: int | None) -> Check:
    """Return what a job covers, as figures; it passes always, since it claims nothing about the models.

    Args:
        job: the work that was run.
        windows: lengths from which on some layer sees only a part of the past.
        allowed: the longest sequence that schema and model allow; None where there is no bound.
    """
    lengths = [len(ids) for ids in job.sequences]
    chunks = max((len(cuts(lengths[number], job.decode)) for number in job.cached), default=0)
    padded = {length for _, length in job.padded}
    passed = [window for window in windows if window < max(lengths)]
    figures: dict[str, float | int | str] = {
        "prefill": len(lengths),
        "chunked_prefill": sum(lengths[number] - job.decode > 1 for number in job.cached),
        "decode_steps": max(0, min(chunks - 2, job.decode)),
        "left_padded_rows": sum(length < max(padded) for length in padded),
        "longest_sample": max(lengths),
        "longest_allowed": "no bound" if allowed is None else allowed,
        "windows": len(windows),
        "windows_passed": len(passed),
    }
    reach = f"up to {max(lengths)} tokens, {'no bound' if allowed is None else allowed} allowed"
    seen = f", past {len(passed)} of {len(windows)} attention windows" if windows else ""
    detail = f"prefill, chunks, {figures['decode_steps']} decode steps, left padding; {reach}{seen}"
    return Check(name="coverage", passed=True, detail=detail, figures=figures)
