"""What `collapse` does within a size: narrower blocks, all alike or each with its own size; refitted, not healed."""

from __future__ import annotations

import math

from benchmarks.peers.calibration import Calibration
from benchmarks.peers.cut import Removal
from collapse.search.allocate import allocate
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


def free(calibration: Calibration, share: float) -> Removal:
    """Give every block a size of its own (the free layout), by what it costs where it was tried alone."""
    structure = calibration.structure
    sizes = allocate(calibration.trials, share * structure.decoder_parameters(calibration.model))
    sweep = Sweep(calibration.model, structure.layers, structure.units, calibration.ids)
    return Removal("collapse-free", made=sweep.run(sizes, (), lambda done, of: None).model)
