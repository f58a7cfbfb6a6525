"""One sweep over the blocks that narrows them and refits what reads the rest, block by block.

Two residual streams go through the model side by side: the source's, and that of the model as it is smaller so far.
In every block the reader of the units (of KV groups, then of neurons) is fitted to write what the source's stream lacks
in the smaller one, so that it makes up for its own loss and for those before it. Behind a norm (Gemma's) there is no
such sum, and the reader is fitted to what the source's writes, errors by the size of that. Where a map stands in for a
sublayer, it is fitted in the same way, to what enters the sublayer in the smaller model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collapse.analysis.layers import Layers
from collapse.search.alone import ROWS
from collapse.search.calls import Call, block_calls, inputs_of, watched
from collapse.search.least_squares import RIDGE, Metric, eliminate, normal_equations, plain, pulled
from collapse.search.maps import Fit, MapKind, module_of
from collapse.search.places import Place
from collapse.search.surgery import copy_sharing, drop_blocks, narrow_units, put, put_module
from collapse.search.units import Units

SAME_SUM = 1e-3  # of the stream's change: as far as an fp32 sum of a block's parts may be off

Progress = Callable[[int, int], None]
Part = Units | Place


@dataclass(frozen=True)
class Swept:
    """A smaller model in memory, and how it differs from the source.

    Attributes:
        model: the smaller model; it shares unchanged tensors with the source.
        kept: of the units that were narrowed, the numbers of those that stay.
        weights: the readers' new tensors, by state-dict name, in the shapes of the smaller model, fp32.
        gone: numbers of the dropped blocks.
        maps: the tensors of the maps that stand in for sublayers, by their part, fp32.
    """

    model: PreTrainedModel
    kept: Mapping[Units, tuple[int, ...]]
    weights: Mapping[str, Tensor]
    gone: tuple[int, ...] = ()
    maps: Mapping[Place, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def lost(self) -> dict[str, int]:
        """How many units of each kind went, all blocks together; those of dropped blocks do not count."""
        found: dict[str, int] = {}
        for units, kept in self.kept.items():
            found[units.kind] = found.get(units.kind, 0) + units.size - len(kept)
        return found


class Sweep:
    """Sweeps over `model` with calibration `windows`, token ids [sequences, tokens].

    `units` are those of every block in the order in which a block runs them, `places` the sublayers that maps may
    stand in for. `dtypes` says as what the files will hold what is fitted, by the path of a reader or a place: it is
    rounded to that at once, so that what is measured is what is written, and later fits make up for it too. Units go by
    what the residual grows by in the `metric` of what their reader writes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Layers,
        units: Sequence[Units],
        windows: Tensor,
        ridge: float = RIDGE,
        places: Sequence[Place] = (),
        dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
        metric: Metric = plain,
    ) -> None:
        self._model, self._layers, self._units, self._ridge, self._metric = model, layers, units, ridge, metric
        self._places, self._dtypes = places, dtypes
        self._batches = torch.split(windows, ROWS)
        self._blocks = list(model.get_submodule(layers.site).children())

    def run(
        self,
        sizes: Mapping[Units, int],
        gone: Collection[int],
        progress: Progress,
        maps: Mapping[Place, MapKind] = MappingProxyType({}),
        start: PreTrainedModel | None = None,
    ) -> Swept:
        """Return the model without the blocks `gone` that keeps as many units as `sizes` says, where it names them.

        The readers of all units are fitted anew, also where no unit goes, but for those in the places of `maps`. With
        `start` that is what is made smaller: the source with something else gone already, such as experts.
        """
        smaller = copy_sharing(self._model if start is None else start)
        own = list(smaller.get_submodule(self._layers.site).children())
        starts, calls = zip(*(block_calls(self._model, self._blocks, ids) for ids in self._batches), strict=True)
        state = _State(smaller, list(starts), list(starts), self._ridge, self._dtypes, self._metric)
        for number, block in enumerate(self._blocks):
            parts = self._parts(number, maps)
            turn = [call[number] for call in calls]
            if number in gone:
                state.source = [call(block, stream) for call, stream in zip(turn, state.source, strict=True)]
            else:
                _Block(self._model, block, own[number], parts, turn, state).run(sizes, maps)
            progress(number + 1, len(self._blocks))
        if gone:
            drop_blocks(smaller, self._layers, gone)
        return Swept(smaller, state.kept, state.weights, tuple(sorted(gone)), state.maps)

    def _parts(self, block: int, maps: Collection[Place]) -> list[Part]:
        """Return what a block adds to the stream, in its order: what reads units, or else a sublayer as a whole."""
        places = [one for one in self._places if one.block == block]
        whole = [one for one in places if one in maps or one.units not in self._units]
        units = [one for one in self._units if one.block == block and all(one != place.units for place in whole)]
        return sorted([*units, *whole], key=lambda one: not _attends(one))


