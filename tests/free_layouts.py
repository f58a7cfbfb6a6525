"""Plans of the free layout made by hand, and the same change made on a model of transformers by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from collapse.analysis.channels import channels_of, narrow_sites
from collapse.analysis.layers import drop_layers, layer_lists
from collapse.analysis.sublayers import add_bias, outputs_of, stand_in
from collapse.analysis.units import Channels
from collapse.checkpoint import Checkpoint
from collapse.plan import DropLayers, Narrow, Plan
from collapse.program import Program
from collapse.rewrite.values import Values
from collapse.schema import InputSchema
from collapse.trace import load_config, trace
from tests.architectures import tiny_config, tiny_model
from tests.replacing import MEASURED, values_in
from tests.tiny import PROVED, plan_for

TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
WIDE: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 4}, "qwen3": {"num_hidden_layers": 4, "vocab_size": 48, "layer_types": None},
    "gemma3_text": {"num_hidden_layers": 4, "layer_types": TYPES}, "gpt2": {"n_layer": 4},
}  # fmt: skip
BLOCKS = {"gpt2": "transformer.h"}
PARTS = {"gpt2": ("attn", "mlp")}
SCHEMA = InputSchema(type="text", tokens=tuple(range(48)), max_tokens=16)
WIDTH = 16
Tensors = Mapping[str, torch.Tensor]


def attention(kind: str, block: int) -> str:
    return f"{BLOCKS.get(kind, 'model.layers')}.{block}.{PARTS.get(kind, ('self_attn', 'mlp'))[0]}"


def mlp(kind: str, block: int) -> str:
    return f"{BLOCKS.get(kind, 'model.layers')}.{block}.mlp"


def map_of(by: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Draw the tensors of a map, at a size that matters; multiples of a power of two."""
    made = torch.Generator().manual_seed(seed)
    shapes = {
        "zero": {}, "constant": {"bias": (WIDTH,)}, "linear": {"weight": (WIDTH, WIDTH), "bias": (WIDTH,)},
        "low-rank": {"down": (3, WIDTH), "up": (WIDTH, 3)},
    }  # fmt: skip
    return {part: torch.rand(shape, generator=made) - 0.5 for part, shape in shapes[by].items()}


@cache
def program(kind: str, **sizes: int) -> Program:
    return trace(tiny_config(kind, **WIDE[kind], **sizes))


@cache
def outputs(kind: str) -> dict[str, int | None]:
    parts = re.compile(rf"{BLOCKS.get(kind, 'model.layers')}\.\d+\.\w+")
    sites = [path for path in program(kind).module_types if parts.fullmatch(path)]
    return outputs_of(tiny_config(kind, **WIDE[kind]), sites)


@dataclass
class Case:
    """A source, and the rewrites and values that were asked for so far; `sizes` are other fields of its config."""

    kind: str
    root: Path
    rewrites: list[Any] = field(default_factory=list)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = tiny_model(self.kind, **WIDE[self.kind], **self.sizes)
        self.model.save_pretrained(self.root / "source")
        self.source = Checkpoint.open(self.root / "source")
        self.program = program(self.kind, **self.sizes)

    def map(self, site: str, by: str, tensors: Tensors | None = None) -> None:
        given = map_of(by, len(self.rewrites)) if tensors is None else tensors
        rewrite, values = stand_in(
            self.program, self.source, outputs(self.kind), site, by, given, PROVED if by == "zero" else MEASURED, "map"
        )
        self.rewrites.append(rewrite.model_copy(update={"evidence": MEASURED}))
        self.values |= values

    def bias(self, site: str, bias: torch.Tensor) -> None:
        rewrite, values = add_bias(self.program, self.source, site, bias, MEASURED, "compensation")
        self.rewrites.append(rewrite)
        self.values |= values

    def narrow(self, kind: str, block: int, units: Iterable[int]) -> tuple[Narrow, ...]:
        path = f"{BLOCKS.get(self.kind, 'model.layers')}.{block}"
        found = [c for c in channels_of(self.program, self.source, path) if isinstance(c, Channels) and c.kind == kind]
        rewrites = narrow_sites([(found[0], units)], self.program, load_config(self.source), MEASURED, "channels")
        assert isinstance(rewrites, tuple), rewrites
        self.rewrites += rewrites
        return rewrites

    def drop(self, *blocks: int) -> None:
        config = load_config(self.source)
        (layers,) = layer_lists(self.program, self.source, config)
        kept = set(range(layers.size)) - set(blocks)
        dropped = drop_layers(layers, kept, self.source, config, MEASURED, "layers")
        assert isinstance(dropped, DropLayers), dropped
        self.rewrites.append(dropped)

    def plan(self, **fields: Any) -> Plan:
        given = {"layout": "free", "schema": SCHEMA.to_json(), "schema_digest": SCHEMA.digest}
        return plan_for(self.source, *self.rewrites, **(given | fields))

    def given(self) -> Values | None:
        return values_in(self.root / "values.safetensors", self.values) if self.values else None


class Mapped(nn.Module):
    """A map written down again, to compare with."""

    def __init__(self, tensors: Tensors, several: int | None) -> None:
        super().__init__()
        self.tensors, self.several = tensors, several

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        weight = self.tensors.get("weight")
        if "down" in self.tensors:
            x = x @ self.tensors["down"].T
            weight = self.tensors["up"]
        bias = self.tensors.get("bias", torch.zeros(WIDTH))
        y = functional.linear(x, weight) + bias if weight is not None else torch.zeros_like(x) + bias
        return (y, None) if self.several else y


def put(model: nn.Module, site: str, tensors: Tensors, several: int | None) -> None:
    parent, _, name = site.rpartition(".")
    setattr(model.get_submodule(parent), name, Mapped(tensors, several))
