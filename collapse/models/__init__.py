"""The reference architecture; importing this package registers it with transformers' Auto classes."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from collapse.models.adaptive_llama import (
    AdaptiveLlamaConfig,
    AdaptiveLlamaForCausalLM,
    AdaptiveLlamaModel,
)

AutoConfig.register(AdaptiveLlamaConfig.model_type, AdaptiveLlamaConfig, exist_ok=True)
AutoModel.register(AdaptiveLlamaConfig, AdaptiveLlamaModel, exist_ok=True)
AutoModelForCausalLM.register(AdaptiveLlamaConfig, AdaptiveLlamaForCausalLM, exist_ok=True)

__all__ = ["AdaptiveLlamaConfig", "AdaptiveLlamaForCausalLM", "AdaptiveLlamaModel"]
