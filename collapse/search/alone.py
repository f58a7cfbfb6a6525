"""What every trial of one block alone shares: the source's own stream to fit to, and what the source says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collapse.analysis.block_runs import BlockRuns
from collapse.analysis.layer_search import BATCH
from collapse.analysis.layers import Layers
from collapse.search.calls import block_calls, watched

ROWS = 8  # sequences that run together

Pairs = list[tuple[Tensor, Tensor]]


def readings(
    model: PreTrainedModel, layers: Layers, windows: Tensor, paths: Mapping[int, Sequence[str]]
) -> Iterator[tuple[str, Pairs]]:
    """Yield what modules read and write on the model's own stream, batch by batch; `paths` has them by their block."""
    blocks = list(model.get_submodule(layers.site).children())
    starts, calls = zip(*(block_calls(model, blocks, ids) for ids in torch.split(windows, ROWS)), strict=True)
    streams = list(starts)
    for number, block in enumerate(blocks):
        with watched(model, paths.get(number, ())) as seen:
            streams = [call[number](block, stream) for call, stream in zip(calls, streams, strict=True)]
        yield from seen.items()


@dataclass(frozen=True)
class Alone:
    """The source on some windows, to compare models with that differ from it in one block."""

    layers: Layers
    said: tuple[Said, ...]

    @classmethod
    def of(cls, model: PreTrainedModel, layers: Layers, windows: Tensor) -> Alone:
        """Run the source once on token ids [sequences, tokens]."""
        runs = BlockRuns(model, layers.site)
        return cls(layers, tuple(Said.of(runs, ids) for ids in torch.split(windows, BATCH)))

    def kl(self, smaller: PreTrainedModel, block: int) -> float:
        """Return the mean KL divergence of the source from a model that is like it before `block`, nats a token."""
        tried = BlockRuns(smaller, self.layers.site)
        total = sum(one.kl(tried.run(one.ids, start=block, state=one.states[block]).logits) for one in self.said)
        return total / sum(one.ids.numel() for one in self.said)


@dataclass(frozen=True)
class Said:
    """The source on a batch of ids [n, tokens]: its stream before every block, and log-probabilities [n * tokens, ids].

    These are kept, since they are needed for every trial.
    """

    ids: Tensor
    states: Mapping[int, Tensor]
    says: Tensor

    @classmethod
    def of(cls, runs: BlockRuns, ids: Tensor) -> Said:
        """Run the source."""
        seen = runs.run(ids)
        return cls(ids, seen.states, seen.logits.flatten(0, -2).float().log_softmax(-1))

    def kl(self, logits: Tensor) -> float:
        """Return the KL divergence of what the source says from other logits, summed over tokens, nats."""
        found = logits.flatten(0, -2).float().log_softmax(-1)
        rows = zip(torch.split(self.says, ROWS), torch.split(found, ROWS), strict=True)
        return sum(float(nn.functional.kl_div(q, p, reduction="sum", log_target=True)) for p, q in rows)
