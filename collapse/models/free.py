"""Models of the free layout: an architecture of transformers, some of whose modules have other shapes or are maps.

`config.json` is described in `collapse.free_layout`. For the config class and the causal LM of an architecture, a
subclass of each is made when the first such config is read, and registered with transformers' Auto classes. The model
is built as the architecture builds it; then, before any weight is loaded, modules are changed by their paths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import Cache, DummyLayer

from collapse.errors import CheckpointError, UnsupportedError
from collapse.free_layout import BASE, MODEL_TYPE, SITES, nested
from collapse.models.rebuild import rebuild

FIELD = "collapse_sites"  # of a config in memory, which is otherwise that of the architecture
NO_KEYS = "collapse_no_keys"  # in memory only: the numbers of the blocks that keep no keys
CACHES = ("cache", "past_key_values")  # what transformers calls the argument, and called it


class FreeConfig(PreTrainedConfig):  # type: ignore[misc]
    """Reads any config of the free layout, and gives one of the subclass for its architecture."""

    model_type = MODEL_TYPE

    def __new__(cls, *args: Any, **values: Any) -> Any:
        """Return the config for a config.json's `values`."""
        if BASE not in values:  # transformers asks for a class's defaults
            return super().__new__(cls)
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **kwargs: Any) -> Any:
        """Return the config for the content of a config.json; raises `UnsupportedError` for an unknown base."""
        return _config_class(_kind_of(config_dict)).from_dict(config_dict, **kwargs)


class FreeConfigMixin:
    """What the config of an architecture has more in the free layout; its other fields are those of the base."""

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **kwargs: Any) -> Any:
        """Take the content of a config.json, or what `to_dict` gives."""
        values = dict(config_dict)
        if BASE in values:
            values = {**values[BASE], FIELD: values[SITES]}
        return super().from_dict(values, **kwargs)  # type: ignore[misc]

    @property
    def kv_sharing_modes(self) -> list[str | None]:
        """For transformers' caches: which blocks store nothing of their own."""
        own = getattr(super(), "kv_sharing_modes", None) or [None] * self.num_hidden_layers  # type: ignore[attr-defined]
        gone = vars(self).get(NO_KEYS, ())
        return ["reuse" if number in gone else mode for number, mode in enumerate(own)]

    def to_json_string(self, use_diff: bool = True) -> str:
        """Return the content of config.json."""
        values = self.to_diff_dict() if use_diff else self.to_dict()  # type: ignore[attr-defined]
        values = {name: value for name, value in values.items() if name != NO_KEYS}
        sites = values.pop(FIELD)
        encoded = self._encode_special_floats(nested(values, sites))  # type: ignore[attr-defined]
        return json.dumps(encoded, indent=2, sort_keys=True) + "\n"


class FreeModelMixin:
    """What the causal LM of an architecture does more in the free layout."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        base = next(kind for kind in type(self).__mro__ if not issubclass(kind, FreeModelMixin))
        setattr(config, NO_KEYS, rebuild(self, config, getattr(config, FIELD), base))
        if 0 in vars(config)[NO_KEYS]:
            self.base_model.register_forward_pre_hook(_with_first_layers, with_kwargs=True)  # type: ignore[attr-defined]

    @classmethod
    def is_custom_code(cls) -> bool:
        """Whether transformers' rules for names in files are not for this model; they are."""
        return False

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As of transformers, but a tensor that is missing is an error: it would be random."""
        wanted = kwargs.pop("output_loading_info", False)
        model, keys = super().from_pretrained(*args, **kwargs, output_loading_info=True)  # type: ignore[misc]
        if keys["missing_keys"] and not wanted:
            raise CheckpointError(f"has no tensor {min(keys['missing_keys'])}", where=str(args[0] if args else ""))
        return (model, keys) if wanted else model

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        """As of transformers, also for modules that were built with a config of their own."""
        super().set_attn_implementation(*args, **kwargs)  # type: ignore[misc]
        chosen = self.config._attn_implementation_internal  # type: ignore[attr-defined]
        for module in self.modules():  # type: ignore[attr-defined]
            own = getattr(module, "config", None)
            if isinstance(own, PreTrainedConfig):
                own._attn_implementation_internal = chosen


def _with_first_layers(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Give a cache that was made without the config its first layers, where those keep nothing.

    transformers asks the first one how many tokens were seen, and would be told 0 for ever.
    """
    cache = next((kwargs[name] for name in CACHES if kwargs.get(name) is not None), None)
    if isinstance(cache, Cache) and cache.layer_class_to_replicate is not None and not cache.layers:
        gone = vars(module.config)[NO_KEYS]
        first = [DummyLayer() for number, found in enumerate(gone) if number == found]
        cache.layers.extend([*first, cache.layer_class_to_replicate()])


def _kind_of(values: Mapping[str, Any]) -> str:
    base, sites = values.get(BASE), values.get(SITES)
    if not isinstance(base, Mapping) or not isinstance(base.get("model_type"), str) or not isinstance(sites, Sequence):
        raise UnsupportedError("a config of the free layout has no base or no sites", where="config.json")
    return str(base["model_type"])


@cache
def _config_class(kind: str) -> Any:
    """Return the config class for the free layout of the architecture `kind`, after registering it and its model."""
    try:
        base = CONFIG_MAPPING[kind]
        model = AutoModelForCausalLM._model_mapping[base]
    except KeyError:
        raise UnsupportedError(f"model_type {kind!r} is no causal LM of transformers", where="config.json") from None
    made = type(f"Free{base.__name__}", (FreeConfigMixin, base), {"__module__": __name__})
    whole = type(f"Free{model.__name__}", (FreeModelMixin, model), {"config_class": made, "__module__": __name__})
    AutoModelForCausalLM.register(made, whole)
    return made
