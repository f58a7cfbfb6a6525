"""Bets against "the expected loss is larger", and the bound on a ratio of expectations that they give.

Waudby-Smith and Ramdas (2024), "Estimating means of bounded random variables by betting" (J. R. Stat. Soc. B 86).
Their capital is the product of 1 + lambda_i (m - X_i); where the mean is at least m, every such factor has an
expectation of at most 1, so the capital reaches 1/delta with probability at most delta (Markov). Of their strategies
this is the diversified one (dKelly): fixed bets share the money, none looks at the data. It was chosen because the
result then depends on no order of the units, and because the capital rises with m whatever the data are.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import logsumexp

# Losses per sequence vary little beside what they could be, so the boldest bet is the best one and gets most.
BETS = 2.0 ** -np.arange(8)  # of the largest bet that keeps the capital non-negative
SHARES = 3.0 ** -np.arange(8) / np.sum(3.0 ** -np.arange(8))
PRECISION = 1e-13  # relative, of a crossing; it is added to the bound, so that no bound is rounded down


def log_capital(excess: NDArray[np.float64], ceiling: float) -> float:
    """Return the log of an e-value against "the expectation of `excess` is at least 0".

    Args:
        excess: [units], each at most `ceiling` by design. It needs no lower bound.
        ceiling: above 0.

    Fixed bets make each factor a decreasing function of one unit, so that the e-value is also one for units drawn
    without replacement, which are negatively associated (Joag-Dev and Proschan, 1983).
    """
    with np.errstate(divide="ignore"):  # a unit at the ceiling takes all that the boldest bet has
        growth = np.log1p(-np.outer(BETS, excess / ceiling)).sum(axis=1)
    return float(logsumexp(growth, b=SHARES))


def ratio_upper(losses: NDArray[np.float64], scales: NDArray[np.float64], delta: float, ceiling: float) -> float | None:
    """Return an upper bound, at least 0, on E[loss] / E[scale], wrong with probability at most `delta`.

    "The ratio is at least r" says that the expectation of loss - r scale is at least 0, which `log_capital` bets
    against. Its capital rises with r, as no scale is negative, so one crossing separates what is refuted from what is
    not. None where no r is refuted: without units, or where every scale is 0.

    Args:
        losses: [units], each at most `ceiling`.
        scales: [units], none negative.
    """
    if not np.any(scales > 0):
        return None
    missing = math.log(delta)  # of the capital that refutes

    def gain(ratio: float) -> float:
        return log_capital(losses - ratio * scales, ceiling) + missing

    low, high = 0.0, ceiling / float(np.max(scales))
    if math.isinf(high):  # scales so small that no ratio to them is a number
        return None
    if gain(low) >= 0:
        return low
    while gain(high) < 0:
        low, high = high, 2 * high
        if math.isinf(high):
            return None
    crossing = float(brentq(gain, low, high, xtol=PRECISION * high, rtol=PRECISION))
    return min(high, crossing + PRECISION * (crossing + high))
