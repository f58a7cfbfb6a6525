"""Tiny models for the tests of the peers, saved, traced and loaded again; each traced once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.peers.calibration import Calibration
from benchmarks.peers.structure import Structure, structure_of
from collapse.checkpoint import Checkpoint
from tests.architectures import tiny_model

CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 5},
    "biased": {"num_hidden_layers": 2, "mlp_bias": True},
    "gemma3_text": {},
}


@lru_cache
def structure(kind: str) -> Structure:
    """Return the structure of a tiny model, by its trace."""
    with tempfile.TemporaryDirectory() as folder:
        model(kind).save_pretrained(folder)
        return structure_of(Checkpoint.open(Path(folder)))


def model(kind: str) -> PreTrainedModel:
    """Return a fresh tiny model with weights that matter."""
    return tiny_model("llama" if kind == "biased" else kind, **CHANGES[kind])


def ids(rows: int = 6, length: int = 12, seed: int = 0) -> torch.Tensor:
    """Return random token ids."""
    return torch.randint(0, 48, (rows, length), generator=torch.Generator().manual_seed(seed))


def calibration(kind: str, change: Callable[[PreTrainedModel], None] | None = None) -> Calibration:
    """Return a tiny model, changed in place, with random text."""
    own = model(kind)
    if change is not None:
        with torch.no_grad():
            change(own)
    return Calibration(own, structure(kind), ids(), ids(rows=3, seed=1), ids(rows=32, seed=2))


def identity(*numbers: int) -> Callable[[PreTrainedModel], None]:
    """Let blocks of a Llama hand on what they are given."""

    def change(own: PreTrainedModel) -> None:
        for number in numbers:
            block = own.model.layers[number]
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()

    return change


def logits(own: PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    """Return the logits of some rows."""
    with torch.no_grad():
        found: torch.Tensor = own(input_ids=rows, use_cache=False).logits
    return found
