"""What `collapse` does within a size: narrower blocks, all alike or not, or maps in them; refitted, then healed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from transformers import PreTrainedModel

from benchmarks.peers.calibration import Calibration
from benchmarks.peers.cut import Removal
from collapse.heal.pair import Pair
from collapse.heal.settings import Settings
from collapse.heal.train import heal
from collapse.search.allocate import allocate
from collapse.search.options import allocate_with_maps
from collapse.search.places import Place
from collapse.search.surgery import copy_sharing
from collapse.search.sweep import Sweep


def native(calibration: Calibration, share: float) -> Removal:
    """Take as many neurons from every block, and refit what reads the units of all blocks."""
    structure = calibration.structure
    target = share * structure.decoder_parameters(calibration.model)
    neurons = [one for one in structure.units if one.kind == "neurons"]
    lost = math.ceil(target / sum(one.parameters for one in neurons))  # of every block: the native layout has one width
    swept = _sweep(calibration).run({one: one.size - lost for one in neurons}, (), lambda done, of: None)
    return Removal("collapse", made=swept.model)


def free(calibration: Calibration, share: float) -> Removal:
    """Give every block a size of its own (the free layout), by what it costs where it was tried alone."""
    if share not in calibration.fitted:
        structure = calibration.structure
        sizes = allocate(calibration.trials, share * structure.decoder_parameters(calibration.model))
        calibration.fitted[share] = _sweep(calibration).run(sizes, (), lambda done, of: None).model
    return Removal("collapse-free", made=calibration.fitted[share])


def maps(calibration: Calibration, share: float) -> Removal:
    """Let every sublayer have a size of its own or a map in its place, by what either costs alone."""
    structure = calibration.structure
    worth = {one: one.place.parameters - one.kind.parameters(one.place.width) for one in calibration.map_trials}
    target = share * structure.decoder_parameters(calibration.model)
    shape = allocate_with_maps(calibration.trials, calibration.map_trials, target, worth)
    sweep = _sweep(calibration, structure.places.found)
    return Removal("collapse-maps", made=sweep.run(shape.kept, (), lambda done, of: None, shape.maps).model)


def _sweep(calibration: Calibration, places: Sequence[Place] = ()) -> Sweep:
    structure = calibration.structure
    return Sweep(
        calibration.model, structure.layers, structure.units, calibration.fitting, places=places,
        metric=calibration.fisher.weighing,
    )  # fmt: skip


def healed(calibration: Calibration, share: float) -> Removal:
    """Distil what `free` gives on text of the same sources: of what was changed, nothing else."""
    made = free(calibration, share).made
    assert made is not None
    made = copy_sharing(made)
    rows = calibration.healing
    settings = Settings(tokens=rows.numel(), length=rows.shape[1])
    pair = Pair(calibration.model, made, _changed(calibration.model, made), _blocks(calibration))
    heal(pair, rows, rows[:0], settings, lambda done, of: None)
    return Removal("collapse-healed", made=made)


def _changed(model: PreTrainedModel, made: PreTrainedModel) -> frozenset[str]:
    """Return the names of the smaller model's parameters that it does not share with the source."""
    own = dict(model.named_parameters(remove_duplicate=False))
    return frozenset(
        name for name, value in made.named_parameters(remove_duplicate=False) if own.get(name) is not value
    )


def _blocks(calibration: Calibration) -> tuple[tuple[str, str], ...]:
    layers = calibration.structure.layers
    return tuple((f"{layers.site}.{number}",) * 2 for number in range(layers.size))
