"""Wanda-sp (An et al., AAAI 2024): Wanda's |W| |x| summed over whole columns, the same share from every block."""

from __future__ import annotations

import torch

from benchmarks.peers.calibration import Calibration
from benchmarks.peers.cut import Removal
from benchmarks.peers.flap import reader_weight, target_of
from benchmarks.peers.moments import Moments
from benchmarks.peers.widths import uniform, unit_scores


def importance(weight: torch.Tensor, found: Moments) -> torch.Tensor:
    """Return by input channel j of a weight [out, in]: sum over outputs i of |W_ij| * |X_j|_2."""
    return weight.double().abs().sum(0) * found.norm


def wanda_sp(calibration: Calibration, share: float) -> Removal:
    """Drop the units of least importance; nothing makes up for them."""
    scores = {
        units: unit_scores(
            units, importance(reader_weight(calibration.model, units), calibration.moments[units.reader]), mean=False
        )
        for units in calibration.structure.units
    }
    return Removal("wanda-sp", kept=uniform(scores, share, target_of(calibration, share, bias=False)))
