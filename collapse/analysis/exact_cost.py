"""What it costs the logits to leave a site out, measured: only the site's block and what follows it is run again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from collapse.analysis.block_runs import BlockRuns
from collapse.analysis.left_out import left_out
from collapse.analysis.observed import See, observe
from collapse.analysis.sites import Group, Site
from collapse.certify.losses import CONFIDENT

ROWS = 256  # positions compared at a time
HAVE_MEANS = frozenset({"sublayers", "kv-groups", "neurons"})


@dataclass(frozen=True)
class Sums:
    """Losses of one batch, summed over its positions; `targets` are those that a token follows.

    `kl` is of the source's next-token distribution from that without the site, `nll` by how much the negative
    log-likelihood of the text grows; nats. `confident` positions are those where the source's most probable id has a
    probability of at least 0.5.
    """

    positions: int
    targets: int
    confident: int
    kl: float
    nll: float
    flips: int
    confident_flips: int


@dataclass(frozen=True)
class Loss:
    """What leaving a site out costs: nats a token, and shares of all, or of all confident, positions."""

    kl: float
    nll: float
    flips: float
    confident_flips: float

    @classmethod
    def of(cls, batches: Iterable[Sums]) -> Loss:
        """Return the means over all positions of some batches."""
        found = list(batches)
        total = {field.name: math.fsum(getattr(one, field.name) for one in found) for field in fields(Sums)}
        return cls(
            kl=total["kl"] / total["positions"],
            nll=total["nll"] / max(1, total["targets"]),
            flips=total["flips"] / total["positions"],
            confident_flips=total["confident_flips"] / max(1, total["confident"]),
        )


@dataclass(frozen=True)
class Reference:
    """The source's run of a batch: ids [batch, tokens], the stream before each block, log-probabilities [rows, ids]."""

    ids: Tensor
    states: Mapping[int, Tensor]
    scores: Tensor

    @classmethod
    def of(cls, runs: BlockRuns, ids: Tensor) -> Reference:
        """Run the source."""
        run = runs.run(ids)
        return cls(ids, run.states, run.logits.flatten(0, 1).float().log_softmax(-1))


def cost_of(runs: BlockRuns, reference: Reference, site: Site, mean: Tensor | None = None) -> Sums:
    """Return what the logits of a batch lose without a site, or with its mean in its place."""
    block = site.group.block
    state = reference.states[block]
    if site.group.kind == "layers":
        logits = runs.run(reference.ids, (block,), start=block, state=state).logits
    else:
        with left_out(runs.model, site, mean):
            logits = runs.run(reference.ids, start=block, state=state).logits
    return compared(reference, logits)


def compared(reference: Reference, logits: Tensor) -> Sums:
    """Return the losses of other logits, [batch, tokens, ids]; all are exactly 0 where the logits are the source's."""
    batch, tokens = reference.ids.shape
    targets = torch.cat([reference.ids[:, 1:], torch.full((batch, 1), -1)], 1).flatten()
    pieces = (torch.split(one, ROWS) for one in (reference.scores, logits.flatten(0, 1), targets))
    kl, nll, flips, confident, both = [], [], 0, 0, 0
    for source, other, wanted in zip(*pieces, strict=True):
        found = other.float().log_softmax(-1)
        terms = torch.where(source == -math.inf, 0.0, source.exp() * (source - found))
        kl.append(terms.sum(-1).clamp(min=0))  # rounding can leave -1e-9
        rows = torch.arange(len(wanted))[wanted >= 0]
        nll.append(source[rows, wanted[rows]] - found[rows, wanted[rows]])
        top, at = source.max(-1)
        flip, sure = found.argmax(-1) != at, top.exp() >= CONFIDENT
        flips, confident, both = flips + int(flip.sum()), confident + int(sure.sum()), both + int((flip & sure).sum())
    return Sums(
        positions=batch * tokens,
        targets=batch * (tokens - 1),
        confident=confident,
        kl=math.fsum(torch.cat(kl).tolist()),
        nll=math.fsum(torch.cat(nll).tolist()),
        flips=flips,
        confident_flips=both,
    )


def means_of(model: nn.Module, groups: Sequence[Group], batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return by group what a sublayer adds on average, and what neurons and KV groups give, [features] each.

    Blocks and experts have no mean that could stand in for them.
    """
    sums: dict[str, Tensor] = {}

    def adder(key: str) -> See:
        def add(_: Tensor, value: Tensor, __: Tensor | None) -> None:
            total = value.flatten(0, -2).double().sum(0)
            sums[key] = sums[key] + total if key in sums else total

        return add

    handles = [observe(model, group, adder(group.key)) for group in groups if group.kind in HAVE_MEANS]
    try:
        with torch.no_grad():
            for ids in batches:
                model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    tokens = sum(ids.numel() for ids in batches)
    return {key: (total / tokens).float() for key, total in sums.items()}
