"""How config.json says a free layout: blocks with shapes and modules of their own. Nothing here needs torch.

The `model_type` is one that plain transformers does not know, so that it refuses the checkpoint instead of filling
what it misses with random numbers. `base` is the config of the architecture, `sites` what is otherwise:

- `{"site", "config"}`: the module is built with these fields of the config changed;
- `{"site", "by", "outputs", "shapes"}`: a map stands in for the module, with parameters of these shapes;
- `{"site", "bias"}`: the linear module has a bias of so many channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MODEL_TYPE = "collapse_free"
BASE, SITES = "base", "sites"


def nested(config: Mapping[str, Any], sites: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of config.json for the architecture of `config` with `sites`."""
    return {"model_type": MODEL_TYPE, BASE: dict(config), SITES: [dict(site) for site in sites]}


def is_free_config(config: Mapping[str, Any]) -> bool:
    """Whether the content of a config.json says a free layout."""
    return config.get("model_type") == MODEL_TYPE
