"""What smaller models lose against the source on sequences of their own: on some to choose, on others to judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collapse.analysis.block_runs import BlockRuns
from collapse.analysis.layer_search import BATCH, divergence
from collapse.certify.losses import SequenceLoss, sequence_loss

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Judge:
    """The source on some `windows`, token ids [sequences, tokens]; only its head is run again for each comparison."""

    runs: BlockRuns
    windows: Tensor
    finals: tuple[Tensor, ...]

    @classmethod
    def of(cls, runs: BlockRuns, windows: Tensor) -> Judge:
        """Run the source once."""
        finals = tuple(runs.run(ids).states[len(runs)] for ids in torch.split(windows, BATCH))
        return cls(runs, windows, finals)

    def kl(self, smaller: PreTrainedModel) -> float:
        """Return the mean KL divergence of the source's distribution from the smaller model's, nats a token."""
        total = sum(divergence(source, found) for _, source, found in self._pairs(smaller))
        return total / self.windows.numel()

    def losses(
        self, smaller: PreTrainedModel, text_bytes: Callable[[Sequence[int]], int], progress: Progress
    ) -> Iterator[SequenceLoss]:
        """Yield what each sequence loses."""
        for number, (ids, source, found) in enumerate(self._pairs(smaller)):
            for row, reference, logits in zip(ids, source, found, strict=True):
                targets = row[1:]
                yield sequence_loss(reference[:-1], logits[:-1], targets, text_bytes=text_bytes(targets.tolist()))
            progress(number + 1, len(self.finals))

    def _pairs(self, smaller: PreTrainedModel) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield batches of ids and the logits of both models, [batch, tokens, ids]."""
        for ids, final in zip(torch.split(self.windows, BATCH), self.finals, strict=True):
            source = self.runs.run(ids, start=len(self.runs), state=final).logits
            with torch.no_grad():
                yield ids, source, smaller(input_ids=ids, use_cache=False).logits
