"""Switches of a config that a bound on the length of inputs may decide, found by the fields that transformers shares.

Nothing is proved here: a switch is an edit to try. Fields are those of the config class, written where config.json
has them; of several ways to write an edit the first that the model's own code accepts counts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Edit = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Switch:
    """A switch that inputs of at most `reach` tokens decide.

    Attributes:
        site: dotted path of the field that decides.
        what: what the source does beyond `reach`.
        reach: the longest sequence, in tokens, for which the edit may change nothing.
        edits: ways to write the edit, as dotted config.json path -> value.
        figures: what a report shows.
        obstacle: why the config has no way to say it; empty if it may have.
    """

    site: str
    what: str
    reach: int
    edits: tuple[Edit, ...]
    figures: Mapping[str, float | int | str]
    obstacle: str = ""


def length_switches(config: PreTrainedConfig, written: Mapping[str, Any]) -> tuple[Switch, ...]:
    """Return the switches of `config`, whose config.json says `written`."""
    text = config.get_text_config()
    prefix = text_prefix(config)
    part = written.get(prefix.rstrip("."), {}) if prefix else written
    if not isinstance(part, Mapping):
        return ()
    found = [_sliding_window(text), *_rope_switches(text, part)]
    return tuple(_below(prefix, switch) for switch in found if switch is not None)


def text_prefix(config: PreTrainedConfig) -> str:
    """Return what leads to the language model's part of config.json: nothing, or a field and a dot."""
    text = config.get_text_config()
    names = (name for name in getattr(config, "sub_configs", {}) if getattr(config, name, None) is text)
    return "" if text is config else f"{next(names, 'text_config')}."


def _below(prefix: str, switch: Switch) -> Switch:
    edits = tuple({prefix + path: value for path, value in edit.items()} for edit in switch.edits)
    return Switch(prefix + switch.site, switch.what, switch.reach, edits, switch.figures, switch.obstacle)


def _sliding_window(text: PreTrainedConfig) -> Switch | None:
    """A causal query sees the last `window` keys, itself included: all of them in a sequence of that length."""
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    if type(window) is not int or getattr(text, "use_sliding_window", True) is False:
        return None
    if kinds is not None and SLIDING not in kinds:
        return None
    edit: Edit = {} if kinds is None else {"layer_types": [FULL if kind == SLIDING else kind for kind in kinds]}
    if getattr(text, "use_sliding_window", None):
        edit["use_sliding_window"] = False
    layers = text.num_hidden_layers if kinds is None else list(kinds).count(SLIDING)
    return Switch(
        site="sliding_window",
        what=f"{layers} layers attend to the last {window} tokens only",
        reach=window,
        edits=({**edit, "sliding_window": None}, edit) if edit else ({"sliding_window": None},),
        figures={"window": window, "layers": layers},
        obstacle=_own_rope(text),
    )


def _own_rope(text: PreTrainedConfig) -> str:
    ropes = getattr(text, "rope_parameters", None) or {}
    if SLIDING in ropes and ropes.get(FULL) != ropes[SLIDING]:
        return "its sliding layers have rotary frequencies of their own, which full attention would not give them"
    return ""


def _rope_switches(text: PreTrainedConfig, written: Mapping[str, Any]) -> list[Switch | None]:
    ropes = getattr(text, "rope_parameters", None) or {}
    nested = [name for name, part in ropes.items() if isinstance(part, dict)]
    parts = {name: ropes[name] for name in nested} if nested else {"": ropes}
    return [_rope_switch(text, written, name, part) for name, part in sorted(parts.items())]


def _rope_switch(
    text: PreTrainedConfig, written: Mapping[str, Any], layer_type: str, rope: Mapping[str, Any]
) -> Switch | None:
    kind = rope.get("rope_type")
    if kind == "dynamic":
        reach, news, figures = text.max_position_embeddings, [_default(rope)], {"factor": rope.get("factor", 1.0)}
        what = f"rotary frequencies change beyond {reach} tokens (dynamic)"
    elif kind == "longrope" and rope.get("long_factor") != rope.get("short_factor"):
        reach = rope["original_max_position_embeddings"]
        news = [dict(rope) | {"long_factor": copy.deepcopy(rope["short_factor"])}]
        if _is_default_below(text, layer_type or None, rope):
            news.insert(0, _default(rope))
        what, figures = f"rotary frequencies change beyond {reach} tokens (longrope)", {}
    else:
        return None
    edits = tuple(_rope_edit(text, written, layer_type, new) for new in news)
    return Switch("rope_parameters", what, reach, edits, {"original_max_position_embeddings": reach, **figures})


def _default(rope: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    return {"rope_type": "default", **kept}


def _is_default_below(text: PreTrainedConfig, layer_type: str | None, rope: Mapping[str, Any]) -> bool:
    """Whether LongRoPE's short branch may be plain: factors of one, and attention that is not scaled."""
    if any(factor != 1 for factor in rope["short_factor"]):
        return False
    _, scaling = ROPE_INIT_FUNCTIONS["longrope"](copy.deepcopy(text), torch.device("cpu"), layer_type=layer_type)
    return bool(scaling == 1)


def _rope_edit(text: PreTrainedConfig, written: Mapping[str, Any], layer_type: str, new: dict[str, Any]) -> Edit:
    """Write the parameters where transformers writes them today; the older field would win, so it goes."""
    ropes = copy.deepcopy(dict(text.rope_parameters))
    edit: Edit = {"rope_parameters": {**ropes, layer_type: new} if layer_type else new}
    if written.get("rope_scaling") is not None:
        edit["rope_scaling"] = None
    return edit
