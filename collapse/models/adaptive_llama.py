"""A Llama whose attention may add a `position_adaptive_bias`, and which is a plain Llama where it does not.

The position entropy at a token depends on all tokens before it, so token ids must travel with the KV cache.
They are written as base-256 digits in extra channels of the first layer's cached value states: every cache
class then grows, crops, reorders and moves them with the rest, and nothing else has to know. A model without
any `position_adaptive_bias` has no such channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from collapse.errors import UnsupportedError
from collapse.models.position_bias import (
    EntropySettings,
    PositionAdaptiveBias,
    digit_count,
    from_digits,
    position_entropy,
    to_digits,
)


@strict
class AdaptiveLlamaConfig(LlamaConfig):  # type: ignore[misc]
    """`LlamaConfig` and which layers have a `position_adaptive_bias`.

    Args:
        position_adaptive_bias: one flag a layer; all True where it is not given.
        bias_knots: learned distances a head: 0, 1, 3, 7, ... `2^(bias_knots - 1) - 1`.
        gate_width: nats over which the gate rises.
        entropy_recall, entropy_prior: see `EntropySettings`; its window is `max_position_embeddings`.
    """

    model_type = "adaptive_llama"
    collapse_switches: ClassVar[dict[str, str]] = {
        "model.layers.{layer}.self_attn.position_adaptive_bias": "position_adaptive_bias"
    }

    position_adaptive_bias: list[bool] | None = None
    bias_knots: int = 11
    gate_width: float = 0.1
    entropy_recall: int = 16
    entropy_prior: int = 256

    def __post_init__(self, **kwargs: Any) -> None:
        if self.position_adaptive_bias is None:
            self.position_adaptive_bias = [True] * self.num_hidden_layers
        super().__post_init__(**kwargs)

    def validate_bias_layers(self) -> None:
        """Part of the `@strict` validation: one flag for every layer."""
        flags = self.position_adaptive_bias or []
        if len(flags) != self.num_hidden_layers:
            raise ValueError(
                f"position_adaptive_bias has {len(flags)} flags for {self.num_hidden_layers} layers; give one a layer"
            )

    @property
    def entropy_settings(self) -> EntropySettings:
        """What the position entropy of this model depends on besides the tokens."""
        return EntropySettings(self.max_position_embeddings, self.entropy_recall, self.entropy_prior)


@dataclass(frozen=True)
class PositionContext:
    """What attention needs to know about the tokens.

    `entropy`: float32 `[batch, new]`, nats. `query_index`: place of the new tokens among the cached ones,
    int64 `[new]`. `codes`: token id + 1 of the new tokens, 0 for padding, int64 `[batch, new]`.
    """

    entropy: Tensor
    query_index: Tensor
    codes: Tensor


class AdaptiveLlamaAttention(LlamaAttention):  # type: ignore[misc]
    """Llama's attention, with token codes in the cache of layer 0 and an optional additive bias."""

    def __init__(self, config: AdaptiveLlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.history_digits = digit_count(config.vocab_size) if layer_idx == 0 else 0
        flags = config.position_adaptive_bias or []
        self.position_adaptive_bias = (
            PositionAdaptiveBias(config.num_attention_heads, config.bias_knots, config.gate_width)
            if flags[layer_idx]
            else None
        )

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        position_context: PositionContext | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As `LlamaAttention.forward`; `position_context` is None in a model without any bias."""
        if position_context is None:
            result: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states, position_embeddings, attention_mask, cache, **kwargs
            )
            return result
        query, key, value = self._project(hidden_states, position_embeddings)
        if cache is not None:
            key, value = self._update(cache, key, value, position_context, kwargs)
        if self.position_adaptive_bias is not None:
            bias = self.position_adaptive_bias(position_context.entropy, position_context.query_index, key.shape[2])
            attention_mask = _with_bias(attention_mask, bias, position_context.query_index, query.dtype)
        attend: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        mixed, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.o_proj(mixed.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights

    def _project(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if position_embeddings is None:
            raise TypeError("attention needs position_embeddings")
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = position_embeddings
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        return query, key, value

    def _update(
        self, cache: Cache, key: Tensor, value: Tensor, context: PositionContext, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        if self.history_digits:
            written = to_digits(context.codes, self.history_digits, value.dtype)
            written = written[:, None].expand(-1, value.shape[1], -1, -1)
            value = torch.cat((value, written), dim=-1)
        key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
        return key, value[..., : self.head_dim] if self.history_digits else value


def _with_bias(mask: Tensor | None, bias: Tensor, query_index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `bias` as a float attention mask; the least finite number where `mask` or causality forbids."""
    bias = bias.to(dtype)
    if mask is not None and mask.dtype != torch.bool:
        return bias + mask
    if mask is None:
        mask = torch.arange(bias.shape[-1], device=bias.device) <= query_index[:, None]
    return torch.where(mask, bias, torch.finfo(dtype).min)


class AdaptiveLlamaModel(LlamaModel):  # type: ignore[misc]
    """`LlamaModel` that measures the position entropy of the context once a forward."""

    config_class = AdaptiveLlamaConfig
    _supports_flash_attn = False  # the bias is an additive float mask
    _supports_flex_attn = False
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": LlamaDecoderLayer,
        "attentions": AdaptiveLlamaAttention,
    }

    def __init__(self, config: AdaptiveLlamaConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = AdaptiveLlamaAttention(config, index)
        self.reads_history = any(config.position_adaptive_bias or [])
        self._keys_to_ignore_on_load_unexpected = _placeholder_keys(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `LlamaModel.forward`; needs `input_ids` where any layer has a `position_adaptive_bias`.

        `position_context` may be given where the context was measured elsewhere, as in training on the end
        of a longer context.
        """
        if self.reads_history and kwargs.get("position_context") is None:
            if input_ids is None:
                raise UnsupportedError(
                    "position_adaptive_bias reads token ids", where="inputs_embeds", fix="pass input_ids"
                )
            kwargs["position_context"] = self.position_context(input_ids, attention_mask, cache)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

    def position_context(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, cache: Cache | None = None
    ) -> PositionContext:
        """Measure the context of the new tokens: those in `cache` before them, and they themselves.

        Args:
            input_ids: new tokens `[batch, new]`.
            attention_mask: `[batch, past + new]`, or `[batch, 1, new, keys]`, or None.
            cache: what holds the tokens before; it is not changed.
        """
        new = input_ids.shape[1]
        past = cache.get_seq_length() if cache is not None else 0
        query_index = torch.arange(new, device=input_ids.device) + past
        codes = input_ids + 1
        if attention_mask is not None:
            codes = codes * _is_token(attention_mask, query_index)
        history = _cached_codes(cache, self.config.head_dim, past)
        context = codes if history is None else torch.cat((history.to(codes.device), codes), dim=1)
        entropy = position_entropy(context, self.config.entropy_settings)
        return PositionContext(entropy[:, context.shape[1] - new :], query_index, codes)

    def _init_weights(self, module: nn.Module) -> None:
        _init_weights(self, module, super()._init_weights)


def _is_token(mask: Tensor, query_index: Tensor) -> Tensor:
    """Return which new tokens are no padding, bool `[batch, new]`: those that may see themselves."""
    if mask.dim() == 2:
        return mask[:, mask.shape[1] - query_index.shape[0] :] > 0
    own = mask[:, 0].gather(2, query_index[None, :, None].expand(mask.shape[0], -1, -1))[..., 0]
    return own if own.dtype == torch.bool else own == 0


def _cached_codes(cache: Cache | None, head_dim: int, past: int | Tensor) -> Tensor | None:
    """Return the token codes kept in `cache`, int64 `[batch, slots]`, 0 in slots that are not in use."""
    if cache is None or not cache.layers or not cache.layers[0].is_initialized:
        return None
    values = cache.layers[0].values
    if values.dim() != 4:
        return None
    codes = from_digits(values[:, 0, :, head_dim:])
    return codes * (torch.arange(codes.shape[1], device=codes.device) < past)


def _placeholder_keys(config: AdaptiveLlamaConfig) -> set[str]:
    """Return patterns of the keys that may stand in for an absent bias; a present one must have its shape."""
    absent = [layer for layer, built in enumerate(config.position_adaptive_bias or []) if not built]
    return {rf"^model\.layers\.{layer}\.self_attn\.position_adaptive_bias\.weight$" for layer in absent}


def _init_weights(model: Any, module: nn.Module, otherwise: Callable[[nn.Module], None]) -> None:
    """Start every bias as a recency preference that halves from head to head; threshold 0: always open."""
    if not isinstance(module, PositionAdaptiveBias):
        otherwise(module)
        return
    heads, knots = module.weight.shape
    slope = torch.full((heads, 1), 2.0) ** -torch.arange(heads)[:, None]
    init.copy_(module.weight, -slope * torch.arange(knots))
    init.zeros_(module.threshold)


class AdaptiveLlamaForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """`LlamaForCausalLM` over an `AdaptiveLlamaModel`."""

    config_class = AdaptiveLlamaConfig
    _supports_flash_attn = False
    _supports_flex_attn = False
    _can_record_outputs = AdaptiveLlamaModel._can_record_outputs

    def __init__(self, config: AdaptiveLlamaConfig) -> None:
        super().__init__(config)
        self.model = AdaptiveLlamaModel(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        _init_weights(self, module, super()._init_weights)
