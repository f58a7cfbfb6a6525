"""Upper confidence bounds on a mean of values in [0, 1], from independent or exchangeable units."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import bdtr, betaincinv

from collapse.certify.betting import log_capital, ratio_upper

Values = NDArray[np.float64]


def clopper_pearson(hits: int, units: int, delta: float) -> float:
    """Return the exact upper bound on a probability, wrong with probability at most `delta`.

    Clopper and Pearson (1934): the (1 - delta) quantile of Beta(hits + 1, units - hits).
    """
    if units in {0, hits}:
        return 1.0
    return float(betaincinv(hits + 1, units - hits, 1 - delta))


def hoeffding_bentkus(mean: float, units: int, delta: float) -> float:
    """Return an upper bound on the mean of values in [0, 1], wrong with probability at most `delta`.

    Bates et al. (2021), "Distribution-free, risk-controlling prediction sets": the largest limit whose
    `hoeffding_bentkus_p` still exceeds `delta`.
    """
    if units == 0 or mean >= 1.0:
        return 1.0
    return _root(lambda limit: hoeffding_bentkus_p(mean, units, limit) - delta, mean)


def hoeffding_bentkus_p(mean: float, units: int, limit: float) -> float:
    """Return a p-value of "the expected value exceeds `limit`", from the `mean` of `units` values in [0, 1].

    Bates et al. (2021): min(exp(-n KL(min(mean, limit), limit)), e P(Binomial(n, limit) <= ceil(n mean))), whose
    first term is Hoeffding's (1963, theorem 1) and whose second is Bentkus's (2004).
    """
    if units == 0 or not 0 < limit < 1:
        return 1.0
    bentkus = math.e * float(bdtr(math.ceil(units * mean - 1e-12), units, limit))
    return min(1.0, math.exp(-units * _divergence(min(mean, limit), limit)), bentkus)


def empirical_bernstein(values: Values, delta: float) -> float:
    """Return an upper bound on the mean of `values` in [0, 1], [units], wrong with probability at most `delta`.

    Maurer and Pontil (2009), theorem 4: mean + sqrt(2 V log(2/delta) / n) + 7 log(2/delta) / (3 (n - 1)), where V is
    the sample variance with n - 1.
    """
    units = len(values)
    if units < 2:
        return 1.0
    log = math.log(2 / delta)
    spread = math.sqrt(2 * float(np.var(values, ddof=1)) * log / units)
    return min(1.0, float(np.mean(values)) + spread + 7 * log / (3 * (units - 1)))


def betting(values: Values, delta: float) -> float:
    """Return an upper bound on the mean of `values` in [0, 1], [units], wrong with probability at most `delta`.

    The smallest mean against which the capital of `collapse.certify.betting` reaches 1/delta.
    """
    upper = ratio_upper(values, np.ones_like(values), delta, ceiling=1.0)
    return 1.0 if upper is None else min(1.0, upper)


def betting_p(values: Values, limit: float) -> float:
    """Return a p-value of "the expected value exceeds `limit`": 1 over the capital, which is an e-value."""
    return math.exp(min(0.0, -log_capital(values - limit, ceiling=1.0)))


def _divergence(mean: float, risk: float) -> float:
    """Kullback-Leibler divergence of Bernoulli(mean) from Bernoulli(risk), in nats."""
    here = mean * math.log(mean / risk) if mean > 0 else 0.0
    there = (1 - mean) * math.log((1 - mean) / (1 - risk)) if mean < 1 else 0.0
    return max(0.0, here + there)


def _root(excess: Callable[[float], float], low: float) -> float:
    low, high = max(low, 1e-12), 1 - 1e-12
    if excess(low) <= 0:
        return low
    return 1.0 if excess(high) > 0 else float(brentq(excess, low, high, xtol=1e-12))
