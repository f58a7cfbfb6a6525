"""Confidence bounds for what was counted on data that chose nothing."""

from __future__ import annotations

from scipy.stats import beta

DELTA = 0.05


def share_at_most(hits: int, trials: int, delta: float = DELTA) -> float:
    """Return the one-sided Clopper-Pearson upper bound on a share, at confidence `1 - delta`.

    Exact for independent trials (Clopper and Pearson, Biometrika 26, 1934). With no trials it is 1.
    """
    if trials == 0 or hits >= trials:
        return 1.0
    return float(beta.ppf(1 - delta, hits + 1, trials - hits))
