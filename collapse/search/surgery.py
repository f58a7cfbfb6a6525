"""Makes smaller models in memory out of a loaded one: modules are copied, unchanged tensors shared."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collapse.analysis.layers import OWN_NUMBER, Layers
from collapse.search.units import Units


def copy_sharing(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the modules and the config that shares every tensor with `model`."""
    tensors = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def put(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Give a model of `copy_sharing` another tensor under a state-dict name; its module's sizes follow."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    setattr(module, leaf, nn.Parameter(value, requires_grad=False))
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, Conv1D):
        module.nx, module.nf = module.weight.shape


def put_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Give a model of `copy_sharing` another module at `path`."""
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def narrow_units(model: nn.Module, units: Units, kept: Iterable[int]) -> None:
    """Let a model of `copy_sharing` keep just these units; its modules get new tensors."""
    chosen = set(kept)
    for part in units.parts:
        gone = part.rows(unit for unit in range(units.size) if unit not in chosen)
        rest = torch.tensor([row for row in range(part.size) if row not in gone])
        for axis in part.axes:
            put(model, axis.tensor, model.get_parameter(axis.tensor).index_select(axis.dim, rest).contiguous())


def drop_blocks(model: PreTrainedModel, layers: Layers, gone: Collection[int]) -> None:
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
