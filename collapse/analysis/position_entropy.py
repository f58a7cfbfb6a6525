"""Position entropy of token sequences: how predictable it is where each token last occurred.

Two statistics, both in nats, over windows of tokens. Structured text (logs, tables, JSON) repeats its layout
and is low; prose is high.

`gap_entropy` is the plain one: the Shannon entropy of the histogram of recurrence gaps (distance to the last
occurrence of the same token) in a window, `-sum p_g ln p_g` over the distinct gaps `g`; first occurrences are
left out. It ignores order.

`novelty_entropy` uses the order: a gap is expected where it, or that of the token pair, equals one of the
last 16. In a log line most tokens lie one record after their last occurrence, as their neighbours do. See
`collapse.models.position_bias.novelty_entropy` for the formula; the reference model's gate reads the same
number, so a threshold fitted here means the same there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from collapse.errors import SchemaError
from collapse.models.position_bias import EntropySettings, position_entropy, recurrence_gaps

Tokens = Sequence[int] | np.ndarray | Tensor
ROWS = 32  # windows measured at a time; bounds the memory


@dataclass(frozen=True)
class PositionEntropyFacts:
    """Position entropy of one text, window by window, in nats.

    `gap` and `novelty` are those of whole windows; `novelty_peak` is the highest novelty entropy of any
    prefix of the window: a gate with a threshold above it stays shut throughout.
    """

    window: int
    gap: tuple[float, ...]
    novelty: tuple[float, ...]
    novelty_peak: tuple[float, ...]
    settings: EntropySettings = field(default_factory=EntropySettings)


@dataclass(frozen=True)
class Threshold:
    """The value that best tells two groups apart, in the unit of the values.

    `margin`: distance from `value` to the nearest value that is on its right side, of either group. `error`:
    share of all values on the wrong side, where a value equal to the threshold counts as low.
    """

    value: float
    margin: float
    error: float
    low_count: int
    high_count: int


def gap_entropy(tokens: Tokens) -> float:
    """Return the entropy of the histogram of recurrence gaps, nats; 0.0 where no token recurs."""
    gaps = recurrence_gaps(_row(tokens)[None])[0]
    _, counts = torch.unique(gaps[gaps > 0], return_counts=True)
    share = counts.double() / counts.sum().clamp(min=1)
    return float(-torch.xlogy(share, share).sum())


def prefix_entropy(tokens: Tokens, settings: EntropySettings | None = None) -> Tensor:
    """Return the novelty entropy of every prefix of `tokens`, float32 `[length]`, nats."""
    return position_entropy(_row(tokens)[None] + 1, settings or EntropySettings())[0]


def measure(tokens: Tokens, window: int = 1024, settings: EntropySettings | None = None) -> PositionEntropyFacts:
    """Measure consecutive windows of `tokens`; the last one may be shorter where it is the only one.

    Args:
        tokens: token ids of one text, 0 or more.
        window: tokens in a window.
        settings: of the novelty entropy; its window is `window` by default.

    Raises:
        SchemaError: no tokens, or a window below 2.
    """
    row = _row(tokens)
    if window < 2:
        raise SchemaError(f"window of {window} tokens", where="position entropy", fix="use 2 or more")
    settings = settings or EntropySettings(window=window)
    rows = row[: len(row) // window * window].view(-1, window) if len(row) >= window else row[None]
    prefixes = torch.cat([position_entropy(rows[at : at + ROWS] + 1, settings) for at in range(0, len(rows), ROWS)])
    return PositionEntropyFacts(
        window=window,
        gap=tuple(gap_entropy(each) for each in rows),
        novelty=tuple(prefixes[:, -1].tolist()),
        novelty_peak=tuple(prefixes.amax(1).tolist()),
        settings=settings,
    )


def fit_threshold(low: Iterable[float], high: Iterable[float]) -> Threshold:
    """Return the threshold with the fewest values on the wrong side; among equals, the one in the widest gap.

    Candidates lie half-way between neighbouring distinct values, and just outside all of them where nothing
    separates.

    Args:
        low: values that should lie at or below the threshold, at least one.
        high: values that should lie above it, at least one.

    Raises:
        SchemaError: an empty group, or a value that is not a finite number.
    """
    below, above = _finite(low, "low"), _finite(high, "high")
    values = np.unique(np.concatenate((below, above)))
    cuts = np.concatenate((values[:1] - 1.0, (values[:-1] + values[1:]) / 2, values[-1:] + 1.0))
    wrong = (below.size - np.searchsorted(below, cuts, "right")) + np.searchsorted(above, cuts, "right")
    room = np.concatenate(([0.0], np.diff(values) / 2, [0.0]))
    best = int(np.lexsort((-room, wrong))[0])
    cut = float(cuts[best])
    right = np.concatenate((cut - below[below <= cut], above[above > cut] - cut))
    return Threshold(
        value=cut,
        margin=float(right.min()) if right.size else 0.0,
        error=float(wrong[best]) / (below.size + above.size),
        low_count=int(below.size),
        high_count=int(above.size),
    )


def _row(tokens: Tokens) -> Tensor:
    row = torch.as_tensor(tokens, dtype=torch.int64)
    if row.dim() != 1 or not len(row):
        raise SchemaError("no tokens to measure", where="position entropy", fix="give a sequence of token ids")
    if int(row.min()) < 0:
        raise SchemaError(f"token id {int(row.min())}", where="position entropy", fix="ids start at 0")
    return row


def _finite(values: Iterable[float], name: str) -> np.ndarray:
    group = np.sort(np.asarray(tuple(values), dtype=np.float64))
    if not group.size or not np.isfinite(group).all():
        raise SchemaError(
            f"threshold group '{name}' needs finite values, got {group.size}",
            where="position entropy",
            fix="profile at least one text of each kind",
        )
    return group
