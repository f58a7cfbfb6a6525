"""Text whose losses are known: populations of sequences whose tokens depend on each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import binom

from collapse.certify import METRICS, SequenceLoss

SPLITS, DELTA = 200, 0.05
# As many wrong bounds among 200 as a bound that is wrong exactly 5 % of the time exceeds once in a hundred tries.
TOLERATED = int(binom.ppf(0.99, SPLITS, DELTA))


def wrong_bounds(bound: Callable[[np.random.Generator], float], truth: float, seed: int = 0) -> int:
    """Return how many of 200 bounds, each from a generator of its own, lie below the truth."""
    return sum(bound(np.random.default_rng([seed, split])) < truth for split in range(SPLITS))


def loss_of(tokens: int, rng: np.random.Generator, flip_rate: float, regret: float) -> SequenceLoss:
    """Return a sequence of which `flip_rate` of the tokens flips, on average, and whose NLL rises by `regret`."""
    confident = int(rng.binomial(tokens, 0.6))
    confident_flips = int(rng.binomial(confident, flip_rate))
    flips = confident_flips + int(rng.binomial(tokens - confident, flip_rate))
    source_nll = tokens * rng.gamma(4, 0.3)
    noise = rng.normal(0, 0.02) * np.sqrt(tokens)
    return SequenceLoss(
        tokens=tokens,
        text_bytes=int(tokens * rng.uniform(2.5, 4.5)),
        source_nll=source_nll,
        nll=max(0.0, source_nll + tokens * regret + noise),
        kl=tokens * regret * rng.uniform(0.8, 1.2),
        flips=flips,
        confident=confident,
        confident_flips=confident_flips,
    )


def text(size: int, seed: int = 0, *, bad: float = 0.03, fixed_length: bool = False) -> list[SequenceLoss]:
    """Return `size` sequences: most lose little, a share `bad` a lot, and each all along its tokens."""
    rng = np.random.default_rng([99, seed])
    found = []
    for _ in range(size):
        severity = rng.beta(4, 4) if rng.random() < bad else rng.beta(0.5, 60)
        tokens = 256 if fixed_length else int(rng.integers(32, 257))
        found.append(loss_of(tokens, rng, 0.5 * severity, 0.4 * severity))
    return found


def ratio(sequences: Sequence[SequenceLoss], name: str) -> float:
    """Return the metric of all the sequences together."""
    metric = METRICS[name]
    return sum(map(metric.loss, sequences)) / sum(map(metric.scale, sequences))
