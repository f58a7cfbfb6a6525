"""What leaving units out would cost, estimated for all of them by one forward and one backward pass of each window.

With a mask m on what a unit gives at one token, gradient times activation is the derivative of the loss by m. Taken of
the log-likelihood of labels that are drawn from the model's own distribution, the mean of its square is the Fisher
information by m, and half of that is the KL divergence of a small step to second order. A whole step is not small, and
tokens and units are taken as if they were independent: the figures rank, they do not measure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from collapse.analysis.backward import differentiable, send_back
from collapse.analysis.observed import observe
from collapse.analysis.sites import Group, Site

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Estimate:
    """First-order figures of a site.

    Attributes:
        fisher: half the mean square, over tokens, of gradient times activation: an estimate of the KL divergence, nats
            a token; of several units their sum.
        taylor: the mean absolute value of the same, summed likewise.
        norm: root mean square of what the site gives, relative to the residual stream before its block; of several
            units as if they were orthogonal. None for experts.
        routed: of an expert, the share of tokens that are sent to it; else None.
    """

    fisher: float
    taylor: float
    norm: float | None = None
    routed: float | None = None


@dataclass(frozen=True)
class Sweep:
    """What a sweep gathered of one group, each [units]: means over tokens of the figures of `Estimate`.

    `power` is the mean square of what a unit gives relative to the stream's; `routed` the share of tokens of each
    expert.
    """

    fisher: Tensor
    taylor: Tensor
    power: Tensor | None
    routed: Tensor | None

    def order(self) -> list[int]:
        """Return the units from the least to the greatest estimate of its KL divergence."""
        return torch.argsort(self.fisher, stable=True).tolist()

    def estimate(self, site: Site) -> Estimate:
        """Return the figures of some of the units together."""
        units = torch.tensor(list(site.units))
        return Estimate(
            fisher=float(self.fisher[units].sum()),
            taylor=float(self.taylor[units].sum()),
            norm=None if self.power is None else float(self.power[units].sum()) ** 0.5,
            routed=None if self.routed is None else float(self.routed[units].sum()),
        )


def sweep(
    model: nn.Module, groups: Sequence[Group], batches: Sequence[Tensor], seed: int, progress: Progress
) -> dict[str, Sweep]:
    """Run the batches, [windows, tokens] each, forwards and backwards; return what was gathered, by the group's key.

    Raises `UnsupportedError` where the model's logits are not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    streams = {group.block: _Stream() for group in groups}
    meters = {group.key: _Meter(model, group, streams[group.block]) for group in groups}
    with ExitStack() as stack:
        stack.enter_context(differentiable(model))
        for group in groups:
            if group.kind == "layers":
                hook = model.get_submodule(group.module).register_forward_pre_hook(
                    streams[group.block], with_kwargs=True
                )
                stack.callback(hook.remove)
            stack.callback(observe(model, group, meters[group.key]).remove)
        for done, ids in enumerate(batches, 1):
            send_back(model, ids, generator)
            progress(done, len(batches))
    tokens = sum(ids.numel() for ids in batches)
    return {key: meter.sweep(tokens) for key, meter in meters.items()}


class _Stream:
    """Adds up the squares of the residual stream that enters a block."""

    def __init__(self) -> None:
        self.squares = 0.0

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        stream = args[0] if args else kwargs["hidden_states"]
        self.squares += float(torch.linalg.vector_norm(stream.detach())) ** 2


class _Meter:
    """Gathers one group's figures; of a batch it holds what autograd holds anyway."""

    def __init__(self, model: nn.Module, group: Group, stream: _Stream) -> None:
        self._group, self._stream = group, stream
        self._squares, self._absolutes, self._power, self._counts = torch.zeros(4, group.size, dtype=torch.float64)
        self._units = torch.zeros(1, dtype=torch.long)
        if group.read is not None:
            weight = model.get_submodule(group.module).get_parameter("weight").detach()
            self._columns = weight.movedim(group.in_dim, 0)  # [inputs, outputs]
            self._units = torch.empty(len(self._columns), dtype=torch.long)
            for unit in range(group.size):
                self._units[list(group.read.rows([unit]))] = unit

    def __call__(self, tensor: Tensor, value: Tensor, units: Tensor | None) -> None:
        """Take part as what `observe` calls."""
        value = value.detach()
        if units is not None:
            self._counts += torch.bincount(units.flatten(), minlength=self._group.size)[: self._group.size]
        elif self._group.read is None:
            self._power += float(torch.linalg.vector_norm(value)) ** 2
        else:
            self._power += self._given(value.flatten(0, -2))
        if tensor.requires_grad:
            # the hook holds a detached value: with `tensor` itself it would keep all of the graph alive
            tensor.register_hook(partial(self._add, value, units))  # type: ignore[no-untyped-call]

    def _add(self, value: Tensor, units: Tensor | None, gradient: Tensor) -> None:
        """Take in an activation and its gradient, [..., features]; of experts [tokens, chosen], with their numbers."""
        size, product = self._group.size, (gradient * value).flatten(0, -2)
        if units is not None:
            product = torch.zeros(len(product), size).scatter_add_(1, units.flatten(0, -2), product.float())
        elif self._group.read is None:
            product = product.sum(1, keepdim=True)
        elif product.shape[1] != size:
            product = torch.zeros(len(product), size).index_add_(1, self._units, product.float())
        self._squares += (product**2).sum(0).double()
        self._absolutes += product.abs().sum(0).double()

    def _given(self, value: Tensor) -> Tensor:
        """Return the squares, summed over tokens, of what each unit adds to the reader's output."""
        size = self._group.size
        if len(self._columns) == size:
            return (value**2).sum(0).double() * (self._columns**2).sum(1).double()
        rows = [(self._units == unit).nonzero()[:, 0] for unit in range(size)]
        given = [torch.linalg.vector_norm(value[:, one] @ self._columns[one]) for one in rows]
        return torch.stack(given).double() ** 2

    def sweep(self, tokens: int) -> Sweep:
        """Return the figures of all batches."""
        routed = self._counts / tokens if self._group.kind == "experts" else None
        power = None if routed is not None else self._power / self._stream.squares
        return Sweep(self._squares / 2 / tokens, self._absolutes / tokens, power, routed)
