"""Runs a model with some blocks left out, from any block on: what trying out many shorter models costs least with.

What comes before the first change is as it was, so its outputs are kept and used again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from collapse.analysis.stand_in import uncompiled
from collapse.errors import UnsupportedError

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Run:
    """One forward of a batch of sequences of one length.

    Attributes:
        logits: [batch, tokens, ids].
        states: the residual stream before each block from the first one run on, [batch, tokens, hidden]; under the
            number of blocks, what the last one gave.
    """

    logits: Tensor
    states: Mapping[int, Tensor]


class BlockRuns:
    """The blocks of `model` in its module list `site`.

    A block takes the residual stream as its first argument, and gives the next one, alone or first of a tuple. Raises
    `UnsupportedError` for a model whose blocks do not.
    """

    def __init__(self, model: nn.Module, site: str) -> None:
        self.model, self.site = model, site
        self.blocks = tuple(model.get_submodule(site).children())
        self._extra: dict[int, int] = {}
        self.run(torch.zeros(1, 1, dtype=torch.long))

    def __len__(self) -> int:
        return len(self.blocks)

    def run(self, ids: Tensor, skipped: Collection[int] = (), start: int = 0, state: Tensor | None = None) -> Run:
        """Run `ids`, [batch, tokens], without the `skipped` blocks.

        With `state` the blocks before `start` are not run; `state` is what stands before block `start`, and where
        `start` is the number of blocks, before what follows them.
        """
        turn = _Turn(frozenset(skipped), start if state is not None else 0, state, self._extra)
        with self._replaced(turn), uncompiled(), torch.no_grad():
            logits = self.model(input_ids=ids, use_cache=False).logits
        return Run(logits, turn.states)

    @contextmanager
    def without(self, skipped: Collection[int]) -> Iterator[nn.Module]:
        """Give the model, in which the `skipped` blocks pass the stream on meanwhile; it can be differentiated."""
        with self._replaced(_Turn(frozenset(skipped), 0, None, self._extra)):
            yield self.model

    @contextmanager
    def _replaced(self, turn: _Turn) -> Iterator[None]:
        for number, block in enumerate(self.blocks):
            block.forward = turn.forward(number, block.forward)
        try:
            yield
        finally:
            for block in self.blocks:
                del block.forward


@dataclass(frozen=True)
class _Turn:
    """How the blocks behave in one forward, and what was seen; `extra` is what a block gives beside the stream."""

    skipped: frozenset[int]
    start: int
    state: Tensor | None
    extra: dict[int, int]
    states: dict[int, Tensor] = field(default_factory=dict)

    def forward(self, number: int, original: Forward) -> Forward:
        """Return what block `number` does instead of `original`."""

        def replaced(*arguments: Any, **options: Any) -> Any:
            stream = arguments[0] if arguments else options.get("hidden_states")
            if not isinstance(stream, Tensor):
                raise _unlike(original)
            if number < self.start:
                given = self.state if number == self.start - 1 and self.state is not None else stream
                return self._form(number, given)
            self.states[number] = stream
            found = self._form(number, stream) if number in self.skipped else original(*arguments, **options)
            after = found if isinstance(found, Tensor) else found[0]
            if not isinstance(after, Tensor) or after.shape != stream.shape:
                raise _unlike(original)
            self.extra.setdefault(number, 0 if isinstance(found, Tensor) else len(found))
            self.states[number + 1] = after
            return found

        return replaced

    def _form(self, number: int, stream: Tensor) -> Any:
        """Return the stream as the block gives it; what it gives beside it is for who asks for attention weights."""
        count = self.extra.get(number, 0)
        return (stream, *[None] * (count - 1)) if count else stream


def _unlike(forward: Forward) -> UnsupportedError:
    name = type(getattr(forward, "__self__", forward)).__name__
    return UnsupportedError(f"{name} does not take the residual stream and give it back", where="layers")
