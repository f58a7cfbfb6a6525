"""Gradients of a model's own log-likelihood by its activations, for labels drawn from the model's own distribution.

The mean of their squares is the Fisher information, which says how far a small change of an activation moves the
distribution that the model gives: half of it is the KL divergence, to second order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from collapse.analysis.stand_in import uncompiled
from collapse.errors import UnsupportedError


def send_back(model: nn.Module, ids: Tensor, generator: torch.Generator) -> None:
    """Send back the gradient of -log p of labels drawn from p, which is p less the label, position by position.

    `ids` are [windows, tokens]. Raises `UnsupportedError` where the model's logits are not finite.
    """
    with torch.enable_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    gradient = logits.detach().float().softmax(-1)
    rows = gradient.flatten(0, -2)
    if not bool(rows.isfinite().all()):
        raise UnsupportedError("the model's logits are not all finite, so nothing can be measured")
    labels = torch.multinomial(rows, 1, generator=generator)
    rows.scatter_add_(1, labels, torch.full_like(labels, -1, dtype=rows.dtype))
    logits.backward(gradient=gradient.to(logits.dtype))


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Let activations have gradients meanwhile, and weights none."""
    with uncompiled(), _frozen(model), _from_embedding(model):
        yield


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Compute no gradients of weights meanwhile."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


@contextmanager
def _from_embedding(model: Any) -> Iterator[None]:
    """Let what comes out of the embedding, and all that follows from it, have a gradient."""

    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output.requires_grad_().clone() if output.is_leaf else output  # a leaf cannot be changed in place

    handle = model.get_input_embeddings().register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
