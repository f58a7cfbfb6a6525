"""Per channel: count, mean, variance and sum of squares of what a module reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.peers.blocks import batches


@dataclass(frozen=True)
class Moments:
    """Sums over `count` tokens, per input channel [channels], in double precision.

    `shift` is the first token's value, from which `total` and `squares` are counted, so that a constant channel has a
    variance of exactly zero.
    """

    count: int
    shift: torch.Tensor
    total: torch.Tensor
    squares: torch.Tensor

    @property
    def mean(self) -> torch.Tensor:
        """The mean of each channel."""
        return self.shift + self.total / self.count

    @property
    def variance(self) -> torch.Tensor:
        """The variance of each channel, over count - 1."""
        return (self.squares - self.total**2 / self.count).clamp(min=0) / max(1, self.count - 1)

    @property
    def norm(self) -> torch.Tensor:
        """The Euclidean norm of each channel over all tokens."""
        return (self.squares + 2 * self.shift * self.total + self.count * self.shift**2).clamp(min=0).sqrt()


class _Sums:
    """Takes part as a forward pre-hook and adds up what the module reads."""

    def __init__(self) -> None:
        self.found: Moments | None = None

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        values = args[0].flatten(0, -2).double()
        before = self.found
        shift = values[0].clone() if before is None else before.shift
        values = values - shift
        count, total, squares = len(values), values.sum(0), (values**2).sum(0)
        if before is not None:
            count, total, squares = before.count + count, before.total + total, before.squares + squares
        self.found = Moments(count, shift, total, squares)


@contextmanager
def recorded(model: nn.Module, readers: Iterable[str]) -> Iterator[dict[str, Moments]]:
    """Record what modules read while the context is open; on leaving it, the result holds their moments by path."""
    sums = {path: _Sums() for path in readers}
    hooks = [model.get_submodule(path).register_forward_pre_hook(recorder) for path, recorder in sums.items()]
    found: dict[str, Moments] = {}
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    found.update((path, recorder.found) for path, recorder in sums.items() if recorder.found is not None)


@torch.no_grad()
def moments(model: PreTrainedModel, readers: Iterable[str], ids: torch.Tensor) -> dict[str, Moments]:
    """Run the model on rows [n, length] and return the moments of each reader's input, by module path."""
    with recorded(model, readers) as found:
        for batch in batches(ids, model.get_input_embeddings().weight.shape[0]):
            model.base_model(input_ids=batch, use_cache=False)  # a head of many ids would take longer than the blocks
    return found
