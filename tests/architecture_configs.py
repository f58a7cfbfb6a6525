"""Tiny configs of real architectures, by `model_type`: every kind of layer that an architecture has is there.

The vocabulary and the position table have prime sizes, which no other axis has, so that a test can tell by its size
what an axis counts.
"""

from __future__ import annotations

from typing import Any

VOCABULARY, POSITIONS = 53, 61
MIXED = ("sliding_attention", "full_attention", "sliding_attention")

_BASE: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, bos_token_id=0, eos_token_id=1, pad_token_id=0
)
_LLAMA: dict[str, Any] = dict(
    _BASE, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=POSITIONS
)
_HEADS: dict[str, Any] = dict(_LLAMA, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
_PARTIAL: dict[str, Any] = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))
_GPT: dict[str, Any] = dict(
    vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=POSITIONS, bos_token_id=0, eos_token_id=1
)
_PER_LAYER: dict[str, Any] = dict(
    _HEADS, num_hidden_layers=4, sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2,
    num_kv_shared_layers=2, vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=4,
)  # fmt: skip
_MOE: dict[str, Any] = dict(_LLAMA, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
_DEEPSEEK: dict[str, Any] = dict(
    _BASE, intermediate_size=24, moe_intermediate_size=8, num_attention_heads=2, num_key_value_heads=2,
    n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
    kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    max_position_embeddings=POSITIONS,
)  # fmt: skip
_GATED_DELTA: dict[str, Any] = dict(
    linear_conv_kernel_dim=3, linear_key_head_dim=4, linear_value_head_dim=4, linear_num_key_heads=2,
    linear_num_value_heads=4, layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
_MAMBA2: dict[str, Any] = dict(
    mamba_d_state=4, mamba_d_conv=3, mamba_expand=2, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1,
    mamba_chunk_size=32,
)  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    # one rotary decoder after another: what differs is norms, biases, scales and gates
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": dict(_LLAMA, head_dim=8),
    "mistral": dict(_LLAMA, sliding_window=8),
    "gemma": _HEADS,
    "gemma2": dict(_HEADS, num_hidden_layers=2, sliding_window=8),
    "gemma3_text": dict(_HEADS, num_hidden_layers=3, sliding_window=8, layer_types=list(MIXED)),
    "phi": dict(_LLAMA, num_attention_heads=2, num_key_value_heads=2, **_PARTIAL),
    "phi3": _LLAMA,
    "olmo": _LLAMA,
    "olmo2": _LLAMA,
    "olmo3": dict(_LLAMA, num_hidden_layers=3, sliding_window=8, layer_types=list(MIXED)),
    "granite": dict(_LLAMA, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5),
    "smollm3": dict(_LLAMA, no_rope_layers=[1, 0]),
    "stablelm": dict(_LLAMA, num_attention_heads=2, num_key_value_heads=2, **_PARTIAL),
    "starcoder2": dict(_LLAMA, sliding_window=8),
    "cohere": _LLAMA,
    "cohere2": dict(_LLAMA, num_hidden_layers=3, sliding_window=8, layer_types=list(MIXED)),
    "glm": dict(_HEADS, **_PARTIAL),
    "glm4": dict(_HEADS, **_PARTIAL),
    "nemotron": dict(_LLAMA, num_attention_heads=2, num_key_value_heads=2, **_PARTIAL),
    "persimmon": dict(_LLAMA, num_attention_heads=2, num_key_value_heads=2, **_PARTIAL),
    "exaone4": dict(_LLAMA, num_hidden_layers=3, sliding_window=8, layer_types=list(MIXED)),
    "apertus": _LLAMA,
    "bitnet": _LLAMA,
    "helium": dict(_HEADS, num_key_value_heads=2),
    "hunyuan_v1_dense": dict(_LLAMA, head_dim=4, eod_token_id=2),
    "diffllama": dict(_LLAMA, head_dim=4),
    "nanochat": _LLAMA,
    "modernbert-decoder": dict(
        _LLAMA, num_hidden_layers=3, cls_token_id=0, sep_token_id=1, local_attention=16, layer_types=list(MIXED),
    ),
    # per-layer inputs and layers that share the cache of an earlier one
    "gemma3n_text": dict(
        _PER_LAYER, laurel_rank=4, altup_num_inputs=2, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0]
    ),
    "gemma4_text": dict(_PER_LAYER, global_head_dim=16),
    # learned positions, ALiBi, interleaved rotations
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "openai-gpt": _GPT,
    "ctrl": dict(_GPT, dff=24),
    "gptj": dict(_GPT, rotary_dim=4),
    "codegen": dict(_GPT, n_ctx=POSITIONS, n_head=4, rotary_dim=4),
    "gpt_neox": dict(_LLAMA, num_attention_heads=2, **_PARTIAL),
    "gpt_neo": dict(
        vocab_size=VOCABULARY, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
        window_size=8, max_position_embeddings=POSITIONS, bos_token_id=0, eos_token_id=1,
    ),
    "opt": dict(
        _BASE, ffn_dim=24, num_attention_heads=2, word_embed_proj_dim=16, max_position_embeddings=POSITIONS,
    ),
    "bloom": dict(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1),
    "mpt": dict(
        vocab_size=VOCABULARY, d_model=16, n_layers=2, n_heads=2, max_seq_len=POSITIONS, bos_token_id=0, eos_token_id=1,
    ),
    "falcon": dict(_BASE, num_attention_heads=2, max_position_embeddings=POSITIONS),
    "xglm": dict(
        vocab_size=VOCABULARY, d_model=16, ffn_dim=24, num_layers=2, attention_heads=2, bos_token_id=0, eos_token_id=1,
        pad_token_id=0, decoder_start_token_id=1, max_position_embeddings=POSITIONS,
    ),
    "biogpt": dict(_BASE, intermediate_size=24, num_attention_heads=2, max_position_embeddings=POSITIONS),
    # mixtures of experts
    "mixtral": dict(_LLAMA, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "phimoe": dict(_LLAMA, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "granitemoe": dict(_LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "jetmoe": dict(
        _BASE, intermediate_size=24, num_key_value_heads=2, kv_channels=8, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=POSITIONS,
    ),
    "qwen2_moe": dict(_MOE, shared_expert_intermediate_size=12, mlp_only_layers=[0]),
    "qwen3_moe": dict(_MOE, head_dim=8, mlp_only_layers=[0]),
    "olmoe": dict(_LLAMA, num_experts=4, num_experts_per_tok=2),
    "gpt_oss": dict(_HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": dict(
        _HEADS, moe_intermediate_size=8, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        first_k_dense_replace=1, **_PARTIAL,
    ),
    "llama4_text": dict(
        _LLAMA, head_dim=4, intermediate_size_mlp=24, num_local_experts=4, interleave_moe_layer_step=2,
        no_rope_layers=[1, 0], attention_chunk_size=8,
    ),
    # state spaces, convolutions, and hybrids of those with attention
    "mamba": dict(_BASE, state_size=4, time_step_rank=2),
    "mamba2": dict(_BASE, state_size=4, num_heads=4, head_dim=8, n_groups=1, chunk_size=32),
    "lfm2": dict(_LLAMA, block_multiple_of=8, layer_types=["conv", "full_attention"]),
    "lfm2_moe": dict(_MOE, num_dense_layers=1, layer_types=["conv", "full_attention"]),
    "qwen3_next": dict(_MOE, head_dim=8, shared_expert_intermediate_size=12, **_GATED_DELTA),
    "granitemoehybrid": dict(_LLAMA, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=12,
                             layer_types=["mamba", "attention"], **_MAMBA2),
    "bamba": dict(_LLAMA, attn_layer_indices=[1], **_MAMBA2),
    "falcon_h1": dict(_LLAMA, head_dim=4, mamba_d_ssm=32, **_MAMBA2),
    "jamba": dict(
        _LLAMA, num_experts=4, num_experts_per_tok=2, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, mamba_d_state=4, mamba_d_conv=3, mamba_dt_rank=2, use_mamba_kernels=False,
    ),
    "zamba2": dict(
        _LLAMA, num_hidden_layers=3, mamba_d_state=4, mamba_d_conv=3, mamba_ngroups=1, n_mamba_heads=4,
        mamba_headdim=8, chunk_size=32, adapter_rank=4, num_mem_blocks=1, use_mem_rope=True,
        layers_block_type=["mamba", "hybrid", "mamba"],
    ),
    "recurrent_gemma": dict(_HEADS, num_hidden_layers=3, lru_width=16, attention_window_size=16, conv1d_width=3),
    "rwkv": dict(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16, intermediate_size=24,
        context_length=POSITIONS, bos_token_id=0, eos_token_id=1,
    ),
    "minimax": dict(
        _LLAMA, num_local_experts=4, num_experts_per_tok=2, head_dim=4, block_size=32,
        layer_types=["linear_attention", "full_attention"],
    ),
    "nemotron_h": dict(
        vocab_size=VOCABULARY, hidden_size=16, layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        bos_token_id=0, eos_token_id=1, pad_token_id=0, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        max_position_embeddings=POSITIONS, intermediate_size=24, ssm_state_size=4, mamba_num_heads=4, mamba_head_dim=8,
        n_groups=1, conv_kernel=3, chunk_size=32, n_routed_experts=4, moe_intermediate_size=8,
        moe_shared_expert_intermediate_size=12, use_mamba_kernels=False,
    ),
}  # fmt: skip

_CLIP: dict[str, Any] = dict(
    model_type="clip_vision_model", hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    image_size=28, patch_size=14, projection_dim=8,
)  # fmt: skip
_SIGLIP: dict[str, Any] = dict(
    model_type="siglip_vision_model", hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    image_size=28, patch_size=14,
)  # fmt: skip
_PIXTRAL: dict[str, Any] = dict(
    model_type="pixtral", hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
    image_size=28, patch_size=14,
)  # fmt: skip
_QWEN_VISION: dict[str, Any] = dict(
    depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=16, fullatt_block_indexes=[0],
    window_size=28, patch_size=14,
)  # fmt: skip
_MROPE: dict[str, Any] = dict(
    rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2]), num_attention_heads=2
)

# language models behind a vision tower; the ids of image tokens are odd, so no stated input has them
CONFIGS |= {
    "gemma3": dict(
        text_config=dict(CONFIGS["gemma3_text"], model_type="gemma3_text"), vision_config=_SIGLIP,
        mm_tokens_per_image=4, boi_token_index=45, eoi_token_index=47, image_token_index=51,
    ),
    "llava": dict(text_config=dict(_LLAMA, model_type="llama"), vision_config=_CLIP, image_token_index=51),
    "mistral3": dict(
        text_config=dict(CONFIGS["mistral"], model_type="mistral"), vision_config=_PIXTRAL, image_token_index=51
    ),
    "qwen2_5_vl": dict(
        text_config=dict(_LLAMA, **_MROPE), vision_config=_QWEN_VISION, image_token_id=51, video_token_id=49,
        vision_start_token_id=47, vision_end_token_id=45,
    ),
}  # fmt: skip
