"""Plans with computed weights, made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from collapse.checkpoint import Checkpoint
from collapse.fingerprint import data_digest
from collapse.plan import Evidence, Replace
from collapse.rewrite.values import Values, open_values

MEASURED = Evidence(grade="measured", claim="the loss hardly moves", method="by hand", figures={"loss": 0.01})


def replacing(tensors: Mapping[str, torch.Tensor], **fields: Any) -> Replace:
    """Return the replacement of tensors of the files by these."""
    digests = {name: data_digest(tensor) for name, tensor in tensors.items()}
    whole = {"pass": "refit", "site": min(tensors), "evidence": MEASURED, "tensors": digests}
    return Replace(**(whole | fields))


def values_in(path: Path, tensors: Mapping[str, torch.Tensor]) -> Values:
    """Write a values file and open it."""
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    return open_values(path)


def drawn(checkpoint: Checkpoint, *names: str, seed: int = 5) -> dict[str, torch.Tensor]:
    """Return other values for tensors of a checkpoint, in their dtypes."""
    made = torch.Generator().manual_seed(seed)
    files = [load_file(checkpoint.root / name) for name in checkpoint.weight_files]
    held = {name: tensor for tensors in files for name, tensor in tensors.items()}
    return {name: (torch.randn(held[name].shape, generator=made) * 0.4).to(held[name].dtype) for name in names}
