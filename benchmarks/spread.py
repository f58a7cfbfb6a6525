"""Medians with their quartiles, since a time alone says little."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles

from collapse.plan import Record


class Spread(Record):
    """Median and quartiles."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles of some values; of one value all three are it."""
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return Spread(low=low, median=middle, high=high)
