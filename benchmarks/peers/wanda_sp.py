"""Wanda-sp (An et al., AAAI 2024): Wanda's |W| |x| summed over whole columns, the same share from every block.

As in Wanda, a block is judged by what the blocks before it give after they were cut.
"""

from __future__ import annotations

import torch

from benchmarks.peers.blocks import batches
from benchmarks.peers.calibration import Calibration
from benchmarks.peers.cut import Removal
from benchmarks.peers.flap import reader_weight, target_of
from benchmarks.peers.moments import Moments, recorded
from benchmarks.peers.widths import Kept, best, uniform_losses, unit_scores
from collapse.search.calls import block_calls
from collapse.search.surgery import copy_sharing, narrow_units
from collapse.search.units import Units


def importance(weight: torch.Tensor, found: Moments) -> torch.Tensor:
    """Return by input channel j of a weight [out, in]: sum over outputs i of |W_ij| * |X_j|_2."""
    return weight.double().abs().sum(0) * found.norm


def wanda_sp(calibration: Calibration, share: float) -> Removal:
    """Drop the units of least importance; nothing makes up for them."""
    target = target_of(calibration, share, bias=False)
    losses = uniform_losses(calibration.structure.units, share, target)
    return Removal("wanda-sp", kept=in_turn(calibration, losses))


@torch.no_grad()
def in_turn(calibration: Calibration, losses: dict[Units, int]) -> Kept:
    """Cut block after block in a copy of the model, and return what stays."""
    smaller = copy_sharing(calibration.model)
    blocks = calibration.structure.blocks(smaller)
    rows = batches(calibration.ids, smaller.get_input_embeddings().weight.shape[0])
    streams, calls = zip(*(block_calls(smaller, blocks, batch) for batch in rows), strict=True)
    kept: list[tuple[Units, tuple[int, ...]]] = []
    for number, block in enumerate(blocks):
        own = [units for units in losses if units.block == number]
        with recorded(smaller, [units.reader for units in own]) as found:
            for stream, call in zip(streams, calls, strict=True):
                call[number](block, stream)
        for units in own:
            channels = importance(reader_weight(smaller, units), found[units.reader])
            kept.append((units, best(unit_scores(units, channels, mean=False), units.size - losses[units])))
            narrow_units(smaller, *kept[-1])
        streams = tuple(call[number](block, stream) for stream, call in zip(streams, calls, strict=True))
    return tuple(kept)
