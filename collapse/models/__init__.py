"""The reference architecture and the free layout; importing them registers both with transformers' Auto classes."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from collapse.models.adaptive_llama import (
    AdaptiveLlamaConfig,
    AdaptiveLlamaForCausalLM,
    AdaptiveLlamaModel,
)
from collapse.models.free import FreeConfig

AutoConfig.register(FreeConfig.model_type, FreeConfig, exist_ok=True)
AutoConfig.register(AdaptiveLlamaConfig.model_type, AdaptiveLlamaConfig, exist_ok=True)
AutoModel.register(AdaptiveLlamaConfig, AdaptiveLlamaModel, exist_ok=True)
AutoModelForCausalLM.register(AdaptiveLlamaConfig, AdaptiveLlamaForCausalLM, exist_ok=True)

__all__ = ["AdaptiveLlamaConfig", "AdaptiveLlamaForCausalLM", "AdaptiveLlamaModel", "FreeConfig"]
