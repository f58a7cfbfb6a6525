"""Try out a short-circuit on a loaded model: the module's output is replaced while a context lasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from collapse.plan import Replacement


@dataclass(frozen=True)
class StandIn:
    """What a module's output is replaced by; `constant` is `[features]`, where `by` is constant."""

    site: str
    by: Replacement
    constant: torch.Tensor | None = None


@contextmanager
def short_circuited(model: nn.Module, stand_ins: Sequence[StandIn]) -> Iterator[nn.Module]:
    """Within the context every site gives zero, its first tensor input, or its constant.

    The modules still run, so caches and shapes stay as they were; only what they hand on changes. A compiled model
    runs without its graphs meanwhile.
    """
    handles = [
        model.get_submodule(stand_in.site).register_forward_hook(_Hook(stand_in), with_kwargs=True)
        for stand_in in stand_ins
    ]
    try:
        with uncompiled():
            yield model
    finally:
        for handle in handles:
            handle.remove()


def uncompiled() -> AbstractContextManager[None]:
    """Run compiled models eagerly: a graph made before a hook ignores it, one made with it would keep it."""
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


class _Hook:
    def __init__(self, stand_in: StandIn) -> None:
        self.by, self.constant = stand_in.by, stand_in.constant

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        value = tensor_of(output)
        if value is None:
            return output
        if self.by == "zero":
            result = torch.zeros_like(value)
        elif self.by == "identity":
            entering = entering_tensor(args, kwargs, value.shape)
            result = value if entering is None else entering
        else:
            assert self.constant is not None
            result = self.constant.to(value.dtype).expand_as(value)
        return (result, *output[1:]) if isinstance(output, tuple) else result


def tensor_of(output: Any) -> torch.Tensor | None:
    """Return the floating tensor that a module's output is, or starts with; None where there is none."""
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, torch.Tensor) and first.is_floating_point() else None


def entering_tensor(args: tuple[Any, ...], kwargs: dict[str, Any], shape: torch.Size) -> torch.Tensor | None:
    """Return the first floating tensor of the given shape among a module's arguments."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == shape:
            return value
    return None