def _attends(part: Part) -> bool:
    return part.attends if isinstance(part, Place) else part.kind == "kv-groups"


def _path(part: Part) -> str:
    """Return the module that writes what a part adds."""
    return part.site if isinstance(part, Place) else part.reader


@dataclass
class _State:
    """What the sweep carries from block to block: both streams by batch, and what was decided."""

    smaller: PreTrainedModel
    source: list[Tensor]
    own: list[Tensor]
    ridge: float
    dtypes: Mapping[str, torch.dtype]
    metric: Metric

    def rounded(self, path: str, tensor: Tensor) -> Tensor:
        """Return what the files will hold of a tensor that is fitted for `path`, fp32."""
        return tensor.to(self.dtypes.get(path, torch.float32)).float()

    def __post_init__(self) -> None:
        self.kept: dict[Units, tuple[int, ...]] = {}
        self.weights: dict[str, Tensor] = {}
        self.maps: dict[Place, dict[str, Tensor]] = {}


@dataclass(frozen=True)
class _Block:
    """One block in its turn."""

    model: PreTrainedModel
    source: nn.Module
    own: nn.Module
    parts: Sequence[Part]
    calls: Sequence[Call]
    state: _State

    def run(self, sizes: Mapping[Units, int], maps: Mapping[Place, MapKind]) -> None:
        with watched(self.model, [_path(part) for part in self.parts]) as seen:
            after = self._through(self.source, self.state.source)
        streams = self.state.source
        written = {
            path: [output.reshape(to.shape) for (_, output), to in zip(pairs, streams, strict=True)]
            for path, pairs in seen.items()
        }  # a shared expert is given its tokens without rows
        direct = self._is_sum(after, list(written.values()))
        lacking = [theirs - ours for theirs, ours in zip(self.state.source, self.state.own, strict=True)]
        for part in self.parts:
            wanted = written[_path(part)]
            if direct:
                wanted = [one + lack for one, lack in zip(wanted, lacking, strict=True)]
            if isinstance(part, Units):
                found = self._refit(part, sizes.get(part, part.size), self._inputs(part), wanted)
            elif part in maps:
                found = self._map(part, maps[part], self._inputs(part), wanted)
            elif direct:
                found = self._written(part)
            else:
                continue
            lacking = [one - new for one, new in zip(wanted, found, strict=True)]
        if self.parts and direct:
            self.state.own = [theirs - lack for theirs, lack in zip(after, lacking, strict=True)]
        else:
            self.state.own = self._through(self.own, self.state.own)
        self.state.source = after

    def _through(self, block: nn.Module, streams: Sequence[Tensor]) -> list[Tensor]:
        return [call(block, stream) for call, stream in zip(self.calls, streams, strict=True)]

    def _inputs(self, part: Part) -> list[Tensor]:
        """Return what a part reads in the smaller model."""
        found = inputs_of(self.state.smaller, _path(part), self.own, self.calls, self.state.own)
        return [one.reshape(*to.shape[:-1], -1) for one, to in zip(found, self.state.own, strict=True)]

    def _written(self, part: Part) -> list[Tensor]:
        """Return what a part writes in the smaller model."""
        with watched(self.state.smaller, [_path(part)]) as seen:
            self._through(self.own, self.state.own)
        return [output.reshape(to.shape) for (_, output), to in zip(seen[_path(part)], self.state.own, strict=True)]

    def _is_sum(self, after: Sequence[Tensor], written: Sequence[Sequence[Tensor]]) -> bool:
        """Whether the block adds just what its parts write to the stream, with nothing in between."""
        change = after[0] - self.state.source[0]
        rest = change - sum((outputs[0] for outputs in written), torch.zeros(()))
        return bool(rest.norm() <= SAME_SUM * change.norm())

    def _refit(self, units: Units, size: int, inputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[Tensor]:
        """Choose the units that stay, fit their reader, and return what it now writes."""
        reader = Reader.of(self.state.smaller, units)
        weighing = self.state.metric(units.reader)
        pairs = weighing.rows((reader.extended(x), y) for x, y in zip(inputs, wanted, strict=True))
        normal = pulled(normal_equations(pairs), reader.matrix, self.state.ridge)
        parts = [tuple(units.columns([unit])) for unit in range(units.size)]
        kept = tuple(range(units.size))
        if size < units.size:
            kept = eliminate(normal.seen_by(weighing.factor), parts, size)
        columns = torch.tensor([*units.columns(kept), *range(reader.inputs, reader.matrix.shape[1])])
        matrix = self.state.rounded(units.reader, normal.solve(columns))
        if size < units.size:
            narrow_units(self.state.smaller, units, kept)
            self.state.kept[units] = kept
        for name, tensor in reader.tensors(matrix).items():
            put(self.state.smaller, name, tensor)
            self.state.weights[name] = tensor
        return [nn.functional.linear(reader.extended(x)[..., columns], matrix) for x in inputs]

    def _map(self, place: Place, kind: MapKind, inputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[Tensor]:
        """Put a map in a place, fitted to what is wanted of it, and return what it gives."""
        fitted = Fit.of(zip(inputs, wanted, strict=True)).tensors(kind)
        tensors = {part: self.state.rounded(place.site, tensor) for part, tensor in fitted.items()}
        made = module_of(place, kind, tensors)
        put_module(self.state.smaller, place.site, made)
        self.state.maps[place] = tensors
        return [found if place.outputs is None else found[0] for found in map(made, inputs)]


@dataclass(frozen=True)
class Reader:
    """The product that reads some units: `matrix` is [out, in], a bias its last column; `inputs` counts the others."""

    path: str
    matrix: Tensor
    inputs: int
    transposed: bool

    @classmethod
    def of(cls, model: nn.Module, units: Units) -> Reader:
        """Return the reader of `units` as it is in `model`."""
        axis = next(axis for axis in units.read.axes if axis.tensor.rpartition(".")[0] == units.reader)
        weight = model.get_parameter(axis.tensor).detach().float()
        matrix = weight if axis.dim == 1 else weight.T
        bias = getattr(model.get_submodule(units.reader), "bias", None)
        whole = matrix if bias is None else torch.cat([matrix, bias.detach().float()[:, None]], 1)
        return cls(units.reader, whole, matrix.shape[1], axis.dim == 0)

    def extended(self, given: Tensor) -> Tensor:
        """Return inputs [..., in] with a one for the bias, where there is one."""
        bias = self.matrix.shape[1] > self.inputs
        return torch.cat([given, torch.ones_like(given[..., :1])], -1) if bias else given

    def tensors(self, matrix: Tensor) -> dict[str, Tensor]:
        """Return a matrix of fewer inputs as the module's tensors, by state-dict name."""
        bias = self.matrix.shape[1] > self.inputs
        weight = matrix[:, :-1] if bias else matrix
        found = {f"{self.path}.weight": (weight.T if self.transposed else weight).contiguous()}
        return found | ({f"{self.path}.bias": matrix[:, -1].contiguous()} if bias else {})
