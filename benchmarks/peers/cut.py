"""What a peer takes from a model, and the model without it: a new one, whose parameters can be counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.peers.structure import Structure
from collapse.search.surgery import copy_sharing, drop_blocks, narrow_units, put
from collapse.search.units import Units


@dataclass(frozen=True)
class Removal:
    """What one method takes.

    Attributes:
        method: its name.
        gone: numbers of the dropped blocks.
        kept: of the units that are narrowed, the numbers of those that stay; at least one each.
        weights: new values by state-dict name, of the source's shapes; a bias that the source lacks is added.
        after: matrices [width, width] by module path: `y` of that module becomes `y @ matrix`, with new parameters.
        made: the smaller model itself, where the method makes it on the way; nothing else is then done.
    """

    method: str
    gone: tuple[int, ...] = ()
    kept: tuple[tuple[Units, tuple[int, ...]], ...] = ()
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    after: Mapping[str, torch.Tensor] = field(default_factory=dict)
    made: PreTrainedModel | None = None

    def apply(self, model: PreTrainedModel, structure: Structure) -> PreTrainedModel:
        """Return the smaller model; it shares unchanged tensors with `model`, which stays as it is."""
        if self.made is not None:
            return self.made
        smaller = copy_sharing(model)
        for name, value in self.weights.items():
            put(smaller, name, value)
        for units, kept in self.kept:
            narrow_units(smaller, units, kept)
        for path, matrix in self.after.items():
            _put_behind(smaller, path, matrix)
        if self.gone:
            drop_blocks(smaller, structure.layers, self.gone)
        return smaller


def _put_behind(model: nn.Module, path: str, matrix: torch.Tensor) -> None:
    parent, _, leaf = path.rpartition(".")
    linear = nn.Linear(matrix.shape[0], matrix.shape[1], bias=False, device="meta")
    linear.weight = nn.Parameter(matrix.T.contiguous(), requires_grad=False)
    setattr(model.get_submodule(parent), leaf, nn.Sequential(model.get_submodule(path), linear))
