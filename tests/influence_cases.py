"""Tiny models with their sites, and the same models after a removal by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from collapse.analysis.sites import Places, Site, places_of, sites_of
from collapse.checkpoint import Checkpoint
from collapse.program import Program
from collapse.trace import trace
from tests.architectures import save_tiny, tiny_config, tiny_model

IDS = torch.randint(3, 48, (2, 9), generator=torch.Generator().manual_seed(7))
EXPERTS = {"mixtral": "num_local_experts", "qwen2_moe": "num_experts", "glm4_moe": "n_routed_experts"}


@cache
def traced(kind: str) -> Program:
    return trace(tiny_config(kind))


def places_at(root: Path, kind: str) -> Places:
    """Save a tiny model below `root` and find its places."""
    return places_of(traced(kind), Checkpoint.open(save_tiny(kind, root / kind)))


def sites(places: Places, kind: str) -> list[Site]:
    """Return all sites of one kind, neurons in three ranges of every third."""
    order = lambda size: [unit for start in range(3) for unit in range(start, size, 3)]  # noqa: E731
    return [site for group in places.groups if group.kind == kind for site in sites_of(group, order(group.size), 3)]


def removed_by_hand(kind: str, site: Site) -> nn.Module:
    """Return the tiny model whose weights, not its activations, lack a site."""
    model, group = tiny_model(kind), site.group
    with torch.no_grad():
        if group.kind == "experts":
            return _fewer_experts(kind, model, site.number)
        if group.read is None:
            for parameter in model.get_submodule(group.path).parameters():
                parameter.zero_()
        else:
            weight = model.get_submodule(group.module).get_parameter("weight")
            weight.movedim(group.in_dim, 0)[list(group.read.rows(site.units))] = 0
    return model


def _fewer_experts(kind: str, model: nn.Module, gone: int) -> nn.Module:
    """Return a model that was built with one expert less, with the others' weights."""
    count = 4
    config = tiny_config(kind, **{EXPERTS[kind]: count - 1})
    smaller = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    kept = [number for number in range(count) if number != gone]
    wanted = smaller.state_dict()
    for name, tensor in model.state_dict().items():
        wanted[name] = tensor if tensor.shape == wanted[name].shape else tensor[kept]
    smaller.load_state_dict(wanted)
    return smaller


def logits_of(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    """Return what a model says, with nothing resumed."""
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def shorter(kind: str, dropped: int) -> nn.Module:
    """Return the tiny model whose list lacks a block."""
    model = tiny_model(kind)
    blocks = model.model.layers
    model.model.layers = nn.ModuleList([block for number, block in enumerate(blocks) if number != dropped])
    model.config.num_hidden_layers = len(blocks) - 1
    return model


def batches(seed: int = 0, count: int = 2, rows: int = 2) -> Sequence[Tensor]:
    """Return batches of random ids, [rows, 9] each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 48, (rows, 9), generator=generator) for _ in range(count)]
