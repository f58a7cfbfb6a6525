"""Tiny multimodal checkpoints, from transformers' own config classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from collapse.auto import auto_class

TEXT: dict[str, Any] = dict(
    vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
VISION: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
)
MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": dict(
        text_config=dict(
            TEXT, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"], pad_token_id=0
        ),
        vision_config=dict(VISION, model_type="siglip_vision_model", vision_use_head=False),
        mm_tokens_per_image=4, image_token_index=47, boi_token_index=45, eoi_token_index=46,
    ),
    "qwen2_5_vl": dict(
        text_config=dict(TEXT, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}),
        vision_config=dict(
            depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=16, patch_size=4,
            fullatt_block_indexes=[0],
        ),
        image_token_id=47, video_token_id=46, vision_start_token_id=45, vision_end_token_id=44,
        tie_word_embeddings=False,
    ),
    "llava": dict(
        text_config=dict(TEXT, model_type="llama"),
        vision_config=dict(VISION, model_type="clip_vision_model"),
        image_token_index=47,
    ),
    "mistral3": dict(
        text_config=dict(TEXT, model_type="mistral", sliding_window=None),
        vision_config=dict(VISION, model_type="pixtral"),
        image_token_index=47,
    ),
}  # fmt: skip


def multimodal_config(kind: str, **changes: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(kind, **{**MULTIMODAL[kind], **changes})


def multimodal_model(kind: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = multimodal_config(kind, **changes)
    model = auto_class(config).from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def save_multimodal(kind: str, root: Path, **changes: Any) -> Path:
    multimodal_model(kind, **changes).save_pretrained(root)
    (root / "preprocessor_config.json").write_text("{}")
    return root
