"""Text as the collapsed model reads it: ids of its own tokenizer, in windows of one length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor

from collapse.checkpoint import Checkpoint
from collapse.plan import Plan
from collapse.rewrite.tensors import token_narrow
from collapse.rewrite.tokenizer import narrow_side_files
from collapse.sequences import Ids, apart, encoder
from collapse.tokenizer import TOKENIZER

Encode = Callable[[str], Ids]
Found = TypeVar("Found")
PIECE = 1 << 16  # characters of text that are encoded at a time


def encoder_of(checkpoint: Checkpoint, plan: Plan) -> Encode:
    """Return the tokenizer of the collapsed model, which gives ids of its own; special tokens are added."""
    narrow, own = token_narrow(plan), encoder(checkpoint)
    if narrow is None:
        return own
    raw = (checkpoint.root / TOKENIZER).read_bytes()
    tokenizer = Tokenizer.from_str(narrow_side_files({TOKENIZER: raw}, narrow.kept, narrow.size)[TOKENIZER].decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: tuple(tokenizer.encode(text).ids)


def windows(blocks: Sequence[str], encode: Encode, length: int, count: int) -> Tensor:
    """Return windows [n, length] that follow each other through the text, at most `count`, evenly spread.

    Of text that is much longer than these, pieces are read that are spread over it as well.
    Each begins with the special tokens that the tokenizer puts before a text.
    """
    pieces = _spread(list(_pieces(blocks)), count)
    picked = _spread(list(_windows(pieces, encode, length)), count)
    return torch.tensor(picked, dtype=torch.long).reshape(-1, length)


def _spread(found: list[Found], count: int) -> list[Found]:
    """Return at most `count`, evenly spread."""
    return found if len(found) <= count else [found[n * len(found) // count] for n in range(count)]


def _windows(pieces: Sequence[str], encode: Encode, length: int) -> Iterator[Ids]:
    first = encode("")
    for text in pieces:
        ids = encode(text)
        lead = first if first and ids[: len(first)] == first and len(first) < length else ()
        rest = iter(ids[len(lead) :])
        while len(window := (*lead, *islice(rest, length - len(lead)))) == length:
            yield window


def _pieces(blocks: Sequence[str]) -> Iterator[str]:
    held: list[str] = []
    for block in blocks:
        held.append(block)
        if sum(map(len, held)) >= PIECE:
            yield "".join(held)
            held = []
    yield "".join(held)


def starts(blocks: Sequence[str], encode: Encode, length: int, count: int) -> Tensor:
    """Return windows [n, length] that begin at blocks, at most `count`, no two of them with a block in common."""
    return torch.tensor(apart(blocks, count, encode, length), dtype=torch.long).reshape(-1, length)
