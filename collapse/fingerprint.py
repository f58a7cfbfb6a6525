"""A digest of a tensor's value."""

from __future__ import annotations

import hashlib

import torch


def fingerprint(tensor: torch.Tensor) -> str:
    """Return dtype, shape and SHA-256 of the bytes of a tensor on the CPU; equal only for equal tensors."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(raw.data).hexdigest()}"
