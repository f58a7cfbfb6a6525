"""Tiny models of real architectures, built from transformers' own config classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from collapse.auto import auto_class
from tests.architecture_configs import CONFIGS as TABLE

# The kinds whose rows and layers other tests count; all others are as in the suite's table.
COUNTED: dict[str, dict[str, Any]] = {
    "llama": dict(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    ),
    "gpt2": dict(vocab_size=48, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0),
    "opt": dict(
        vocab_size=48, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, word_embed_proj_dim=16, pad_token_id=1, bos_token_id=2, eos_token_id=2,
    ),
    "mixtral": dict(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        sliding_window=None,
    ),
    "gemma3_text": dict(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, sliding_window=8, max_position_embeddings=64,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "bloom": dict(vocab_size=48, hidden_size=16, n_layer=2, n_head=2),
    "falcon": dict(
        vocab_size=48, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, alibi=True,
        new_decoder_architecture=False, multi_query=False,
    ),
    "mpt": dict(vocab_size=48, d_model=16, n_layers=2, n_heads=2, max_seq_len=64),
    "mistral": dict(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, sliding_window=4,
    ),
    "qwen2": dict(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_sliding_window=True, sliding_window=4,
        max_window_layers=1,
    ),
    "gemma2": dict(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, sliding_window=4, max_position_embeddings=64,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "phi3": dict(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, original_max_position_embeddings=4, pad_token_id=0,
        eos_token_id=1,
        rope_parameters=dict(
            rope_type="longrope", rope_theta=10000.0, long_factor=[2.0, 4.0], short_factor=[1.0, 1.25],
        ),
    ),
}  # fmt: skip


def tiny_config(kind: str, **changes: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(kind, **{**(COUNTED.get(kind) or TABLE[kind]), **changes})


def tiny_model(kind: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    return drawn_model(tiny_config(kind, **changes), seed)


def drawn_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with every parameter drawn at a size that matters, so that nothing is dead by its initial value.

    The values are multiples of a power of two: every machine draws the same.
    """
    model: PreTrainedModel = auto_class(config).from_config(config, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand_like(parameter) - 0.5)
    return model


def save_tiny(kind: str, root: Path, **changes: Any) -> Path:
    tiny_model(kind, **changes).save_pretrained(root)
    return root


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters under all their names, and buffers, as `Program.run` takes them."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
