"""Runs a model on meta tensors so that what it computes is what it would compute on the CPU.

transformers asks the device which of several ways to take, and a tensor made on the meta device has no value: a
traced graph would then hold operators that the CPU lacks, and constants that nobody knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import masking_utils
from transformers.integrations import moe


@contextmanager
def portable() -> Iterator[None]:
    """Let transformers' models run on meta tensors in fp32 and be traced there for the CPU."""
    with contextlib.ExitStack() as stack:
        # torch's grouped product takes bf16 only on this device; the fallback computes the same on any.
        grouped = moe._can_use_grouped_mm
        stack.enter_context(
            _patched(moe, "_can_use_grouped_mm", lambda x, w, o: w.device.type != "meta" and grouped(x, w, o))
        )
        # Whether a mask may be left out depends on its values, which a meta tensor does not have.
        stack.enter_context(_patched(masking_utils, "_ignore_causal_mask_sdpa", lambda *_, **__: False))
        stack.enter_context(_ValuesOnCpu())
        yield


@contextmanager
def _patched(owner: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


class _ValuesOnCpu(TorchFunctionMode):
    """Makes constants on the CPU, where they keep their values, and moves them where they are wanted."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.tensor and torch.device(given.get("device") or "cpu").type == "meta":
            return func(*args, **given | {"device": "cpu"}).to(given["device"])
        if func is torch.Tensor.__getitem__ and args[0].device.type == "meta":
            args = (args[0], _index(args[1]))
        if func is torch.histc and args[0].device.type == "meta":
            args = (args[0].float(), *args[1:])  # the CPU counts floats only
        return func(*args, **given)


def _index(index: Any) -> Any:
    """Return an index in which lists of numbers are tensors on the CPU."""
    if isinstance(index, tuple):
        return tuple(map(_index, index))
    numbers = isinstance(index, list) and all(type(item) in {int, bool} for item in index)
    return torch.tensor(index, device="cpu") if numbers else index
