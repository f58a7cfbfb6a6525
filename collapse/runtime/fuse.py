"""Skip modules at run time while the text is regular: the stage that keeps every weight.

A fused site is a module whose output may be replaced by zero while the position entropy of the context lies
under the site's threshold. The detector reads token ids only. It decides once a forward, for every new
position: a site is skipped where the entropy of every prefix that ends at a new token, in every row of the
batch, is at or under its threshold. Otherwise it runs, for all rows.

Limits:
- One irregular row makes the whole batch run. Batch texts of one kind.
- The model must be called with `input_ids`. A call without them, or on a cache whose earlier tokens were not
  seen (filled before fusing, cropped, or by another model), is run in full: no evidence, no skipping.
- A cache whose rows are reordered (beam search) is not followed: use greedy decoding or sampling.
- A site must return one tensor, whose shape follows from the shapes and plain values of its arguments, and
  must have no other effect: a module that is given the KV cache is refused when it would first be skipped.
  The zero is an expanded scalar without memory of its own: read it, do not write into it.
- With gradients enabled every site runs, so that training is not changed.
- Thresholds are in nats of `collapse.models.position_bias.position_entropy` with the given settings.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from collapse.errors import PlanError
from collapse.models.position_bias import EntropySettings, position_entropy

SHAPES_KEPT = 256  # decoding meets a new shape a step


@dataclass
class SiteCounts:
    """Calls of one fused module: how many were skipped, how many ran."""

    skipped: int = 0
    ran: int = 0


@dataclass
class _Detector:
    """Follows the tokens of the current context and keeps the highest entropy at any new position."""

    settings: EntropySettings
    history: weakref.WeakKeyDictionary[Any, Tensor] = field(default_factory=weakref.WeakKeyDictionary)
    peak: float = float("inf")
    context: Tensor | None = None

    def observe(self, ids: Tensor | None, mask: Tensor | None, cache: Any) -> None:
        """Measure a forward of `ids` on `cache`; an unknown context has infinite entropy."""
        self.peak, self.context = float("inf"), None
        if ids is None:
            return
        new = ids.shape[1]
        codes = ids + 1
        if mask is not None and mask.dim() == 2:
            codes = codes * (mask[:, -new:] > 0)
        past = int(cache.get_seq_length()) if cache is not None else 0
        before = self.history.get(cache) if past else codes[:, :0]
        if before is None or before.shape != (len(ids), past):
            return
        self.context = torch.cat((before, codes), dim=1)
        recent = self.context[:, -max(self.settings.window, new) :]
        entropy = position_entropy(recent, self.settings)[:, -new:]
        self.peak = float(entropy.max())

    def remember(self, cache: Any) -> None:
        """Note what `cache` now holds; an unknown context stays unknown."""
        if cache is not None and self.context is not None:
            self.history[cache] = self.context


class FusedHandle:
    """What `fuse` returns: the counts, and the way back; leaving its `with` block unfuses the model."""

    def __init__(self, counts: Mapping[str, SiteCounts], undo: list[Callable[[], None]]) -> None:
        self.counts = counts
        self._undo = undo

    def remove(self) -> None:
        """Give every module its own forward back; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> FusedHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def fuse(
    model: nn.Module,
    sites: Mapping[str, float],
    *,
    window: int = 1024,
    settings: EntropySettings | None = None,
) -> FusedHandle:
    """Let the modules named by `sites` answer zero, without computing, while the context is regular.

    Args:
        model: a causal language model, called with `input_ids` and optionally `attention_mask` and `cache`.
        sites: module path -> threshold in nats.
        window: contexts longer than this are judged by their last `window` tokens.
        settings: of the entropy; `EntropySettings(window=window)` by default.

    Raises:
        PlanError: a path that names no module, a module named twice, or a threshold that is not a number.
    """
    modules = _resolve(model, sites)
    detector = _Detector(settings or EntropySettings(window=window))
    counts = {path: SiteCounts() for path in sites}
    before = model.register_forward_pre_hook(_observer(detector), with_kwargs=True)
    after = model.register_forward_hook(lambda _, __, output: detector.remember(getattr(output, "cache", None)))
    undo: list[Callable[[], None]] = [before.remove, after.remove]
    for path, module in modules.items():
        undo.append(_wrap(module, sites[path], detector, counts[path]))
    return FusedHandle(counts, undo)


def _resolve(model: nn.Module, sites: Mapping[str, float]) -> dict[str, nn.Module]:
    known = dict(model.named_modules(remove_duplicate=False))
    for path, threshold in sites.items():
        if not path or path not in known:
            raise PlanError("no such module in the model", where=path or "''", fix="see `collapse trace`")
        if math.isnan(threshold):
            raise PlanError("threshold is not a number", where=path, fix="give nats")
    found = {path: known[path] for path in sites}
    if len({id(module) for module in found.values()}) < len(found):
        raise PlanError("one module under two paths", where=", ".join(found), fix="name it once")
    return found


def _observer(detector: _Detector) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        detector.observe(ids, kwargs.get("attention_mask"), cache)

    return observe


def _wrap(module: nn.Module, threshold: float, detector: _Detector, counts: SiteCounts) -> Callable[[], None]:
    """Put the gate before the module's forward; return what takes it away again."""
    original = module.forward
    shadowed = "forward" in module.__dict__
    shapes: dict[Any, tuple[torch.Size, torch.dtype, torch.device]] = {}

    def gated(*args: Any, **kwargs: Any) -> Any:
        if detector.peak > threshold or torch.is_grad_enabled():
            counts.ran += 1
            return original(*args, **kwargs)
        key = _signature(args, kwargs)
        if key not in shapes:
            if len(shapes) >= SHAPES_KEPT:
                shapes.clear()
            shapes[key] = _output_shape(original, args, kwargs)
        counts.skipped += 1
        shape, dtype, device = shapes[key]
        return torch.zeros((), dtype=dtype, device=device).expand(shape)

    def undo() -> None:
        if shadowed:
            module.forward = original
        else:
            del module.forward

    module.forward = gated
    return undo


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    seen = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
    return tuple(seen), str(spec)


def _output_shape(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Size, torch.dtype, torch.device]:
    """Return shape, dtype and device of the output, found on fake tensors: nothing is computed."""
    if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
        raise PlanError(
            "module writes to the KV cache, so it cannot be skipped",
            where=getattr(forward, "__qualname__", "module"),
            fix="fuse modules without side effects",
        )
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake_args, fake_kwargs = pytree.tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
        output = forward(*fake_args, **fake_kwargs)
    if not isinstance(output, Tensor):
        raise PlanError(
            f"module returns {type(output).__name__}, not one tensor",
            where=getattr(forward, "__qualname__", "module"),
            fix="fuse modules that return one tensor",
        )
    return torch.Size(int(size) for size in output.shape), output.dtype, output.device
