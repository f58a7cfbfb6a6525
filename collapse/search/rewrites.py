"""A shape with its fitted readers and maps as the rewrites of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from collapse.analysis.channels import narrow_channels, narrow_sites
from collapse.analysis.experts import drop_experts
from collapse.analysis.layers import Layers, drop_layers
from collapse.analysis.sublayers import owned, stand_in
from collapse.checkpoint import Checkpoint
from collapse.dtypes import FLOATS
from collapse.fingerprint import data_digest
from collapse.plan import Evidence, Replace, Rewrite, Skipped, StandIn
from collapse.program import Program
from collapse.search.maps import MapKind
from collapse.search.mixtures import Mixtures
from collapse.search.places import Place
from collapse.search.shapes import KINDS, Shape, Uneven
from collapse.search.sweep import Swept
from collapse.search.units import Units

READ_NOTHING = frozenset({"zero", "constant"})  # maps that do not depend on what enters the sublayer


@dataclass(frozen=True)
class Origin:
    """The source as passes know it, with its blocks, the units that may be narrowed and the experts that may go."""

    checkpoint: Checkpoint
    config: PreTrainedConfig
    program: Program
    layers: Layers
    units: tuple[Units, ...]
    mixtures: Mixtures | None = None

    def structure(
        self, shape: Shape, kept: Mapping[Units, Sequence[int]], evidence: Evidence
    ) -> tuple[Rewrite, ...] | Skipped:
        """Return the rewrites that make the shape, or why the architecture cannot have it.

        Where `kept` does not name a unit, the first ones stay: a dropped block has the shape of the others, too. Maps
        are not among them.
        """
        found: list[Rewrite] = []
        if isinstance(shape, Uneven):
            return self._uneven(shape, kept, evidence)
        if shape.gone:
            rest = [block for block in range(self.layers.size) if block not in shape.gone]
            dropped = drop_layers(self.layers, rest, self.checkpoint, self.config, evidence, "layers")
            if isinstance(dropped, Skipped):
                return dropped
            found.append(dropped)
        for kind in KINDS:
            if lost := shape.lost.get(kind, 0):
                chosen = [(one, kept.get(one, range(one.size - lost))) for one in self.units if one.kind == kind]
                channels = [(one.channels, units) for one, units in chosen]
                narrows = narrow_channels(channels, self.program, self.config, evidence, kind)
                if isinstance(narrows, Skipped):
                    return narrows
                found += narrows
        lost = shape.lost.get("experts", 0)
        if self.mixtures is not None and self.mixtures.count(lost, shape.gone):
            held = self.mixtures.kept(lost)
            fewer = drop_experts(held, self.program, self.checkpoint, self.config, evidence, "experts")
            if isinstance(fewer, Skipped):
                return fewer
            found += fewer
        return tuple(found)

    def _uneven(
        self, shape: Uneven, kept: Mapping[Units, Sequence[int]], evidence: Evidence
    ) -> tuple[Rewrite, ...] | Skipped:
        found: list[Rewrite] = []
        for kind in KINDS:
            sizes = {one: size for one, size in shape.kept.items() if one.kind == kind}
            chosen = [(one.channels, kept.get(one, range(size))) for one, size in sizes.items()]
            narrows = narrow_sites(chosen, self.program, self.config, evidence, kind)
            if isinstance(narrows, Skipped):
                return narrows
            found += narrows
        return tuple(found)

    def maps(
        self, shape: Shape, tensors: Mapping[Place, Mapping[str, Tensor]], evidence: Evidence
    ) -> tuple[tuple[Rewrite, ...], dict[str, Tensor]] | Skipped:
        """Return the rewrites that put in the maps of a shape, and their data in the files' dtypes, or why they cannot.

        Where `tensors` does not name a place, its map is of zeros. With what reads no input the norm before it goes.
        """
        rewrites: list[Rewrite] = []
        values: dict[str, Tensor] = {}
        for place, kind in shape.maps.items() if isinstance(shape, Uneven) else ():
            held = tensors.get(place) or {part: torch.zeros(size) for part, size in kind.shapes(place.width).items()}
            found = self._stand_in(place.site, place.outputs, kind, held, evidence)
            if isinstance(found, Skipped):
                return found
            rewrites.append(found[0])
            values |= found[1]
            if kind.by in READ_NOTHING and place.norm is not None:
                norm = self._stand_in(place.norm, None, MapKind("zero"), {}, evidence)
                rewrites += [] if isinstance(norm, Skipped) else [norm[0]]
        return tuple(rewrites), values

    def _stand_in(
        self, site: str, outputs: int | None, kind: MapKind, tensors: Mapping[str, Tensor], evidence: Evidence
    ) -> tuple[StandIn, dict[str, Tensor]] | Skipped:
        name = "sublayers" if kind.by in READ_NOTHING else "stand-in"
        dtype = self.dtype_of_site(site)
        typed = {part: tensor.to(dtype) for part, tensor in tensors.items()}
        return stand_in(self.program, self.checkpoint, {site: outputs}, site, kind.by, typed, evidence, name)

    def refits(self, swept: Swept, evidence: Evidence) -> tuple[Replace, dict[str, Tensor]] | None:
        """Return the rewrite that puts in the fitted tensors, and their data in the files' dtypes, by their names."""
        values = {self.file_name(name): tensor for name, tensor in swept.weights.items()}
        if not values:
            return None
        typed = {name: tensor.to(_dtype(self.checkpoint, name)) for name, tensor in sorted(values.items())}
        digests = {name: data_digest(tensor) for name, tensor in typed.items()}
        replaced = Replace(pass_name=self.units[0].kind, site=self.layers.site, evidence=evidence, tensors=digests)
        return replaced, typed

    def dtype_of_site(self, site: str) -> torch.dtype:
        """Return the dtype of the files that a map in the place of a module gets: that of its first tensor."""
        files = owned(self.program, self.checkpoint, site)
        return _dtype(self.checkpoint, next(iter(files))) if files else torch.float32

    def dtype_of_reader(self, units: Units) -> torch.dtype:
        """Return the dtype of the files that the weight which reads some units has."""
        name = f"{units.reader}.weight"
        return _dtype(self.checkpoint, self.file_name(name)) if name in self.program.shapes else torch.float32

    def file_name(self, name: str) -> str:
        """Return the files' name of a tensor of the model."""
        aliases = self.program.aliases(name)
        return next(one for one in self.checkpoint.tensors if self.program.model_name(one) in aliases)


def _dtype(checkpoint: Checkpoint, name: str) -> torch.dtype:
    return FLOATS[checkpoint.tensors[name].dtype]
