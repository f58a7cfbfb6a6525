"""The Unreasonable Ineffectiveness of the Deeper Layers (Gromov et al., 2024): drop one run of blocks, no healing."""

from __future__ import annotations

from benchmarks.peers.calibration import Calibration
from benchmarks.peers.cut import Removal
from benchmarks.peers.streams import least_run


def uidl(calibration: Calibration, share: float) -> Removal:
    """Drop the n blocks from l on with the least angular distance d(x_l, x_{l+n}) at the last token."""
    count = calibration.blocks_for(share)
    start = least_run(calibration.turns.angle, count)
    return Removal("uidl", gone=tuple(range(start, start + count)))
