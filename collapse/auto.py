"""Which transformers class stands for a config: the causal LM, or the multimodal model that wraps one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

import collapse.models  # noqa: F401  (registers the reference architecture)


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the auto class that builds and loads the model of `config`.

    A multimodal model that is no causal LM by transformers' own table is one through its language model: given text
    alone it says what that says. Both tables are transformers'; a config in neither is left to the first to refuse.
    """
    known = type(config) in AutoModelForCausalLM._model_mapping
    wraps = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if wraps and not known else AutoModelForCausalLM


def config_from(values: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the config that config.json's `values` stand for; numbers that JSON lacks are spelled as objects there."""
    kind = CONFIG_MAPPING[values["model_type"]]
    return kind.from_dict(kind._decode_special_floats(dict(values)))
