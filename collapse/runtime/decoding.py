"""Decodes token by token with several models in turns, and times each step.

In turns, whatever else the machine does falls on all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import torch
from transformers import PreTrainedModel

from collapse.errors import UnsupportedError
from collapse.trace import CACHE_ARGUMENTS, cache_argument

Clock = Callable[[], float]  # seconds from any start
WARM_UP = 4  # steps of each model that are not counted
FEWEST = 8  # steps that are counted, however long they take


class Decoding:
    """One model in the middle of a generation, after a prompt, [sequences, tokens]; each step decodes one token.

    Raises `UnsupportedError` for a model without a KV cache.
    """

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor) -> None:
        self.model, self.length, self.token = model, prompt.shape[1], prompt[:, -1:]
        self._name = cache_argument(model) or ""
        with torch.no_grad():
            self._output = model(input_ids=prompt, use_cache=True)
        if not self._name or self._cache() is None:
            raise UnsupportedError("the model has no KV cache", where="decode step", fix="give one that generates")

    def _cache(self) -> Any:
        found = (getattr(self._output, name, None) for name in CACHE_ARGUMENTS)
        return next((cache for cache in found if cache is not None), None)

    @property
    def arguments(self) -> dict[str, Any]:
        """What the next step is called with."""
        mask = torch.ones(len(self.token), self.length + 1, dtype=torch.long)
        return {"input_ids": self.token, "attention_mask": mask, self._name: self._cache(), "use_cache": True}

    def step(self, clock: Clock = time.perf_counter) -> float:
        """Decode one token and return the seconds that the model took."""
        arguments: Mapping[str, Any] = self.arguments
        with torch.no_grad():
            start = clock()
            self._output = self.model(**arguments)
            seconds = clock() - start
        self.length += 1
        return seconds


def in_turns(
    decodings: Sequence[Decoding],
    steps: int,
    *,
    warm_up: int = WARM_UP,
    seconds: float = inf,
    clock: Clock = time.perf_counter,
) -> tuple[tuple[float, ...], ...]:
    """Return the seconds of each step of each model, [models][steps], after steps for warming up.

    The order turns around from step to step. Ends early, but not before `FEWEST` steps, once all steps together have
    taken `seconds`.
    """
    rounds: list[list[float]] = []
    total = 0.0
    for number in range(warm_up + steps):
        if number >= warm_up + FEWEST and total >= seconds:
            break
        order = range(len(decodings)) if number % 2 else reversed(range(len(decodings)))
        taken = {place: decodings[place].step(clock) for place in order}
        total += sum(taken.values())
        rounds.append([taken[place] for place in range(len(decodings))])
    return tuple(zip(*rounds[warm_up:], strict=True))
