"""Blocks of a model in memory: what goes through them, and the model with some of them replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from collapse.errors import UnsupportedError

Stream = Callable[[torch.Tensor], torch.Tensor]
LOGITS = 1 << 25  # numbers in one batch of logits, so that a few of them fit into memory at once


def batches(ids: torch.Tensor, vocabulary: int) -> Iterator[torch.Tensor]:
    """Yield the rows [n, length] in batches whose logits have at most `LOGITS` numbers, one row at least."""
    yield from torch.split(ids, max(1, LOGITS // (ids.shape[1] * vocabulary)))


def logits_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return logits [n, length, vocabulary] of rows of token ids."""
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the summed negative log-likelihood, in nats, of each token after a row's first."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").double()


@contextmanager
def replaced(streams: Mapping[nn.Module, Stream]) -> Iterator[None]:
    """Let blocks compute something else from the residual stream [n, length, width] within the context."""

    def forward(stream: Stream) -> Callable[..., torch.Tensor]:
        return lambda hidden, *_, **__: stream(hidden)

    for block, stream in streams.items():
        block.forward = forward(stream)
    try:
        yield
    finally:
        for block in streams:
            del block.forward


def skipped(blocks: Iterable[nn.Module]) -> dict[nn.Module, Stream]:
    """Return replacements that hand the residual stream on."""
    return {block: lambda hidden: hidden for block in blocks}


def residual_stream(
    model: PreTrainedModel, blocks: Sequence[nn.Module], ids: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the input of every block and the output of the last, each [n, length, width], and the logits."""
    seen: list[torch.Tensor] = []

    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args[0])

    def after(block: nn.Module, _: Any, output: Any) -> None:
        if not isinstance(output, torch.Tensor):
            raise UnsupportedError("gives more than the residual stream", where=type(block).__name__)
        seen.append(output)

    hooks = [block.register_forward_pre_hook(before) for block in blocks]
    hooks.append(blocks[-1].register_forward_hook(after))
    try:
        logits = logits_of(model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    return seen, logits
