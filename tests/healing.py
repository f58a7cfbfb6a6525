"""Small models to heal: a random Llama with an idle block, and windows of ids."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collapse.heal.pair import Pair, divergences
from collapse.heal.settings import Settings
from tests.architectures import tiny_model

LAYERS, IDS, LENGTH = 3, 48, 16
FFN = frozenset(f"model.layers.{n}.mlp.{part}_proj.weight" for n in range(LAYERS) for part in ("gate", "up", "down"))
BLOCKS = tuple((f"model.layers.{n}", f"model.layers.{n}") for n in range(LAYERS))
FAST = Settings(tokens=40 * 4 * LENGTH, length=LENGTH, rows=4, rate=5e-3)


def source_model() -> PreTrainedModel:
    return tiny_model("llama", num_hidden_layers=LAYERS, vocab_size=IDS)


def hurt(source: PreTrainedModel, size: float = 0.3) -> PreTrainedModel:
    """Return a copy whose FFNs are off by noise."""
    student, made = copy.deepcopy(source), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name in sorted(FFN):
            weight = student.get_parameter(name)
            weight += size * (torch.rand(weight.shape, generator=made) - 0.5)
    return student


def pair_of(source: PreTrainedModel, student: PreTrainedModel, touched: frozenset[str] = FFN) -> Pair:
    return Pair(source, student, touched, BLOCKS)


def drawn_windows(count: int, low: int = 0, high: int = IDS, seed: int = 0) -> Tensor:
    """Return windows of ids from `low` to `high`, of which each is a walk with small steps."""
    made = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 4, (count, LENGTH), generator=made).cumsum(1)
    return low + (steps + torch.randint(0, high - low, (count, 1), generator=made)) % (high - low)


def kl(source: PreTrainedModel, student: PreTrainedModel, windows: Tensor) -> float:
    return float(divergences(source, student, windows).mean())
