"""Text that the source writes itself, after beginnings of the text that is fitted to.

What a user gives is a few kinds of text, and a fit to those is bad for the next one. What the source goes on with is
spread over all that it knows, as its own distribution has it, and needs no other text: models were quantised so without
data (Liu et al., 2023, "LLM-QAT"). It is fitted to as the user's text is; it chooses and judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation.utils import GenerationMixin

from collapse.errors import UnsupportedError
from collapse.trace import quiet

BEGUN = 16  # tokens of each sequence that are given; the shorter, the more kinds of text come of it
TEMPERATURE = 1.0
LEAST = 0.05  # of the likeliest token's probability: what is less likely is not drawn (min-p), it ends in noise
TOGETHER = 64  # sequences at a time at most
ROOM = 1 << 30  # bytes that the caches of those may take, or a quarter of what the weights do

Progress = Callable[[int, int], None]


def can_write(model: PreTrainedModel) -> bool:
    """Return whether a model has what it takes to go on with a text."""
    return isinstance(model, GenerationMixin)


def written(model: PreTrainedModel, windows: Tensor, progress: Progress, seed: int = 0) -> Tensor:
    """Return sequences that begin as `windows`, ids [n, tokens], do, and that the model goes on with.

    They are as long as the windows: where the model would end a text, it goes on. Equal seeds give equal sequences on
    one machine; the state of torch's generator stays as it was. Raises `UnsupportedError` where the model cannot.
    """
    if not len(windows):
        return windows
    begun = min(BEGUN, windows.shape[1] - 1)
    more = windows.shape[1] - begun
    asked = GenerationConfig(
        do_sample=True, temperature=TEMPERATURE, min_p=LEAST, top_k=0, top_p=1.0,
        max_new_tokens=more, min_new_tokens=more, pad_token_id=0,
    )  # fmt: skip
    found: list[Tensor] = []
    with torch.random.fork_rng(devices=[]), _own_distribution(model), quiet():
        torch.manual_seed(seed)
        weights = sum(one.numel() * one.element_size() for one in model.parameters())
        parts = torch.split(windows[:, :begun], together(model.config, weights, windows.shape[1]))
        for done, ids in enumerate(parts, 1):
            found.append(_gone_on(model, ids, asked))
            progress(done, len(parts))
    return torch.cat(found)


def together(config: PreTrainedConfig, weights: int, length: int) -> int:
    """Return how many sequences of `length` tokens are written at a time, where the weights have so many bytes.

    A cache of keys and values in fp32 is taken to be as wide as the residual stream: fewer heads have a smaller one.
    """
    text = config.get_text_config()
    sizes = [getattr(text, name, None) for name in ("num_hidden_layers", "hidden_size")]
    cache = 2 * 4 * length * prod(size if isinstance(size, int) else 1 << 10 for size in sizes)
    return min(TOGETHER, max(1, max(weights // 4, ROOM) // cache))


def _gone_on(model: PreTrainedModel, ids: Tensor, asked: GenerationConfig) -> Tensor:
    try:
        found: Tensor = model.generate(ids, generation_config=asked, attention_mask=torch.ones_like(ids))
    except Exception as error:  # a model's own code runs here: logits without a number, say
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UnsupportedError(f"cannot write text to fit to ({reason})", where=type(model).__name__) from error
    if found.shape != (len(ids), ids.shape[1] + int(asked.max_new_tokens or 0)):
        raise UnsupportedError("writes text of another length than asked for", where=type(model).__name__)
    return found


@contextmanager
def _own_distribution(model: PreTrainedModel) -> Iterator[None]:
    """Let nothing of a model's generation_config in, such as a repetition penalty or `use_cache: false`.

    What a call leaves open comes from there, and there is no value that says: as if it were not there.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig(eos_token_id=own.eos_token_id if own else None)
    try:
        yield
    finally:
        model.generation_config = own
