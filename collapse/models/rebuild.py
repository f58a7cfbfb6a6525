"""Changes modules of a model that was just built, by the sites of a config of the free layout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from collapse.errors import UnsupportedError
from collapse.plan import PARTS

PARAMETERS = ("weight", "down", "up", "bias")
KEYS_OF = "layer_idx"  # what transformers calls the place of an attention module's keys and values in the cache


class StandIn(nn.Module):
    """A map of its first argument, `[..., channels]`, in place of a module; other arguments are not looked at.

    Args:
        by: `zero`, `constant`, `linear` or `low-rank`, as `collapse.plan.StandIn` says.
        shapes: of the parameters.
        outputs: how many values the module gives, this one first and None for the others; None for it alone.
    """

    def __init__(self, by: str, shapes: Mapping[str, Sequence[int]], outputs: int | None) -> None:
        super().__init__()
        self.by, self.outputs = by, outputs
        self.weight, self.down, self.up, self.bias = (
            nn.Parameter(torch.zeros(*shapes[name])) if name in shapes else None for name in PARAMETERS
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Map the first argument, which may be given as `hidden_states`."""
        mapped = self._map(args[0] if args else kwargs["hidden_states"])
        return mapped if self.outputs is None else (mapped, *[None] * (self.outputs - 1))

    def _map(self, x: Tensor) -> Tensor:
        if self.weight is not None:
            return functional.linear(x, self.weight, self.bias)
        if self.down is not None and self.up is not None:
            return functional.linear(functional.linear(x, self.down), self.up, self.bias)
        nothing = torch.zeros_like(x)  # memory of its own, which what follows may write to
        return nothing if self.bias is None else nothing + self.bias

    def extra_repr(self) -> str:
        """Show the map and the shapes of its parameters."""
        shapes = {name: tuple(value.shape) for name, value in self.named_parameters()}
        return f"{self.by}, {shapes}"


def rebuild(model: Any, config: Any, sites: Sequence[Mapping[str, Any]], build: Callable[[Any], Any]) -> list[int]:
    """Change the modules of `model` that `sites` name; return the numbers of the blocks that keep no keys any more.

    `build` makes the architecture's own model of a config, of which `config` is the one that `model` was built with.

    Raises `UnsupportedError` for a site that the model does not have, and for an entry of another form.
    """
    gone: set[int] = set()
    for entry in sites:
        site = str(entry.get("site"))
        try:
            module = model.get_submodule(site)
        except AttributeError:
            raise UnsupportedError("the architecture has no such module", where=f"config.json: {site}") from None
        if "config" in entry:
            _put(model, site, _built_otherwise(model, config, site, entry["config"], build))
        elif "by" in entry:
            gone |= {number for part in module.modules() if isinstance(number := getattr(part, KEYS_OF, None), int)}
            _put(model, site, _stand_in(site, entry))
        elif "bias" in entry and isinstance(module, nn.Linear):
            module.bias = nn.Parameter(module.weight.new_zeros(entry["bias"]))
        else:
            raise UnsupportedError("the entry says nothing that can be done", where=f"config.json: {site}")
    return sorted(gone)


def _stand_in(site: str, entry: Mapping[str, Any]) -> StandIn:
    shapes = entry.get("shapes", {})
    needed, optional = PARTS.get(entry["by"], ((), ()))
    if entry["by"] not in PARTS or set(needed) - shapes.keys() or shapes.keys() - {*needed, *optional}:
        reason = f"{entry['by']} is no map with the tensors {sorted(shapes)}"
        raise UnsupportedError(reason, where=f"config.json: {site}")
    return StandIn(entry["by"], shapes, entry.get("outputs"))


def _put(model: nn.Module, site: str, module: nn.Module) -> None:
    parent, _, name = site.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def changed_config(config: Any, fields: Mapping[str, Any]) -> Any:
    """Return a copy of a config with other values in some fields; what it once derived from those stays as it is."""
    edited = copy.deepcopy(config)
    for name, value in fields.items():
        setattr(edited, name, value)
    return edited


def _built_otherwise(
    model: Any, config: Any, site: str, fields: Mapping[str, Any], build: Callable[[Any], Any]
) -> nn.Module:
    """Return the module that the architecture builds at `site` when the config has other values in `fields`."""
    edited = changed_config(config, fields)
    with torch.device("meta"):
        module: nn.Module = build(edited).get_submodule(site)
    old = model.get_submodule(site)
    device = next((tensor.device for tensor in (*old.parameters(), *old.buffers())), torch.device("meta"))
    if device.type != "meta":  # nothing will load weights into the model: they begin as the architecture's do
        module.to_empty(device=device).apply(model._init_weights)
        held = dict(old.named_buffers())
        for name, buffer in module.named_buffers():
            if name in held and held[name].shape == buffer.shape:
                buffer.copy_(held[name])
    return module
