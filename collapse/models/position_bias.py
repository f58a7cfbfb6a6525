"""Position entropy of a token context, and the attention bias that it gates.

Everything here is a pure function of tensors (or one small module), causal, free of control flow that depends
on data, and linear in the context length times a small constant, so that it traces once for every length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DIGIT_BASE = 256  # integers up to 256 are exact in bfloat16, the coarsest dtype that caches are kept in
PAIR_BASE = 1 << 31


@dataclass(frozen=True)
class EntropySettings:
    """What the position entropy depends on besides the tokens.

    `window` is the number of places a fresh gap may point to (the longest context), `recall` how many recent
    gaps count as expected, `prior` how many expected gaps are assumed before the first token: a short context
    gives too little evidence to call a text irregular, and so has a low entropy.
    """

    window: int = 1024
    recall: int = 16
    prior: int = 256


def recurrence_gaps(tokens: Tensor) -> Tensor:
    """Return how many places ago each token last occurred; 0 where it occurs for the first time.

    Args:
        tokens: integer ids `[batch, length]`.

    Returns:
        int64 `[batch, length]`. A stable sort puts equal tokens side by side, so this takes
        `O(length log length)` time and `O(length)` memory.
    """
    ordered, origin = torch.sort(tokens, dim=1, stable=True)
    repeats = F.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0), value=False)
    distance = F.pad(origin[:, 1:] - origin[:, :-1], (1, 0))
    return torch.zeros_like(origin).scatter(1, origin, distance * repeats)


def recalled(gaps: Tensor, recall: int) -> Tensor:
    """Return where a gap equals one of the `recall` gaps before it (first occurrences never do).

    In text that repeats a layout (log lines, table rows, JSON records) most tokens last occurred one record
    ago, just as their neighbours did; prose seldom repeats a distance.

    Args:
        gaps: int64 `[batch, length]` from `recurrence_gaps`.
        recall: how many earlier gaps to look at.

    Returns:
        bool `[batch, length]`.
    """
    place = torch.arange(gaps.shape[1], device=gaps.device)
    before = place[:, None] + torch.arange(recall, device=gaps.device)
    earlier = F.pad(gaps, (recall, 0), value=-1)[:, before]
    return (earlier == gaps[..., None]).any(-1) & (gaps > 0)


def expected(tokens: Tensor, recall: int) -> Tensor:
    """Return where a token sits at a distance that the text just used: its own gap or its pair's is recalled.

    The pair is the token with the one before it: it sees through separators and digits, whose own last
    occurrence lies within the line, to the record before.

    Args:
        tokens: ids or codes below 2^31, `[batch, length]`.
        recall: how many earlier gaps to look at.

    Returns:
        bool `[batch, length]`.
    """
    pairs = F.pad(tokens[:, :-1], (1, 0)) * PAIR_BASE + tokens
    return recalled(recurrence_gaps(tokens), recall) | recalled(recurrence_gaps(pairs), recall)


def novelty_entropy(expected_counts: Tensor, lengths: Tensor, settings: EntropySettings) -> Tensor:
    """Return the entropy, in nats, of where the next token last occurred, given the recent gaps.

    With `r` the share of expected gaps, the chain rule over the event "expected" gives
    `h(r) + r ln(recall) + (1 - r) ln(window)`: an expected gap is one of `recall` recent ones, any other may
    be any of `window` places, and `h` is the entropy of the event itself. `r` is shrunk towards 1 by `prior`:
    `r = (expected + prior) / (length + prior)`. The entropy falls as `r` grows while
    `r > recall / (recall + window)`.

    Args:
        expected_counts: expected gaps in the context, any shape.
        lengths: tokens in the context, broadcastable to it.
        settings: window, recall and prior.
    """
    total = lengths.float() + settings.prior
    share = (expected_counts.float() + settings.prior) / total
    event = -torch.xlogy(share, share) - torch.xlogy(1 - share, 1 - share)
    return event + share * math.log(settings.recall) + (1 - share) * math.log(settings.window)


def position_entropy(codes: Tensor, settings: EntropySettings) -> Tensor:
    """Return the position entropy of every prefix: at `t` that of the tokens up to and including `t`.

    Args:
        codes: int64 `[batch, length]`, token id + 1, or 0 where there is no token (padding, unused cache
            slots). Empty places do not count: the result is as if they were not there.
        settings: window, recall and prior.

    Returns:
        float32 `[batch, length]`, nats; 0 at empty places.
    """
    present = codes > 0
    length = codes.shape[1]
    rank = present.long().cumsum(1) - 1
    slot = torch.where(present, rank, length)
    packed = torch.zeros_like(F.pad(codes, (0, 1))).scatter(1, slot, codes)[:, :length]
    counts = expected(packed, settings.recall).long().cumsum(1)
    lengths = torch.arange(1, length + 1, device=codes.device)
    entropy = novelty_entropy(counts, lengths, settings)
    return entropy.gather(1, rank.clamp(min=0)) * present


def digit_count(vocab_size: int) -> int:
    """Return how many base-256 digits write every token code of a vocabulary."""
    digits = 1
    while DIGIT_BASE**digits < vocab_size + 1:
        digits += 1
    return digits


def to_digits(codes: Tensor, digits: int, dtype: torch.dtype) -> Tensor:
    """Write token codes `[batch, length]` as `[batch, length, digits]`, exact from bfloat16 upwards."""
    scale = DIGIT_BASE ** torch.arange(digits, device=codes.device)
    return ((codes[..., None] // scale) % DIGIT_BASE).to(dtype)


def from_digits(written: Tensor) -> Tensor:
    """Read token codes `[batch, length]` back from `[batch, length, digits]`."""
    scale = DIGIT_BASE ** torch.arange(written.shape[-1], device=written.device)
    return (written.round().long() * scale).sum(-1)


class PositionAdaptiveBias(nn.Module):
    """A learned bias on attention scores by query-key distance, alive only where the context is irregular.

    For head `h`, query `i` and key `j <= i` the output is `gate_i * bias_h(i - j)`. `bias_h` interpolates
    linearly between learned knots at the distances `2^k - 1`. The gate is
    `tanh(relu(entropy_i - threshold) / width)`: exactly 0.0 up to the learned threshold (nats), then rising
    smoothly to 1 within a few `width`.

    Matrix work: `2 * key_length * knots * heads` FLOPs a call; the rest is element-wise.
    """

    def __init__(self, heads: int, knots: int, width: float) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.zeros(heads, knots))
        self.threshold = nn.Parameter(torch.zeros(1))

    def gate(self, entropy: Tensor) -> Tensor:
        """Return the gate, float32 in [0, 1), of the shape of `entropy`."""
        return torch.tanh(torch.relu(entropy - self.threshold.float()) / self.width)

    def by_distance(self, length: int) -> Tensor:
        """Return the ungated bias for distances 0 to `length - 1`, float32 `[length, heads]`."""
        knots = self.weight.shape[1]
        distance = torch.arange(length, device=self.weight.device)
        place = torch.log2(distance.float() + 1).clamp(max=knots - 1)
        near = 1 - (place[:, None] - torch.arange(knots, device=place.device)).abs()
        return near.clamp(min=0) @ self.weight.float().t()

    def forward(self, entropy: Tensor, query_index: Tensor, key_length: int) -> Tensor:
        """Return the additive bias `[batch, heads, queries, key_length]`, float32.

        Args:
            entropy: position entropy at each query, float32 `[batch, queries]`, nats.
            query_index: place of each query among the keys, int64 `[queries]`.
            key_length: number of keys; keys after the query get the bias of distance 0 and must be masked.
        """
        distance = query_index[:, None] - torch.arange(key_length, device=query_index.device)
        bias = F.embedding(distance.clamp(min=0), self.by_distance(key_length))
        return self.gate(entropy)[:, None, :, None] * bias.permute(2, 0, 1)
