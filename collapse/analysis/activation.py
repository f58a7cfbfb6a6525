"""How far each module's output is from zero, from its input, and from a constant, on given sequences.

A profile: it ranks sites. It proves nothing about inputs it has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from collapse.analysis.stand_in import entering_tensor, tensor_of, uncompiled
from collapse.plan import Replacement


@dataclass(frozen=True)
class Activation:
    """Facts about one module over all sequences.

    Attributes:
        site: module path.
        calls: how often it ran.
        rms: root mean square of its output.
        residual: that of the residual stream entering the enclosing block; 0 outside blocks.
        zero, identity, constant: largest absolute difference between the output and the replacement;
            infinite where shapes do not allow it.
        middle: per feature the middle between the least and the largest output, the constant in question.
    """

    site: str
    calls: int
    rms: float
    residual: float
    zero: float
    identity: float
    constant: float
    middle: torch.Tensor | None

    @property
    def share(self) -> float | None:
        """`rms` over `residual`; None outside blocks."""
        return self.rms / self.residual if self.residual else None

    @property
    def nearest(self) -> tuple[Replacement, float]:
        """The closest replacement and its distance; zero before identity before constant where equal."""
        by: tuple[Replacement, ...] = ("zero", "identity", "constant")
        return min(((name, getattr(self, name)) for name in by), key=lambda pair: pair[1])


class _Meter:
    """Accumulates one module's figures in constant memory."""

    def __init__(self) -> None:
        self.calls, self.count, self.squares = 0, 0, 0.0
        self.zero, self.identity = 0.0, 0.0
        self.least: torch.Tensor | None = None
        self.most: torch.Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        value = tensor_of(output)
        if value is None or value.numel() == 0:
            return
        self.calls += 1
        self.count += value.numel()
        self.squares += float(torch.linalg.vector_norm(value)) ** 2
        least, most = value.aminmax()
        self.zero = max(self.zero, -float(least), float(most))
        entering = entering_tensor(args, kwargs, value.shape)
        gap = float("inf") if entering is None else float((value - entering).abs().max())
        self.identity = max(self.identity, gap)
        self._range(value)

    def _range(self, value: torch.Tensor) -> None:
        if value.dim() != 3:  # only [batch, sequence, features] has features that do not depend on the length
            self.least = self.most = None
            return
        flat = value.flatten(0, 1)
        least, most = flat.amin(0), flat.amax(0)
        if self.calls == 1:
            self.least, self.most = least, most
        elif self.least is not None and self.most is not None:
            self.least, self.most = torch.minimum(self.least, least), torch.maximum(self.most, most)

    def activation(self, site: str, residual: float) -> Activation:
        """Return the facts gathered."""
        rms = (self.squares / self.count) ** 0.5
        spread = float("inf") if self.least is None or self.most is None else float((self.most - self.least).max()) / 2
        middle = None if self.least is None or self.most is None else (self.least + self.most) / 2
        return Activation(site, self.calls, rms, residual, self.zero, self.identity, spread, middle)


def profile(
    model: nn.Module,
    sites: Sequence[str],
    sequences: Sequence[Sequence[int]],
    advance: Callable[[int], None] = lambda done: None,
    is_settled: Callable[[Activation], bool] = lambda activation: False,
) -> dict[str, Activation]:
    """Run `sequences` (token ids, one at a time) and measure the module at every site.

    Distances only ever grow from one sequence to the next. A site that `is_settled` is therefore measured no
    further, and the run ends when all are: its `calls` then say how far it came. Sites whose output is no tensor,
    or that never ran, are left out.
    """
    blocks = _blocks(model)
    streams = {block: _Stream() for block in blocks}
    open_sites = {site: _Meter() for site in sites}
    found: dict[str, Activation] = {}
    with ExitStack() as stack:
        stack.enter_context(uncompiled())
        for block, stream in streams.items():
            stack.callback(_pre_hook(model, block, stream))
        closers = {site: _hook(model, site, meter) for site, meter in open_sites.items()}
        for close in closers.values():
            stack.callback(close)
        for done, sequence in enumerate(sequences, 1):
            with torch.no_grad():
                model(input_ids=torch.tensor([list(sequence)]), use_cache=False)
            found |= _measured(open_sites, streams)
            for site in [site for site in open_sites if site not in found or is_settled(found[site])]:
                closers[site]()
                del open_sites[site]
            advance(len(sequences) if not open_sites else done)
            if not open_sites:
                break
    return found


def _measured(meters: Mapping[str, _Meter], streams: Mapping[str, _Stream]) -> dict[str, Activation]:
    """Return the facts so far about every module that ran."""
    inside = {site: next((b for b in streams if site.startswith(f"{b}.")), None) for site in meters}
    return {
        site: meter.activation(site, streams[block].rms if (block := inside[site]) else 0.0)
        for site, meter in meters.items()
        if meter.calls
    }


def _hook(model: nn.Module, site: str, meter: _Meter) -> Callable[[], None]:
    return model.get_submodule(site).register_forward_hook(meter, with_kwargs=True).remove


def _pre_hook(model: nn.Module, block: str, stream: _Stream) -> Callable[[], None]:
    return model.get_submodule(block).register_forward_pre_hook(stream, with_kwargs=True).remove


class _Stream:
    """Measures the hidden states that enter a block."""

    def __init__(self) -> None:
        self.count, self.squares = 0, 0.0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 3:
                self.count += value.numel()
                self.squares += float(torch.linalg.vector_norm(value)) ** 2
                return

    @property
    def rms(self) -> float:
        """Root mean square of what entered; 0 where nothing did."""
        return (self.squares / self.count) ** 0.5 if self.count else 0.0


def _blocks(model: nn.Module) -> list[str]:
    """Return the paths of the outermost repeated blocks: the members of a list of modules."""
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    return [f"{path}.{child}" for path in outer for child, _ in model.get_submodule(path).named_children()]
