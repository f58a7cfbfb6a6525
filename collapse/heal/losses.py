"""What is made small: the divergence of the two models' next tokens, and how far their streams are apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

TINY = 1e-6  # beside the mean square of a residual stream, which is of the order of 1 or far above


def divergence(source: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """Return KL(source || student) of logits [n, tokens, ids] by row, mean over tokens, [n]; nats.

    With a temperature T both distributions are those of logits / T, and the result counts T^2 times, so that gradients
    stay of one size (Hinton et al., 2015).
    """
    log_p = (source.float() / temperature).log_softmax(-1)
    log_q = (student.float() / temperature).log_softmax(-1)
    by_token = functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    return by_token.mean(-1) * temperature**2


def stream_distance(source: Sequence[Tensor], student: Sequence[Tensor]) -> Tensor:
    """Return the mean over blocks and tokens of |student - source|^2 / |source|^2, of streams [n, tokens, width].

    Every token counts by its own size: a few carry activations a thousand times those of the others.
    """
    distances = [
        ((ours.float() - theirs.float()).square().sum(-1) / (theirs.float().square().sum(-1) + TINY)).mean()
        for theirs, ours in zip(source, student, strict=True)
    ]
    return torch.stack(distances).mean()
