"""Each metric as a ratio of two expectations over sequences, and what is assumed about its size beforehand.

A rate per token is a ratio, E[loss of a sequence] / E[its scale], since sequences differ in length. Tokens of one
sequence depend on each other, so the sequence is the unit. How a bound on such a ratio follows is in
`collapse.certify.betting`; it needs a ceiling on the loss of one sequence, which must not come from the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collapse.budget import Loss
from collapse.certify import bounds
from collapse.certify.betting import ratio_upper
from collapse.certify.losses import SequenceLoss
from collapse.errors import PlanError

Values = NDArray[np.float64]
MEANS: dict[str, Callable[[Values, float], float]] = {
    "hoeffding-bentkus": lambda values, delta: bounds.hoeffding_bentkus(float(np.mean(values)), len(values), delta),
    "empirical-bernstein": bounds.empirical_bernstein,
}
METHODS = ("betting", *MEANS)


@dataclass(frozen=True)
class Metric:
    """A loss per unit of scale. `unit` is what a sequence's loss counts, and so what its ceiling is in, per token."""

    name: Loss
    words: str
    unit: str
    loss: Callable[[SequenceLoss], float]
    scale: Callable[[SequenceLoss], float]

    @property
    def is_rate(self) -> bool:
        """Whether it counts tokens among tokens, so that it is at most 1 without any assumption."""
        return self.unit == "tokens"


_METRICS = (
    Metric(
        "regret",
        "NLL regret, relative to the source's NLL",
        "nats",
        lambda s: s.nll - s.source_nll,
        lambda s: s.source_nll,
    ),
    Metric(
        "bits",
        "NLL regret in bits per byte",
        "nats",
        lambda s: s.nll - s.source_nll,
        lambda s: s.text_bytes * math.log(2),
    ),
    Metric("kl", "KL divergence in nats per token", "nats", lambda s: s.kl, lambda s: s.tokens),
    Metric("flips", "share of tokens whose top-1 flips", "tokens", lambda s: s.flips, lambda s: s.tokens),
    Metric(
        "confident-flips",
        "share of flips among tokens where the source's top-1 has a probability of at least 0.5",
        "tokens",
        lambda s: s.confident_flips,
        lambda s: s.confident,
    ),
)
METRICS: dict[str, Metric] = {metric.name: metric for metric in _METRICS}


@dataclass(frozen=True)
class Design:
    """What is fixed before the held-out text is looked at; a choice made afterwards voids the bound.

    Attributes:
        split: digest of the held-out sequences.
        length: tokens that a sequence has at most.
        delta: probability with which a bound may be wrong.
        method: one of `METHODS`. Only betting takes sequences of different lengths, and ratios.
        nats_cap: of `regret`, `bits` and `kl`, which no model bounds: the loss of a sequence is counted up to this,
            nats per token of `length`.
        rate_cap: the same for flips, per token of `length`; 1 assumes nothing.
    """

    split: str
    length: int
    delta: float = 0.05
    method: str = "betting"
    nats_cap: float = 0.5
    rate_cap: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise PlanError(f"unknown method {self.method!r}", fix=f"choose among {', '.join(METHODS)}")
        if not 0 < self.delta < 1:
            raise PlanError(f"delta = {self.delta} is no probability between 0 and 1")
        if self.length < 1 or not 0 < self.nats_cap < math.inf or not 0 < self.rate_cap <= 1:
            raise PlanError("length and caps of a certificate must be positive, a rate's cap at most 1")

    def cap(self, metric: Metric) -> float:
        """Return the ceiling of the loss of one sequence, per token of `length`."""
        return self.rate_cap if metric.is_rate else self.nats_cap


@dataclass(frozen=True)
class Units:
    """One metric of every sequence, per token of the design's length: losses up to the cap, and scales, [units].

    `clipped` counts the sequences whose loss is beyond the cap.
    """

    losses: Values
    scales: Values
    cap: float
    clipped: int

    @property
    def estimate(self) -> float | None:
        """The ratio on the held-out text itself; None without any scale."""
        total = float(np.sum(self.scales))
        return float(np.sum(self.losses)) / total if total > 0 else None


def units_of(sequences: Sequence[SequenceLoss], metric: Metric, design: Design) -> Units:
    """Return the metric's losses and scales. Raises `PlanError` for a sequence longer than the design says."""
    longest = max((sequence.tokens for sequence in sequences), default=0)
    if not 0 < longest <= design.length:
        what = (
            f"a sequence has {longest} tokens, more than the {design.length}" if sequences else "there is no sequence"
        )
        raise PlanError(f"{what} that the certificate was designed for", fix="cut held-out text to that length")
    losses = np.array([metric.loss(sequence) for sequence in sequences], dtype=np.float64) / design.length
    scales = np.array([metric.scale(sequence) for sequence in sequences], dtype=np.float64) / design.length
    cap = design.cap(metric)
    return Units(np.minimum(losses, cap), scales, cap, int(np.sum(losses > cap)))


def upper_bound(units: Units, metric: Metric, design: Design, delta: float) -> float | None:
    """Return the upper confidence bound of the metric, or None where there is none.

    Raises `PlanError` where the method bounds means only and the metric is none: scales must all be the same.
    """
    if design.method == "betting":
        upper = ratio_upper(units.losses, units.scales, delta, units.cap)
    elif np.all(units.scales == 1) and np.all(units.losses >= 0):
        upper = units.cap * MEANS[design.method](units.losses / units.cap, delta)
    else:
        what = f"{design.method} bounds means, and {metric.name} of these sequences is a ratio"
        raise PlanError(what, fix="use the method betting, or flips or kl of sequences of one length")
    return 1.0 if metric.is_rate and (upper is None or upper > 1) else upper
