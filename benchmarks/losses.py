"""What finished models lose against their source on the same text, each with the tokens of its own tokenizer.

A text is scored whole, after a line break as context, so that every model is asked for the same bytes. Where a cut
tokenizer takes other tokens than the source's, the distributions are compared on the output's tokens, which the source
has as well; the source's loss is that with its own tokens, so that regret has the price of the longer encoding in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from benchmarks.finished import Finished, Ids
from collapse.certify.losses import SequenceLoss, sequence_loss
from collapse.errors import CollapseError
from collapse.plan import Record

CONTEXT = "\n"


class Totals(Record):
    """Sums over texts, as rates: KL in nats a token, losses in bits a byte, shares of flips.

    `regret` is relative to the source's loss. Confident flips are among tokens where the source is confident.
    """

    texts: int
    tokens: int
    text_bytes: int
    kl: float
    bits_per_byte: float
    source_bits_per_byte: float
    regret: float
    flips: float
    confident_flips: float
    lost_mass: float


def totals(losses: Sequence[SequenceLoss]) -> Totals:
    """Return the rates of some texts together."""
    tokens, size = (sum(getattr(one, name) for one in losses) for name in ("tokens", "text_bytes"))
    nll, source_nll = (sum(getattr(one, name) for one in losses) for name in ("nll", "source_nll"))
    bits = size * log(2)
    return Totals(
        texts=len(losses),
        tokens=tokens,
        text_bytes=size,
        kl=sum(one.kl for one in losses) / tokens,
        bits_per_byte=nll / bits,
        source_bits_per_byte=source_nll / bits,
        regret=(nll - source_nll) / source_nll,
        flips=sum(one.flips for one in losses) / tokens,
        confident_flips=sum(one.confident_flips for one in losses) / max(1, sum(one.confident for one in losses)),
        lost_mass=sum(one.lost_mass for one in losses) / tokens,
    )


def start_of(text: str, tokenizer: Tokenizer, length: int) -> str:
    """Return as much of `text` as fits into `length` tokens, cut after a token, or all of it.

    Raises `CollapseError` where not even one token fits a whole number of characters.
    """
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    if len(offsets) <= length:
        return text
    for count in range(length, 0, -1):
        part = text[: offsets[count - 1][1]]
        if part and len(tokenizer.encode(part, add_special_tokens=False).ids) <= length:
            return part
    raise CollapseError(f"does not begin with {length} tokens", where=repr(text[:20]), fix="give other text")


def context_of(tokenizer: Tokenizer) -> Ids:
    """Return the ids of the context, with the special tokens that go before it, without those after."""
    encoded = tokenizer.encode(CONTEXT)
    last = max((place for place, special in enumerate(encoded.special_tokens_mask) if not special), default=0)
    return tuple(encoded.ids[: last + 1])


@dataclass(frozen=True)
class Comparison:
    """The loaded source and some loaded outputs, to be compared text by text."""

    source: tuple[Finished, PreTrainedModel]
    outputs: tuple[tuple[Finished, PreTrainedModel], ...]

    def losses(self, texts: Sequence[str]) -> Iterator[tuple[SequenceLoss, ...]]:
        """Yield, for every text, what each output loses on it. The source runs once for each encoding."""
        for text in texts:
            known: dict[Ids, torch.Tensor] = {}
            yield tuple(self._loss(text, *output, known) for output in self.outputs)

    def _loss(
        self, text: str, output: Finished, model: PreTrainedModel, known: dict[Ids, torch.Tensor]
    ) -> SequenceLoss:
        ids = tuple(output.tokenizer.encode(text, add_special_tokens=False).ids)
        logits = _logits(model, context_of(output.tokenizer), ids)
        targets, own = output.source_ids(ids), self._encoded(text)
        found = sequence_loss(
            self._source_logits(targets, known), logits, torch.tensor(targets),
            text_bytes=len(text.encode()), kept=None if output.kept is None else output.kept.tolist(),
        )  # fmt: skip
        if own == targets:
            return found
        return replace(found, source_nll=_nll(self._source_logits(own, known), torch.tensor(own)))

    def _encoded(self, text: str) -> Ids:
        return tuple(self.source[0].tokenizer.encode(text, add_special_tokens=False).ids)

    def _source_logits(self, ids: Ids, known: dict[Ids, torch.Tensor]) -> torch.Tensor:
        finished, model = self.source
        if ids not in known:
            known[ids] = _logits(model, context_of(finished.tokenizer), ids)
        return known[ids]


@torch.no_grad()
def _logits(model: PreTrainedModel, context: Ids, ids: Ids) -> torch.Tensor:
    """Return the logits that predict `ids` after `context`, [ids, vocabulary]."""
    rows = torch.tensor([[*context, *ids]])
    logits: torch.Tensor = model(input_ids=rows, use_cache=False).logits[0, len(context) - 1 : -1]
    return logits


def _nll(logits: torch.Tensor, targets: torch.Tensor) -> float:
    return float(-logits.double().log_softmax(-1).gather(-1, targets[:, None]).sum())
