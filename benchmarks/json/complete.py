"""Lets a model complete prompts greedily with its KV cache, and judges every character that it writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from benchmarks.greedy import end_tokens, greedy
from benchmarks.json.grammar import Brackets, Grammar
from collapse.plan import Record

BATCH = 16  # prompts of one length that are completed together, so that none is padded
HOLE = "\ufffd"  # stands for bytes that are no whole character yet


class Outcome(Record):
    """What became of one prompt.

    Attributes:
        grammar: prompt and continuation could become a document at every character, up to the end of the value.
        matched: no closing bracket came that was not due.
        closed: the outermost bracket was closed within the new tokens.
        parses: what was written up to there is a document to a parser.
        new_tokens: that the model was asked for.
    """

    grammar: bool
    matched: bool
    closed: bool
    parses: bool
    new_tokens: int

    @property
    def balanced(self) -> bool:
        """Whether every bracket was closed by its own kind."""
        return self.matched and self.closed


@dataclass
class Continuation:
    """One prompt while it is being completed; `text` is what counts of it so far."""

    text: str
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    brackets: Brackets = field(default_factory=Brackets)
    grammar: Grammar = field(default_factory=Grammar)
    _read: int = 0

    def __post_init__(self) -> None:
        self.brackets.feed(self.text)
        self.grammar.feed(self.text)

    @property
    def over(self) -> bool:
        """Whether the value is closed, its brackets are broken, or the model has ended it."""
        return self.ended or self.brackets.over

    def add(self, token: int, decode: Callable[[list[int]], str]) -> None:
        """Read one more token; an unfinished character waits for its other bytes."""
        self.tokens.append(token)
        self._feed(decode(self.tokens).rstrip(HOLE))

    def end(self, decode: Callable[[list[int]], str]) -> None:
        """Read what waited, as nothing more will come."""
        if not self.brackets.over:
            self._feed(decode(self.tokens))
        self.ended = True

    def _feed(self, whole: str) -> None:
        fresh = whole[self._read :]
        fresh = fresh[: self.brackets.feed(fresh)]
        self.grammar.feed(fresh)
        self.text, self._read = self.text + fresh, self._read + len(fresh)

    @property
    def outcome(self) -> Outcome:
        """What became of it."""
        closed = self.brackets.closed
        return Outcome(
            grammar=self.grammar.alive, matched=not self.brackets.broken, closed=closed,
            parses=closed and parses(self.text), new_tokens=len(self.tokens),
        )  # fmt: skip


def parses(text: str) -> bool:
    """Whether Python's parser takes the text; unlike JSON it knows NaN and Infinity, which are refused."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


class _Reader(StoppingCriteria):  # type: ignore[misc]
    """Reads each new token of a batch, and ends the rows that are over."""

    def __init__(self, rows: Sequence[Continuation], ends: frozenset[int], decode: Callable[[list[int]], str]) -> None:
        self.rows, self.ends, self.decode = rows, ends, decode

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        for row, token in zip(self.rows, input_ids[:, -1].tolist(), strict=True):
            if not row.over:
                if token in self.ends:
                    row.ended = True
                else:
                    row.add(token, self.decode)
        return torch.tensor([row.over for row in self.rows], device=input_ids.device)


def complete(
    model: PreTrainedModel, tokenizer: Tokenizer, prompts: Sequence[str], new: int
) -> Iterator[tuple[int, Outcome]]:
    """Yield number and outcome of every prompt, in batches of prompts of one length.

    Nothing is sampled and nothing is penalised, whatever the model's generation config says; only the tokens that end a
    text are taken from there.
    """
    ids = [_without_end(tokenizer, text) for text in prompts]
    lengths = sorted({len(row) for row in ids})
    for length in lengths:
        numbers = [number for number, row in enumerate(ids) if len(row) == length]
        for start in range(0, len(numbers), BATCH):
            batch = numbers[start : start + BATCH]
            rows = [Continuation(prompts[number]) for number in batch]
            _run(model, tokenizer, torch.tensor([ids[number] for number in batch]), rows, new)
            yield from ((number, row.outcome) for number, row in zip(batch, rows, strict=True))


def _without_end(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text that goes on: special tokens before it, none after."""
    encoded = tokenizer.encode(text)
    last = max(place for place, special in enumerate(encoded.special_tokens_mask) if not special)
    return list(encoded.ids[: last + 1])


@torch.no_grad()
def _run(
    model: PreTrainedModel, tokenizer: Tokenizer, ids: torch.Tensor, rows: Sequence[Continuation], new: int
) -> None:
    ends = end_tokens(model)

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False))

    reader = StoppingCriteriaList([_Reader(rows, frozenset(ends), decode)])
    with greedy(model, new, ends):
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), stopping_criteria=reader)
    for row in rows:
        row.end(decode)
