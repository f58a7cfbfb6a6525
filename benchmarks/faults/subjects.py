"""The tiny models that faults are planted in: random weights, every parameter of a size that matters."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from collapse.analysis.layers import Layers, layer_lists
from collapse.auto import auto_class
from collapse.checkpoint import Checkpoint
from collapse.plan import Evidence, Plan, Rewrite
from collapse.program import Program
from collapse.schema import InputSchema
from collapse.trace import quiet, trace

VOCABULARY, POSITIONS, LONGEST = 47, 64, 24
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EVIDENCE = Evidence(grade="proved", claim="it is so", method="planted")

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 3, "bos_token_id": 3, "eos_token_id": 4,
    "pad_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA = dict(
    _BASE, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=POSITIONS
)
_WIDE = dict(_LLAMA, head_dim=8)
_MOE = dict(_LLAMA, num_experts_per_tok=2)
_GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": POSITIONS, "bos_token_id": 3,
    "eos_token_id": 4,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": dict(_LLAMA, attention_bias=True),
    "mistral": dict(_LLAMA, sliding_window=8),
    "qwen2": dict(
        _LLAMA, use_sliding_window=True, sliding_window=8, max_window_layers=0, layer_types=MIXED,
        tie_word_embeddings=True,
    ),
    "qwen3": dict(_WIDE, attention_bias=True),
    "gemma2": dict(_WIDE, sliding_window=8, layer_types=MIXED, tie_word_embeddings=True),
    "gemma3_text": dict(_WIDE, sliding_window=8, layer_types=MIXED, tie_word_embeddings=True),
    "phi3": _LLAMA,
    "olmo2": dict(_LLAMA, attention_bias=True),
    "granite": dict(_LLAMA, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5, attention_bias=True),
    "gpt2": _GPT,
    "gpt_neox": dict(_BASE, intermediate_size=24, num_attention_heads=4, max_position_embeddings=POSITIONS),
    "opt": dict(
        _BASE, ffn_dim=24, num_attention_heads=4, max_position_embeddings=POSITIONS, word_embed_proj_dim=16,
        tie_word_embeddings=True,
    ),
    "stablelm": dict(_LLAMA, use_qkv_bias=True),
    "starcoder2": dict(_LLAMA, sliding_window=8, tie_word_embeddings=True),
    "mixtral": dict(_MOE, num_local_experts=4, sliding_window=None),
    "qwen3_moe": dict(_MOE, head_dim=8, num_experts=4, moe_intermediate_size=8, attention_bias=True),
    "olmoe": dict(_MOE, num_experts=4),
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """One source: a checkpoint on disk, and the program that stands for its architecture.

    `weights` are what the program reads; `layers` is its list of blocks.
    """

    kind: str
    checkpoint: Checkpoint
    config: PreTrainedConfig
    program: Program
    weights: dict[str, torch.Tensor]
    layers: Layers

    def plan(self, *rewrites: Rewrite, kept: tuple[int, ...] | None = None) -> Plan:
        """Return a plan for requests of up to `LONGEST` tokens of `kept` ids, or of all."""
        schema = contract(kept)
        return Plan(
            source=self.checkpoint.digest, model_type=self.checkpoint.model_type, input_schema=schema.to_json(),
            schema_digest=schema.digest, rewrites=rewrites,
        )  # fmt: skip


def contract(kept: tuple[int, ...] | None = None) -> InputSchema:
    """Return the contract: token ids, bounded in length."""
    tokens = tuple(range(VOCABULARY)) if kept is None else kept
    return InputSchema(type="text", tokens=tokens, max_tokens=LONGEST, workload={"prompt": LONGEST - 4, "new": 4})


@cache
def config_of(kind: str) -> PreTrainedConfig:
    """Return the config of one kind."""
    return AutoConfig.for_model(kind, **CONFIGS[kind])


@cache
def program_of(kind: str) -> Program:
    """Trace one kind, once."""
    return trace(config_of(kind))


def drawn_model(kind: str, seed: int) -> PreTrainedModel:
    """Return a model with every parameter drawn anew."""
    model: PreTrainedModel = auto_class(config_of(kind)).from_config(config_of(kind), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            centre = 1.0 if parameter.ndim == 1 and "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + centre)
    return model


def make_subject(
    kind: str, root: Path, seed: int, mutate: Callable[[PreTrainedModel, random.Random], None] | None = None
) -> Subject:
    """Write a source of one kind; `mutate` may change its weights before."""
    with quiet():
        model = drawn_model(kind, seed)
        if mutate is not None:
            with torch.no_grad():
                mutate(model, random.Random(seed))
        model.save_pretrained(root)
    checkpoint = Checkpoint.open(root)
    weights = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    layers = _layers(kind, checkpoint)
    return Subject(kind, checkpoint, config_of(kind), program_of(kind), weights, layers)


def _layers(kind: str, checkpoint: Checkpoint) -> Layers:
    if kind not in _KNOWN:
        found = [
            layers
            for layers in layer_lists(program_of(kind), checkpoint, config_of(kind))
            if isinstance(layers, Layers)
        ]
        if len(found) != 1:
            raise LookupError(f"{kind}: {len(found)} lists of layers")
        _KNOWN[kind] = found[0]
    return _KNOWN[kind]


_KNOWN: dict[str, Layers] = {}
