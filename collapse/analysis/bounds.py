"""Upper confidence bounds for a share, from independent or exchangeable units."""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy.optimize import brentq
from scipy.special import bdtr, betaincinv


def clopper_pearson(hits: int, units: int, delta: float) -> float:
    """Return the exact upper bound on a probability, wrong with probability at most `delta`.

    Clopper and Pearson (1934): the (1 - delta) quantile of Beta(hits + 1, units - hits).
    """
    if units in {0, hits}:
        return 1.0
    return float(betaincinv(hits + 1, units - hits, 1 - delta))


def hoeffding_bentkus(mean: float, units: int, delta: float) -> float:
    """Return an upper bound on the mean of values in [0, 1], wrong with probability at most `delta`.

    Bates et al. (2021), "Distribution-free, risk-controlling prediction sets": the largest r for which
    min(exp(-n KL(mean, r)), e P(Binomial(n, r) <= ceil(n mean))) still exceeds `delta`.
    """
    if units == 0 or mean >= 1.0:
        return 1.0

    def excess(risk: float) -> float:
        bentkus = math.e * float(bdtr(math.ceil(units * mean - 1e-12), units, risk))
        return min(math.exp(-units * _divergence(mean, risk)), bentkus) - delta

    return _root(excess, mean)


def _divergence(mean: float, risk: float) -> float:
    """Kullback-Leibler divergence of Bernoulli(mean) from Bernoulli(risk), in nats."""
    here = mean * math.log(mean / risk) if mean > 0 else 0.0
    return here + (1 - mean) * math.log((1 - mean) / (1 - risk))


def _root(excess: Callable[[float], float], low: float) -> float:
    low, high = max(low, 1e-12), 1 - 1e-12
    if excess(low) <= 0:
        return low
    return 1.0 if excess(high) > 0 else float(brentq(excess, low, high, xtol=1e-12))
