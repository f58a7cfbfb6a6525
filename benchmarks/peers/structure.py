"""What a peer may take of a model: its blocks, the neurons and KV groups in them, and what each costs.

Found by `collapse.analysis` in the traced graph, so that no peer knows a module by its name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from torch import nn

from collapse.analysis.channels import channels_of
from collapse.analysis.layers import Layers, layer_lists
from collapse.analysis.products import products_of
from collapse.analysis.units import Channels, Kind, Part
from collapse.checkpoint import Checkpoint
from collapse.errors import UnsupportedError
from collapse.plan import Axis, IndexSet
from collapse.program import Program
from collapse.trace import load_config, trace


@dataclass(frozen=True)
class Units:
    """Neurons or KV groups of one block; the parts' tensors have the model's names.

    `reader` is the module whose inputs are what the units give, `read` the axis that counts them.
    `parameters` is what one unit holds.
    """

    kind: Kind
    block: int
    size: int
    parts: tuple[Part, ...]
    reader: str
    read: Part
    parameters: int

    def columns(self, units: Iterable[int]) -> IndexSet:
        """Return the reader's inputs that some units give."""
        return self.read.rows(units)


@dataclass(frozen=True)
class Structure:
    """The one list of blocks of a model, and the units in them."""

    layers: Layers
    units: tuple[Units, ...]

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
    sites = (f"{lists[0].site}.{number}" for number in range(lists[0].size))
    units = (
        _units(channels, number, site, program)
        for number, site in enumerate(sites)
        for channels in channels_of(program, checkpoint, site)
        if isinstance(channels, Channels)
    )
    return Structure(lists[0], tuple(units))


def _units(channels: Channels, block: int, site: str, program: Program) -> Units:
    inputs = {(product.weight, product.in_dim) for product in products_of(program, site).values()}
    parts = tuple(replace(part, axes=tuple(_in_model(axis, program) for axis in part.axes)) for part in channels.parts)
    axes = [(part, axis) for part in parts for axis in part.axes]
    read, reader = next((part, axis) for part, axis in axes if (axis.tensor, axis.dim) in inputs)
    held = sum(len(part.rows([0])) * (prod(program.shapes[axis.tensor]) // part.size) for part, axis in axes)
    return Units(channels.kind, block, channels.size, parts, reader.tensor.rpartition(".")[0], read, held)


def _in_model(axis: Axis, program: Program) -> Axis:
    return Axis(tensor=str(program.model_name(axis.tensor)), dim=axis.dim)
