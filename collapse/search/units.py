"""The neurons and KV groups of a model's blocks, with the module that reads them: what can be narrowed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod

from collapse.analysis.channels import channels_of
from collapse.analysis.layers import Layers
from collapse.analysis.products import products_of
from collapse.analysis.units import Channels, Kind, Part
from collapse.checkpoint import Checkpoint
from collapse.plan import Axis, IndexSet, Skipped
from collapse.program import Program


@dataclass(frozen=True)
class Units:
    """Neurons or KV groups of one block; the parts' tensors have the model's names.

    `reader` is the module whose inputs are what the units give, `read` the axis that counts them.
    `parameters` is what one unit holds. `channels` has the same with the names of the files.
    """

    kind: Kind
    block: int
    size: int
    parts: tuple[Part, ...]
    reader: str
    read: Part
    parameters: int
    channels: Channels = field(compare=False)

    def columns(self, units: Iterable[int]) -> IndexSet:
        """Return the reader's inputs that some units give."""
        return self.read.rows(units)


def units_of(program: Program, checkpoint: Checkpoint, layers: Layers) -> tuple[Units | Skipped, ...]:
    """Return the units of every block in the order of the graph, or why a block's are left alone."""
    return tuple(
        _units(found, number, site, program) if isinstance(found, Channels) else found
        for number, site in enumerate(f"{layers.site}.{number}" for number in range(layers.size))
        for found in _in_order(channels_of(program, checkpoint, site))
    )


def _in_order(found: Iterable[Channels | Skipped]) -> Iterator[Channels | Skipped]:
    """Yield KV groups before neurons: in a block attention comes first, or both read the same."""
    yield from sorted(found, key=lambda one: isinstance(one, Channels) and one.kind == "neurons")


def _units(channels: Channels, block: int, site: str, program: Program) -> Units:
    inputs = {(product.weight, product.in_dim) for product in products_of(program, site).values()}
    parts = tuple(replace(part, axes=tuple(_in_model(axis, program) for axis in part.axes)) for part in channels.parts)
    axes = [(part, axis) for part in parts for axis in part.axes]
    read, reader = next((part, axis) for part, axis in axes if (axis.tensor, axis.dim) in inputs)
    held = sum(len(part.rows([0])) * (prod(program.shapes[axis.tensor]) // part.size) for part, axis in axes)
    module = reader.tensor.rpartition(".")[0]
    return Units(channels.kind, block, channels.size, parts, module, read, held, channels)


def _in_model(axis: Axis, program: Program) -> Axis:
    return Axis(tensor=str(program.model_name(axis.tensor)), dim=axis.dim)
