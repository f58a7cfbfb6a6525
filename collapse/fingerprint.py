"""A digest of a tensor's value."""

from __future__ import annotations

import hashlib

import torch


def fingerprint(tensor: torch.Tensor) -> str:
    """Return dtype, shape and SHA-256 of the bytes of a tensor on the CPU; equal only for equal tensors."""
    return f"{tensor.dtype} {tuple(tensor.shape)} {data_digest(tensor)}"


def data_digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 (hex) of the bytes of a tensor on the CPU, as a safetensors file has them."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(raw.data).hexdigest()
