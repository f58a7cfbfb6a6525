"""What a peer may take of a model: its blocks, the neurons and KV groups in them, and what each costs.

Found by `collapse.analysis` in the traced graph, so that no peer knows a module by its name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from collapse.analysis.layers import Layers, layer_lists
from collapse.checkpoint import Checkpoint
from collapse.errors import UnsupportedError
from collapse.search.places import Places, places_of
from collapse.search.units import Units, units_of
from collapse.trace import load_config, trace


@dataclass(frozen=True)
class Structure:
    """The one list of blocks of a model, the units in them, and the sublayers that a map can stand in for."""

    layers: Layers
    units: tuple[Units, ...]
    places: Places = field(default_factory=lambda: Places((), (), 0))

    @property
    def size(self) -> int:
        """The number of blocks."""
        return self.layers.size

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks in order."""
        return list(model.get_submodule(self.layers.site).children())

    def decoder_parameters(self, model: nn.Module) -> int:
        """Return how many parameters the blocks hold: no embedding, no last norm, no head."""
        return parameters(model.get_submodule(self.layers.site))


def parameters(module: nn.Module) -> int:
    """Return the number of parameters, those of tied tensors once."""
    return sum(parameter.numel() for parameter in module.parameters())


def structure_of(checkpoint: Checkpoint) -> Structure:
    """Trace the model on the meta device and find its blocks; raises `UnsupportedError` unless there is one list."""
    config = load_config(checkpoint)
    program = trace(config, dynamic=False)
    found = layer_lists(program, checkpoint, config)
    lists = [layers for layers in found if isinstance(layers, Layers)]
    if len(lists) != 1:
        raise UnsupportedError(f"{len(lists)} lists of blocks that can be cut, not one", where=checkpoint.label)
    units = tuple(one for one in units_of(program, checkpoint, lists[0]) if isinstance(one, Units))
    return Structure(lists[0], units, places_of(program, checkpoint, config, lists[0], units, "stand-in"))
