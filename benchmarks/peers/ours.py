"""What `collapse` does within a size: narrower blocks in the native layout, refitted to the source, without healing."""

from __future__ import annotations

import math

from benchmarks.peers.calibration import Calibration
from benchmarks.peers.cut import Removal
from collapse.search.sweep import Sweep


def native(calibration: Calibration, share: float) -> Removal:
    """Take as many neurons from every block, and refit what reads the units of all blocks."""
    structure = calibration.structure
    target = share * structure.decoder_parameters(calibration.model)
    neurons = [one for one in structure.units if one.kind == "neurons"]
    lost = math.ceil(target / sum(one.parameters for one in neurons))  # of every block: the native layout has one width
    sweep = Sweep(calibration.model, structure.layers, structure.units, calibration.ids)
    swept = sweep.run({one: one.size - lost for one in neurons}, (), lambda done, of: None)
    return Removal("collapse", made=swept.model)
