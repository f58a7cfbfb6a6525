"""Two models with the same token ids, of which one is to become like the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collapse.errors import UnsupportedError
from collapse.heal.losses import divergence


@dataclass(frozen=True)
class Pair:
    """The source, or what of it the exact rewrites leave, and the student, which has the same token ids.

    Attributes:
        source: never changed.
        student: the collapsed model; its touched parameters are changed in place.
        touched: state-dict names of the student's parameters that may be trained.
        blocks: module paths of blocks that both have, the source's and the student's.
    """

    source: PreTrainedModel
    student: PreTrainedModel
    touched: frozenset[str]
    blocks: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Seen:
    """Logits [n, tokens, ids], and the residual stream after each block looked at, [n, tokens, width]."""

    logits: Tensor
    streams: tuple[Tensor, ...]


def run(model: nn.Module, ids: Tensor, blocks: Sequence[nn.Module] = ()) -> Seen:
    """Run the model on ids [n, tokens], and look at what leaves some of its blocks."""
    with _watched(blocks) as streams:
        logits = model(input_ids=ids, use_cache=False).logits
    return Seen(logits, tuple(streams))


@contextmanager
def _watched(blocks: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    streams: list[Tensor] = []

    def after(block: nn.Module, _: Any, output: Any) -> None:
        stream = output if isinstance(output, Tensor) else output[0]
        if not isinstance(stream, Tensor):
            raise UnsupportedError("does not give the residual stream", where=type(block).__name__)
        streams.append(stream)

    hooks = [block.register_forward_hook(after) for block in blocks]
    try:
        yield streams
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def divergences(source: nn.Module, student: nn.Module, windows: Tensor) -> Tensor:
    """Return KL(source || student) of every window of ids [n, tokens], mean over its tokens, [n]; nats."""
    rows = [divergence(run(source, ids).logits, run(student, ids).logits) for ids in windows.unsqueeze(1)]
    return torch.cat(rows) if rows else torch.zeros(0)
