"""Watch what a group of units gives while a model runs: the value that would be missing without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from collapse.analysis.sites import Group
from collapse.analysis.stand_in import tensor_of

See = Callable[[Tensor, Tensor, Tensor | None], None]  # a tensor, what of it would be missing, the units it is of


def observe(model: nn.Module, group: Group, see: See) -> RemovableHandle:
    """Call `see` whenever the group's module runs, until the handle is removed.

    It gets a tensor of the computation and what would have to be taken from it. For a block that is its output and
    what it added; for a sublayer twice its output; for neurons and KV groups twice the input of what reads them,
    [..., inputs]; for experts twice the weights of the chosen ones, [tokens, chosen], with their numbers.
    """
    module = model.get_submodule(group.module)
    if group.kind == "experts":
        return module.register_forward_pre_hook(_routing(see), with_kwargs=True)
    if group.kind in {"layers", "sublayers"}:
        return module.register_forward_hook(_output(see, group.kind == "layers"), with_kwargs=True)

    def entering(_: nn.Module, args: tuple[Any, ...]) -> None:
        see(args[0], args[0], None)

    return module.register_forward_pre_hook(entering)


def _output(see: See, is_block: bool) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        value = tensor_of(output)
        stream = args[0] if args else kwargs.get("hidden_states")
        if value is not None and not is_block:
            see(value, value, None)
        elif value is not None and isinstance(stream, Tensor):
            see(value, (value - stream).detach(), None)

    return hook


def _routing(see: See) -> Callable[..., None]:
    """Find among a module's arguments the numbers of the chosen experts and, of the same shape, their weights."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        for chosen in (one for one in tensors if one.dtype == torch.long):
            for weights in (one for one in tensors if one.is_floating_point() and one.shape == chosen.shape):
                see(weights, weights, chosen)

    return hook
