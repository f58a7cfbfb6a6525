"""What a collapsed model loses against its source on one sequence, from the logits of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collapse.errors import PlanError

CONFIDENT = 0.5  # the source's top-1 probability from which on a flip is a confident one
CHUNK = 1 << 22  # logits that are held in float64 at a time


@dataclass(frozen=True)
class SequenceLoss:
    """Sums over the scored positions of one sequence, each position predicting one target token.

    Attributes:
        tokens: scored positions.
        text_bytes: UTF-8 bytes of the targets' text.
        source_nll: -log of the source's probability of the targets, over all of its ids, nats.
        nll: the same of the collapsed model; infinite where it cannot say a target at all.
        kl: of the source, renormalised over the kept ids, from the collapsed model, nats. Infinite where the
            collapsed model excludes by a logit of -inf what the source does not.
        flips: positions where the two models' most probable ids differ.
        confident: positions where the source's most probable id has a probability of at least 0.5.
        confident_flips: flips among those.
        lost_mass: the source's probability of ids that are not kept, summed over positions.
    """

    tokens: int
    text_bytes: int
    source_nll: float
    nll: float
    kl: float
    flips: int
    confident: int
    confident_flips: int
    lost_mass: float = 0.0

    def __post_init__(self) -> None:
        counts = 0 <= self.confident_flips <= min(self.flips, self.confident)
        counts = counts and max(self.flips, self.confident) <= self.tokens and self.text_bytes >= 0 < self.tokens
        sums = (self.source_nll, self.nll, self.kl, self.lost_mass)
        if not counts or not all(value >= 0 for value in sums) or math.isinf(self.source_nll):
            raise PlanError(f"these are no losses of a sequence: {self}", fix="check that the logits are finite")


@dataclass(frozen=True)
class _Rows:
    """Per position, [rows] each."""

    source_nll: Tensor
    nll: Tensor
    kl: Tensor
    lost_mass: Tensor
    flip: Tensor
    confident: Tensor


def sequence_loss(
    source_logits: Tensor, logits: Tensor, targets: Tensor, *, text_bytes: int, kept: Sequence[int] | None = None
) -> SequenceLoss:
    """Compare the logits of both models at the positions that predict `targets`.

    Probabilities are computed in float64, a few rows at a time. Where the vocabulary was cut, the source's
    probabilities of targets and its most probable id are over all of its ids. The KL divergence alone cannot be: it
    would be infinite. It is taken from the source renormalised over the kept ids, and `lost_mass` says what that left
    out. A source that prefers an id that is gone counts as a flip.

    Args:
        source_logits: [tokens, source ids].
        logits: [tokens, kept ids], column j for the source's id `kept[j]`.
        targets: [tokens], ids of the source.
        text_bytes: UTF-8 bytes of the text of `targets`.
        kept: distinct source ids; by default all.

    Raises `PlanError` for shapes that do not fit, and for logits that are NaN.
    """
    size, device = source_logits.shape[-1], source_logits.device
    columns = torch.arange(size) if kept is None else torch.as_tensor(kept, dtype=torch.long)
    _check(source_logits, logits, targets, columns)
    step = max(1, CHUNK // size)
    pieces = [slice(start, start + step) for start in range(0, len(targets), step)]
    columns = columns.to(device)
    rows = [_compare(source_logits[p], logits[p].to(device), targets[p].to(device), columns) for p in pieces]
    return _total(rows, text_bytes)


def _check(source_logits: Tensor, logits: Tensor, targets: Tensor, columns: Tensor) -> None:
    tokens, size = len(targets), source_logits.shape[-1]
    shapes = f"{list(source_logits.shape)}, {list(logits.shape)}, {list(targets.shape)} with {len(columns)} kept ids"
    fits = source_logits.shape == (tokens, size) and logits.shape == (tokens, len(columns)) and targets.ndim == 1
    if not fits or 0 in logits.shape:
        raise PlanError(f"logits of the source, of the output, and targets do not fit together: {shapes}")
    distinct = len(torch.unique(columns)) == len(columns)
    if not distinct or any(bool((ids < 0).any() or (ids >= size).any()) for ids in (targets, columns)):
        raise PlanError(f"targets and kept ids must be ids below {size}, and no id can be kept twice")


def _compare(source_logits: Tensor, logits: Tensor, targets: Tensor, columns: Tensor) -> _Rows:
    source = source_logits.double().log_softmax(-1)
    found = logits.double().log_softmax(-1)
    if bool(source.isnan().any()) or bool(found.isnan().any()):
        raise PlanError("logits are NaN", fix="run both models in a wider dtype")
    column_of = torch.full(source.shape[-1:], -1, device=source.device)
    column_of[columns] = torch.arange(len(columns), device=source.device)
    column = column_of[targets]
    whole = torch.equal(columns, torch.arange(source.shape[-1], device=source.device))
    kept_source = source if whole else source_logits[:, columns].double().log_softmax(-1)
    nll = -found.gather(-1, column.clamp(min=0)[:, None])[:, 0]
    return _Rows(
        source_nll=-source.gather(-1, targets[:, None])[:, 0],
        nll=torch.where(column >= 0, nll, math.inf),
        kl=_divergence(kept_source, found),
        lost_mass=source[:, column_of < 0].exp().sum(-1),
        flip=source_logits.argmax(-1) != columns[logits.argmax(-1)],
        confident=source.amax(-1).exp() >= CONFIDENT,
    )


def _divergence(source: Tensor, found: Tensor) -> Tensor:
    """KL divergence of `source` from `found`, [rows]; both are log-probabilities, [rows, ids]."""
    terms = torch.where(source == -math.inf, 0.0, source.exp() * (source - found))
    return terms.sum(-1).clamp(min=0.0)  # rounding can leave -1e-17


def _total(pieces: Sequence[_Rows], text_bytes: int) -> SequenceLoss:
    def summed(name: str) -> float:
        return math.fsum(value for piece in pieces for value in getattr(piece, name).tolist())

    return SequenceLoss(
        tokens=sum(len(piece.flip) for piece in pieces),
        text_bytes=text_bytes,
        source_nll=summed("source_nll"),
        nll=summed("nll"),
        kl=summed("kl"),
        flips=int(summed("flip")),
        confident=int(summed("confident")),
        confident_flips=sum(int((piece.flip & piece.confident).sum()) for piece in pieces),
        lost_mass=summed("lost_mass"),
    )
