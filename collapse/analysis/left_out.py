"""Leave a site of a loaded model out while a context lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from collapse.analysis.sites import Group, Site
from collapse.analysis.stand_in import StandIn, short_circuited
from collapse.errors import UnsupportedError


@contextmanager
def left_out(model: nn.Module, site: Site, mean: Tensor | None = None) -> Iterator[None]:
    """Within the context the model does without a sublayer, KV group, neurons or an expert.

    What a sublayer adds is zero, or its `mean`, [features]; what neurons and KV groups give is zero, or theirs, [inputs
    of the module that reads them]. An expert is gone with its row of the router: its tokens go to the next best.
    Whole blocks are not for this function but for `BlockRuns`.
    """
    group = site.group
    if group.kind == "experts":
        with _unrouted(model, group, site.number):
            yield
    elif group.read is None:
        by = StandIn(group.module, "zero" if mean is None else "constant", mean)
        with short_circuited(model, [by]):
            yield
    else:
        columns = torch.tensor(list(group.read.rows(site.units)))
        value = torch.zeros(()) if mean is None else mean[columns]
        handle = model.get_submodule(group.module).register_forward_pre_hook(_filled(columns, value))
        try:
            yield
        finally:
            handle.remove()


def _filled(columns: Tensor, value: Tensor) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        changed = args[0].clone()
        changed[..., columns] = value.to(changed.dtype)
        return (changed, *args[1:])

    return hook


@contextmanager
def _unrouted(model: nn.Module, group: Group, expert: int) -> Iterator[None]:
    """Let the router never choose one expert: its score, and its correction where there is one, are -inf."""
    tensors: Mapping[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    router = [tensors[name] for name in group.router]
    masked = _Masked([weight for weight in router if weight.ndim == 2], expert)
    before = [(vector, vector.data[expert].clone()) for vector in router if vector.ndim == 1]
    try:
        for vector, _ in before:
            vector.data[expert] = -torch.inf
        with masked:
            yield
    finally:
        for vector, value in before:
            vector.data[expert] = value
    if not masked.seen:
        raise UnsupportedError("its router is no linear map, so no expert can be left out", where=group.path)


class _Masked(TorchFunctionMode):
    """Sees every linear map; where the weight is a router's, one output is made -inf."""

    def __init__(self, weights: list[Tensor], column: int) -> None:
        super().__init__()
        self._places = {weight.data_ptr() for weight in weights}
        self._column, self.seen = column, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is functional.linear and args[1].data_ptr() in self._places:
            self.seen = True
            result = result.clone()
            result[..., self._column] = -torch.inf
        return result
