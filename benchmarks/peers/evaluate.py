"""How far a smaller model is from its source on text: KL, loss, and how often it would choose another token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from benchmarks.peers.blocks import batches, logits_of, replaced, residual_stream, skipped
from benchmarks.peers.structure import Structure
from benchmarks.peers.text import Rows
from collapse.plan import Record

CONFIDENT = 0.5


class Scores(Record):
    """Means over the `tokens` that follow another one in their row; losses and KL in nats.

    Attributes:
        kl: of the source's distribution from the smaller model's, KL(source || smaller).
        nll: negative log-likelihood of the text's tokens; `perplexity` is its exponential.
        bits_per_byte: the same in bits, over bytes of text, so that it can be compared between vocabularies.
        flips: share of tokens where another token is the likeliest.
        confident: share of tokens where the source's likeliest has at least half of the probability.
        confident_flips: share of those where the smaller model's likeliest is another one.
    """

    tokens: int
    kl: float
    nll: float
    perplexity: float
    bits_per_byte: float
    flips: float
    confident: float
    confident_flips: float


@dataclass(frozen=True)
class Reference:
    """The source on some rows: what leaves its last block is kept, so that only its head runs again.

    With `kept` the rows have new ids, new id n being the source's `kept[n]`, and the source's distribution is the one
    over kept ids.
    """

    model: PreTrainedModel
    structure: Structure
    rows: Rows
    kept: torch.Tensor | None = None
    _last: list[torch.Tensor] = field(default_factory=list, init=False)

    @property
    def vocabulary(self) -> int:
        """How many ids the source has."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield batches of ids [n, length] and the source's log-probabilities [n, length - 1, ids]."""
        blocks = self.structure.blocks(self.model)
        for number, batch in enumerate(batches(self.rows.ids, self.vocabulary)):
            ids = batch if self.kept is None else self.kept[batch]
            if number == len(self._last):
                stream, logits = residual_stream(self.model, blocks, ids)
                self._last.append(stream[-1])
            else:
                hidden = self._last[number]
                with replaced(skipped(blocks) | {blocks[-1]: lambda _, hidden=hidden: hidden}):
                    logits = logits_of(self.model, ids)
            yield batch, _log_probabilities(logits if self.kept is None else logits[..., self.kept])


def _log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    return logits[:, :-1].float().log_softmax(-1)


@torch.no_grad()
def evaluate(reference: Reference, smaller: PreTrainedModel) -> Scores:
    """Run both models on the reference's rows in fp32, a batch at a time."""
    sums = torch.zeros(5, dtype=torch.double)
    for ids, source in reference.pairs():
        sums += _sums(source, _log_probabilities(logits_of(smaller, ids)), ids[:, 1:])
    rows = reference.rows
    return _scores(sums.tolist(), len(rows.ids) * (rows.ids.shape[1] - 1), rows.byte_count)


def _sums(source: torch.Tensor, smaller: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return sums over tokens: KL, loss, flips, confident tokens, flips among those."""
    loss = -smaller.gather(-1, targets[..., None]).double().sum()
    likeliest, first = source.max(-1)
    flips = first != smaller.argmax(-1)
    probability = source.exp()
    kl = torch.where(probability > 0, probability * (source - smaller), 0.0).sum(-1).double().sum()
    confident = likeliest.exp() >= CONFIDENT
    return torch.stack([kl, loss, flips.sum(), confident.sum(), (flips & confident).sum()]).double()


def _scores(sums: Sequence[float], tokens: int, byte_count: int) -> Scores:
    kl, loss, flips, confident, confident_flips = sums
    return Scores(
        tokens=tokens,
        kl=kl / tokens,
        nll=loss / tokens,
        perplexity=math.exp(min(loss / tokens, 700)),
        bits_per_byte=loss / math.log(2) / max(1, byte_count),
        flips=flips / tokens,
        confident=confident / tokens,
        confident_flips=confident_flips / max(1, confident),
    )
