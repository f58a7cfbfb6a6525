"""ShortGPT (Men et al., 2024): drop the blocks that turn the residual stream least."""

from __future__ import annotations

import torch

from benchmarks.peers.calibration import Calibration
from benchmarks.peers.cut import Removal
from benchmarks.peers.streams import Turns


def block_influence(found: Turns) -> torch.Tensor:
    """Return BI_i = 1 - E[cos(X_i, X_{i+1})] of each block."""
    return 1 - torch.diagonal(found.cosine, offset=1)


def shortgpt(calibration: Calibration, share: float) -> Removal:
    """Drop the blocks of least influence, all judged in the whole model."""
    order = block_influence(calibration.turns).argsort(stable=True).tolist()
    return Removal("shortgpt", gone=tuple(sorted(order[: calibration.blocks_for(share)])))
