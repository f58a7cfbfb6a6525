"""The text model inside a multimodal one: which causal LM it is, and what that calls its tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from collapse.analysis.config_values import config_values
from collapse.analysis.reachability import reachability
from collapse.errors import UnsupportedError
from collapse.program import Program
from collapse.trace import meta_model, quiet

TWINS = 24  # model types that are tried, nearest names first, where the text model is no causal LM of its own
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TextModel:
    """A causal LM with the text model's layout.

    Attributes:
        root: the field of the outer config that holds the text model's.
        config: what the causal LM is built from.
        class_name: the causal LM's class.
        names: state-dict name of the causal LM -> that of the multimodal model.
    """

    root: str
    config: PreTrainedConfig
    class_name: str
    names: Mapping[str, str]


def config_root(config: PreTrainedConfig) -> str | None:
    """Return which field of `config` is the text model's config; None where the model is a text model itself."""
    text = config.get_text_config()
    return next((name for name in type(config).sub_configs if getattr(config, name, None) is text), None)


def text_models(config: PreTrainedConfig, program: Program) -> Iterator[TextModel]:
    """Yield causal LMs whose tensors are just those that text-only inputs read, by name and shape.

    First the causal LM of the text config itself. Some text models have none (their class exists within the multimodal
    model alone); then those of other model types, nearest names first, that have the same layout. That they compute the
    same is for the caller to prove.
    """
    root, text = config_root(config), config.get_text_config()
    if root is None:
        return
    ties = any("embed" in name for group in program.tied for name in group)
    read = reachability(program).read & program.shapes.keys()  # what a file holds; other buffers are computed
    own = type(text) in AutoModelForCausalLM._model_mapping
    for found in [text] if own else _twins(text):
        candidate = copy.deepcopy(found)
        candidate.tie_word_embeddings = ties
        model = _built(candidate)
        names = _names(model, meta_model(config), text, program.shapes) if model is not None else None
        if model is not None and names is not None and read <= set(names.values()):
            yield TextModel(root, candidate, type(model).__name__, names)


def _twins(text: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    types = sorted(CONFIG_MAPPING.keys(), key=lambda name: (-_shared(name, text.model_type), name))
    lms = (name for name in types if CONFIG_MAPPING[name] in AutoModelForCausalLM._model_mapping)
    for model_type, _ in zip(lms, range(TWINS), strict=False):
        twin = _as_type(text, model_type)
        if twin is not None:
            yield twin


def _shared(one: str, other: str) -> int:
    """Return with how many equal characters two names begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _as_type(text: PreTrainedConfig, model_type: str) -> PreTrainedConfig | None:
    """Return a config of another type with the fields that both types have; None where it cannot be built."""
    try:
        with quiet():
            known = CONFIG_MAPPING[model_type]().to_dict()
            fields = {name: value for name, value in text.to_dict().items() if name in known and name != "model_type"}
            return _plain_rope(AutoConfig.for_model(model_type, **fields))
    except Exception:  # each config class refuses foreign values in its own way
        return None


def _plain_rope(config: PreTrainedConfig) -> PreTrainedConfig:
    """Drop the rope parameters that change nothing that this type computes: runtimes may read them otherwise."""
    for name in sorted(getattr(config, "rope_parameters", None) or {}):
        plain = copy.deepcopy(config)
        del plain.rope_parameters[name]
        if name not in {"rope_type", "rope_theta"} and _same_values(plain, config):
            config = plain
    return config


def _same_values(left: PreTrainedConfig, right: PreTrainedConfig) -> bool:
    try:
        one, other = config_values(left), config_values(right)
    except UnsupportedError:
        return False
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _built(config: PreTrainedConfig) -> PreTrainedModel | None:
    try:
        return meta_model(config)
    except UnsupportedError:
        return None


def _names(
    model: PreTrainedModel, whole: PreTrainedModel, text: PreTrainedConfig, shapes: Shapes
) -> dict[str, str] | None:
    """Match the causal LM's tensors with the whole's; its base model stands where the text config is used."""
    paths = [path for path, module in whole.named_modules() if _uses(module, text)]
    if not paths:
        return None
    prefix = f"{model.base_model_prefix}."
    names: dict[str, str] = {}
    for name, tensor in model.state_dict().items():
        inner = f"{paths[0]}.{name.removeprefix(prefix)}" if name.startswith(prefix) else name
        if shapes.get(inner) != tuple(tensor.shape):
            return None
        names[name] = inner
    return names


def _uses(module: Any, text: PreTrainedConfig) -> bool:
    return isinstance(module, PreTrainedModel) and type(module.config) is type(text)
