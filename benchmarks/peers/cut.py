"""What a peer takes from a model, and the model without it: a new one, whose parameters can be counted."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.peers.structure import Structure, Units
from collapse.analysis.layers import OWN_NUMBER, Layers


@dataclass(frozen=True)
class Removal:
    """What one method takes.

    Attributes:
        method: its name.
        gone: numbers of the dropped blocks.
        kept: of the units that are narrowed, the numbers of those that stay; at least one each.
        weights: new values by state-dict name, of the source's shapes; a bias that the source lacks is added.
        after: matrices [width, width] by module path: `y` of that module becomes `y @ matrix`, with new parameters.
    """

    method: str
    gone: tuple[int, ...] = ()
    kept: tuple[tuple[Units, tuple[int, ...]], ...] = ()
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    after: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def apply(self, model: PreTrainedModel, structure: Structure) -> PreTrainedModel:
        """Return the smaller model; it shares unchanged tensors with `model`, which stays as it is."""
        smaller = copy_sharing(model)
        for name, value in self.weights.items():
            _put(smaller, name, value)
        for units, kept in self.kept:
            narrow_units(smaller, units, kept)
        for path, matrix in self.after.items():
            _put_behind(smaller, path, matrix)
        if self.gone:
            _drop(smaller, structure.layers, self.gone)
        return smaller


def copy_sharing(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the modules and the config that shares every tensor with `model`."""
    tensors = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _put(model: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, nn.Parameter(value, requires_grad=False))


def narrow_units(model: nn.Module, units: Units, kept: tuple[int, ...]) -> None:
    """Let a model of `copy_sharing` keep just these units; its modules get new tensors."""
    for part in units.parts:
        gone = part.rows(set(range(units.size)) - set(kept))
        rest = torch.tensor([row for row in range(part.size) if row not in gone])
        for axis in part.axes:
            _put(model, axis.tensor, model.get_parameter(axis.tensor).index_select(axis.dim, rest).contiguous())
            module = model.get_submodule(axis.tensor.rpartition(".")[0])
            if isinstance(module, nn.Linear):
                module.out_features, module.in_features = module.weight.shape


def _put_behind(model: nn.Module, path: str, matrix: torch.Tensor) -> None:
    parent, _, leaf = path.rpartition(".")
    linear = nn.Linear(matrix.shape[0], matrix.shape[1], bias=False, device="meta")
    linear.weight = nn.Parameter(matrix.T.contiguous(), requires_grad=False)
    setattr(model.get_submodule(parent), leaf, nn.Sequential(model.get_submodule(path), linear))


def _drop(model: PreTrainedModel, layers: Layers, gone: tuple[int, ...]) -> None:
    """Take blocks out of their list, renumber the rest, and let the config say so."""
    kept = [number for number in range(layers.size) if number not in gone]
    parent, _, leaf = layers.site.rpartition(".")
    blocks = list(model.get_submodule(layers.site).children())
    setattr(model.get_submodule(parent), leaf, nn.ModuleList(blocks[number] for number in kept))
    for new, old in enumerate(kept):
        for module in blocks[old].modules():
            for name in OWN_NUMBER & vars(module).keys():
                setattr(module, name, new)
    _say(model.config, layers.count, len(kept))
    for path, values in layers.lists.items():
        _say(model.config, path, [values[number] for number in kept])


def _say(config: Any, path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    setattr(reduce(getattr, parents, config), leaf, value)
