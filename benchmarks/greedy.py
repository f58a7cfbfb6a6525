"""Plain greedy `generate()`: nothing of the model's own generation config but what is said here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig, PreTrainedModel


def end_tokens(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the ids that end a text by the model's generation config."""
    given = model.generation_config.eos_token_id
    return tuple(given) if isinstance(given, list | tuple) else () if given is None else (given,)


@contextmanager
def greedy(model: PreTrainedModel, new: int, ends: Sequence[int] = (), **options: Any) -> Iterator[None]:
    """Let `generate` within the context take the likeliest of all ids, `new` times or up to one of `ends`.

    A config that is given to `generate` would be filled up from the model's own, with its penalties for example, so the
    model gets another one for the while.
    """
    before = model.generation_config
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=new, eos_token_id=list(ends) or None, pad_token_id=min(ends, default=0),
        use_cache=True, **options,
    )  # fmt: skip
    try:
        yield
    finally:
        model.generation_config = before
