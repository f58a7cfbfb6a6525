"""The cases of the architecture suite: every kind as it is, and what one can do to a config or its files that bites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from tests.architecture_configs import CONFIGS, POSITIONS, VOCABULARY
from tests.architectures import drawn_model

TOKENS = tuple(range(2, VOCABULARY, 2))
MAX_TOKENS = 24


@dataclass(frozen=True)
class Case:
    """One model and how it is saved.

    `full` names parts of tensor names that stay in fp32 where the rest is in `dtype`. `copied` writes the tied head
    under its second name too, `extra` names tensors that no module claims, `bare` leaves out all but the base model.
    """

    name: str
    kind: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    full: tuple[str, ...] = ()
    shard: int | None = None
    copied: bool = False
    extra: tuple[str, ...] = ()
    bare: bool = False
    max_tokens: int = MAX_TOKENS

    @property
    def config(self) -> PreTrainedConfig:
        """The config that the model is built from."""
        return AutoConfig.for_model(self.kind, **{**CONFIGS[self.kind], **self.changes})

    @property
    def schema(self) -> dict[str, Any]:
        """The contract: about half of the ids, and fewer tokens than the model has positions."""
        return {"type": "text", "tokens": list(TOKENS), "max_tokens": self.max_tokens}

    def save(self, root: Path) -> type[PreTrainedModel]:
        """Write the checkpoint into `root`; returns the class of the model."""
        model = drawn_model(self.config)
        _cast(model, self.dtype, self.full)
        limit = {"max_shard_size": self.shard} if self.shard else {}
        (model.base_model if self.bare else model).save_pretrained(root, **limit)
        if self.copied or self.extra:
            self._add_tensors(model, root / "model.safetensors")
        return type(model)

    def _add_tensors(self, model: PreTrainedModel, path: Path) -> None:
        added = {name: torch.arange(5.0) for name in self.extra}
        if self.copied:
            added |= {name: model.get_parameter(name).data.clone() for name in model.all_tied_weights_keys}
        save_file(load_file(path) | added, path, {"format": "pt"})


def _cast(model: PreTrainedModel, dtype: torch.dtype, full: tuple[str, ...]) -> None:
    for name, parameter in model.named_parameters():
        if not any(part in name for part in full):
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def _variants() -> Iterator[Case]:
    """What differs between two checkpoints of one kind."""
    yield Case("llama, tied", "llama", dict(tie_word_embeddings=True))
    yield Case("llama, multi-query", "llama", dict(num_key_value_heads=1))
    yield Case("llama, one head a key", "llama", dict(num_key_value_heads=4))
    yield Case("llama, biases", "llama", dict(attention_bias=True, mlp_bias=True))
    yield Case("llama, bf16", "llama", dtype=torch.bfloat16)
    yield Case("llama, bf16 with fp32 norms", "llama", dict(tie_word_embeddings=True), torch.bfloat16, ("norm",))
    yield Case("llama, shards", "llama", shard=4096)
    yield Case("llama, head saved twice", "llama", dict(tie_word_embeddings=True), copied=True)
    yield Case("llama, unclaimed tensor", "llama", extra=("old.bias",))
    yield Case("llama, YaRN", "llama", dict(rope_parameters=_scaled("yarn", factor=2.0)))
    yield Case("llama, llama3 rotations", "llama", dict(rope_parameters=_scaled("llama3", factor=2.0, **_LLAMA3)))
    yield Case("llama, dynamic rotations", "llama", dict(rope_parameters=_scaled("dynamic", factor=2.0)))
    for length, where in ((16, "within"), (32, "beyond")):
        changes = dict(rope_parameters=_LONG | dict(original_max_position_embeddings=length))
        yield Case(f"phi3, long rotations {where} the inputs", "phi3", changes)
    yield Case("qwen2, tied, upper layer slides", "qwen2", dict(tie_word_embeddings=True, **_SLIDES))
    yield Case("mistral, window above the inputs", "mistral", dict(sliding_window=40))
    yield Case("gemma3_text, window above the inputs", "gemma3_text", dict(sliding_window=40))
    yield Case("gemma4_text, no shared cache, keys are values", "gemma4_text", dict(
        num_kv_shared_layers=0, attention_k_eq_v=True, num_global_key_value_heads=1,
    ))  # fmt: skip
    yield Case("gemma4_text, experts", "gemma4_text", dict(
        enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=8,
    ))  # fmt: skip
    yield Case("gemma4_text, keys of layers that share them", "gemma4_text", extra=tuple(
        f"model.layers.3.self_attn.{part}.weight" for part in ("k_proj", "v_proj", "k_norm")
    ))  # fmt: skip
    yield Case("stablelm, parallel, head norms", "stablelm", dict(use_parallel_residual=True, qk_layernorm=True))
    yield Case("gpt_neox, sequential, shards", "gpt_neox", dict(use_parallel_residual=False), shard=4096)
    yield Case("gpt2, untied head", "gpt2", dict(tie_word_embeddings=False))
    yield Case("gpt2, base model", "gpt2", bare=True)
    yield Case("gpt2, every position", "gpt2", max_tokens=POSITIONS)
    yield Case("opt, norm last, narrow embedding", "opt", dict(do_layer_norm_before=False, word_embed_proj_dim=8))
    yield Case("falcon, ALiBi", "falcon", dict(alibi=True))
    yield Case("falcon, grouped, two norms", "falcon", dict(
        new_decoder_architecture=True, num_attention_heads=4, num_kv_heads=2,
    ))  # fmt: skip
    yield Case("falcon, sequential, biases", "falcon", dict(parallel_attn=False, multi_query=False, bias=True))
    yield Case("mixtral, bf16 with fp32 router, shards", "mixtral", {}, torch.bfloat16, ("gate.weight",), 8192)
    yield Case("mamba2, longer than a chunk", "mamba2", dict(chunk_size=8))


_LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0)
_LONG = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 1.5], long_factor=[2.0, 3.0])
_SLIDES = dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)


def _scaled(kind: str, **fields: float) -> dict[str, Any]:
    return dict(rope_type=kind, rope_theta=1e4, original_max_position_embeddings=16, **fields)


CASES: Mapping[str, Case] = {
    case.name: case for case in (*(Case(kind, kind) for kind in CONFIGS), *_variants())
}  # fmt: skip
