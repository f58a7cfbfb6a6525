"""The part of the report about a budget of decode speed: what was predicted, and what was measured."""

from __future__ import annotations

from statistics import median, quantiles
from typing import Literal

from collapse.plan import Record

Confirmation = Literal["confirmed", "not confirmed on this machine"]


class DecodeSpeed(Record):
    """The time of a decode step, as a share of the source's; `limit` is the share that the budget asks for.

    `predicted` is the share of weight bytes that a step reads. `measured` is the median over steps of the output's time
    by the source's, steps taken in turns, one sequence; `quartiles` are of the same ratios. Times are medians in
    seconds. They differ from run to run, so nothing is decided by them. Confirmed is a budget that `measured` meets.
    """

    confirmation: Confirmation
    limit: float
    predicted: float
    measured: float
    quartiles: tuple[float, float]
    source_seconds: float
    output_seconds: float
    steps: int
    prompt: int
    threads: int
    dtype: str


def decode_speed(
    source: tuple[float, ...], output: tuple[float, ...], *, limit: float, predicted: float, prompt: int, threads: int,
    dtype: str,
) -> DecodeSpeed:  # fmt: skip
    """Compare the seconds of steps that were taken in turns, at least two of either."""
    ratios = [after / before for before, after in zip(source, output, strict=True)]
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    found: Confirmation = "confirmed" if middle <= limit else "not confirmed on this machine"
    return DecodeSpeed(
        confirmation=found, limit=limit, predicted=predicted, measured=middle, quartiles=(low, high),
        source_seconds=median(source), output_seconds=median(output), steps=len(ratios), prompt=prompt,
        threads=threads, dtype=dtype,
    )  # fmt: skip


def sentence(speed: DecodeSpeed) -> str:
    """Return the finding as a sentence."""
    low, high = speed.quartiles
    threads = "1 thread" if speed.threads == 1 else f"{speed.threads} threads"
    how = f"median of {speed.steps} steps in turns, quartiles {low:.1%} and {high:.1%}, {speed.dtype}"
    return (
        f"Decode budget {speed.confirmation}: a token takes {speed.measured:.1%} of the source's time as measured "
        f"({how}, {threads}, after {speed.prompt} tokens), {speed.predicted:.1%} as predicted from "
        f"weight bytes; asked for was at most {speed.limit:.1%}."
    )
