"""Which blocks a model can lose at the least cost on a domain: a search over what was measured.

Single blocks say little about several together, so after every choice the contenders are measured again, on the model
that the choice left. Which blocks are contenders is measured on a part of the text or, where there are many blocks,
estimated by gradients; which of them goes is always measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from collapse.analysis.block_runs import BlockRuns
from collapse.analysis.first_order import sweep
from collapse.analysis.sites import Group, Sizes

BATCH = 4  # sequences in one forward: more would set the peak of memory by their logits
FIRST = 1  # batches on which all blocks are measured or estimated, before the best of them are measured on all
CONTENDERS = 6
MANY = 16  # blocks: where there are more, first-order estimates of all cost much less than measuring all, and decide

SEED = 0  # of the labels that are drawn for estimates

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Step:
    """One point of the path: the blocks that are gone, and the mean KL divergence a token on calibration text, nats."""

    dropped: tuple[int, ...]
    kl: float


@dataclass(frozen=True)
class _Batch:
    """Sequences, [batch, tokens], and the source's stream after its last block."""

    ids: Tensor
    final: Tensor


class LayerSearch:
    """Drops one block after another, each time the one whose loss costs the logits least.

    `windows` are token ids, [sequences, tokens]. The cost is the mean over all positions of the KL divergence of the
    source's next-token distribution from the shorter model's.
    """

    def __init__(self, runs: BlockRuns, windows: Tensor, *, contenders: int = CONTENDERS) -> None:
        self._runs, self._contenders = runs, contenders
        self._batches = [_Batch(ids, runs.run(ids).states[len(runs)]) for ids in torch.split(windows, BATCH)]

    def steps(
        self, size: int, allowed: Callable[[tuple[int, ...]], bool], progress: Progress, gone: tuple[int, ...] = ()
    ) -> Iterator[Step]:
        """Yield ever shorter models out of `size` blocks, one block fewer each time, while `allowed` finds one.

        `allowed` says of a set of dropped blocks, ascending, whether the architecture can do without them; `gone` is
        the set to begin with.
        """
        while len(gone) < size - 1 and (step := self._next(gone, size, allowed)) is not None:
            yield step
            gone = step.dropped
            progress(len(gone), size - 1)

    def _next(self, gone: tuple[int, ...], size: int, allowed: Callable[[tuple[int, ...]], bool]) -> Step | None:
        left = [block for block in range(size) if block not in gone]
        measured = size <= MANY
        rough = self._costs(gone, left, self._batches[:FIRST]) if measured else self._estimates(gone, left)
        ranked = sorted(left, key=lambda block: (rough[block], block))
        best = list(islice((b for b in ranked if allowed(tuple(sorted((*gone, b))))), self._contenders))
        if not best:
            return None
        exact = rough if measured and len(self._batches) <= FIRST else self._costs(gone, best, self._batches)
        chosen = min(best, key=lambda block: (exact[block], block))
        return Step(tuple(sorted((*gone, chosen))), exact[chosen])

    def _estimates(self, gone: tuple[int, ...], candidates: Sequence[int]) -> Mapping[int, float]:
        """Return what dropping each candidate costs by the gradients of one run without those that are gone."""
        paths = {block: f"{self._runs.site}.{block}" for block in candidates}
        groups = [Group("layers", path, block, 1, path, Sizes()) for block, path in paths.items()]
        with self._runs.without(gone) as model:
            found = sweep(model, groups, [batch.ids for batch in self._batches[:FIRST]], SEED, lambda done, total: None)
        return {group.block: float(found[group.key].fisher[0]) for group in groups}

    def _costs(
        self, gone: tuple[int, ...], candidates: Sequence[int], batches: Sequence[_Batch]
    ) -> Mapping[int, float]:
        """Return what it costs to drop each candidate beside those that are gone."""
        totals = dict.fromkeys(candidates, 0.0)
        for batch in batches:
            now = self._runs.run(batch.ids, gone)
            source = self._runs.run(batch.ids, start=len(self._runs), state=batch.final).logits
            for block in candidates:
                tried = self._runs.run(batch.ids, (*gone, block), start=block, state=now.states[block])
                totals[block] += divergence(source, tried.logits)
        positions = self._positions(batches)
        return {block: total / positions for block, total in totals.items()}

    @staticmethod
    def _positions(batches: Sequence[_Batch]) -> int:
        return sum(batch.ids.numel() for batch in batches)


def divergence(source: Tensor, found: Tensor) -> float:
    """Return the KL divergence of the distributions of `source` logits from those of `found`, summed over positions.

    Logits are [..., ids]; nats. Row by row, so that no third copy of the logits is held.
    """

    def rows(logits: Tensor) -> tuple[Tensor, ...]:
        return torch.split(logits.flatten(0, -2), 256)

    total = 0.0
    for reference, other in zip(rows(source), rows(found), strict=True):
        log_p, log_q = reference.float().log_softmax(-1), other.float().log_softmax(-1)
        total += float(torch.sum(log_p.exp() * (log_p - log_q), dtype=torch.float64))
    return total
