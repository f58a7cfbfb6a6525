"""What an error in what a module writes costs the model: a metric, from gradients of the source.

The Fisher information of a module's output y is F = E[g g^T], g the gradient by y of -log p of a label drawn from p,
mean over tokens. A small error e costs e^T F e / 2 nats, as a KL divergence (Amari, 1998). A residual of least squares
that is measured by F counts what the logits will see of it. The fit itself is the same in every metric, as each output
is solved for on its own; which inputs it can do without is not.

That e and g know nothing of each other is assumed. Behind a norm they do: it divides by the size of y, so gradients are
large at tokens where y is small, and errors are where it is large. There both are taken by that size: g times it, and
e divided by it. Gemma 3 270M with a tenth of its decoder gone lost 0.052 nats a token on logs without that, 0.022
without a metric, and 0.020 so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collapse.analysis.backward import differentiable, send_back
from collapse.errors import UnsupportedError
from collapse.search.least_squares import Weighing

NORMED = 1e-5  # a cosine squared: where a norm takes what is written, its size does not matter and g is normal to y
DAMPING = 0.01  # of the mean, on the diagonal: few tokens do not show every direction that matters

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Fisher:
    """Metrics of what the modules at `paths` write, on `windows`, token ids [n, tokens]; measured once asked for.

    Where a model gives no gradients, `reason` says why, and there is no metric for any of them. That is settled on the
    first window, so that it does not depend on what a search remembers and need not ask for.
    """

    model: PreTrainedModel
    paths: Sequence[str]
    windows: Tensor
    progress: Progress
    seed: int = 0

    def weighing(self, path: str) -> Weighing:
        """Return L [out, out] with F = L L^T, so that the row e costs |e L|^2 / 2, and whether behind a norm."""
        return Weighing() if self.reason else self._weighings[path]

    @cached_property
    def reason(self) -> str | None:
        """Why there are no metrics."""
        if not self.paths:
            return None
        try:
            found = information(self.model, self.paths, self.windows[:1], self.seed)
        except (UnsupportedError, RuntimeError) as error:  # kernels without a way back raise the latter
            if isinstance(error, torch.OutOfMemoryError) or "allocate" in str(error):
                raise  # another time there may be memory, and other units would go
            return str(error).partition("\n")[0] or type(error).__name__
        readers = set(self.paths)
        without = len(readers) - sum(factor_of(one.information) is not None for one in found.values())
        return f"{without} of {len(readers)} readers get no gradients" if without else None

    @cached_property
    def _weighings(self) -> dict[str, Weighing]:
        gathered = information(self.model, self.paths, self.windows, self.seed, self.progress)
        return {path: gathered.pop(path).weighing for path in list(gathered)}


def silent(_: int, __: int) -> None:
    """Tell nobody."""


@dataclass
class Seen:
    """What gradients g by a module's output y told.

    Attributes:
        information: the mean of g g^T, [out, out].
        relative: the same of g times the root of the mean square of y.
        radial: the sum of (g y)^2 over tokens.
        whole: that of |g|^2 |y|^2.
    """

    information: Tensor
    relative: Tensor
    radial: float = 0.0
    whole: float = 0.0

    @property
    def normed(self) -> bool:
        """Whether the size of what is written makes no difference, by Euler's theorem on homogeneous functions."""
        return self.radial <= NORMED * self.whole

    @property
    def weighing(self) -> Weighing:
        """How errors in what the module writes count."""
        return Weighing(factor_of(self.relative if self.normed else self.information), self.normed)

    def add(self, output: Tensor, gradient: Tensor) -> None:
        """Add the tokens of a window, unless a gradient is not finite."""
        g, y = (one.flatten(0, -2).float() for one in (gradient, output))
        product = g.T @ g
        if bool(product.isfinite().all()):
            self.information += product
            sized = g * y.square().mean(-1, keepdim=True).sqrt()
            self.relative += sized.T @ sized
            self.radial += float((g * y).sum(-1).square().sum())
            self.whole += float((g.square().sum(-1) * y.square().sum(-1)).sum())


def information(
    model: nn.Module, paths: Sequence[str], windows: Tensor, seed: int, progress: Progress = silent
) -> dict[str, Seen]:
    """Return the Fisher information of what each module writes; none of one that no logit depends on."""
    generator = torch.Generator().manual_seed(seed)
    sums: dict[str, Seen] = {}
    with ExitStack() as stack:
        stack.enter_context(differentiable(model))
        for path in dict.fromkeys(paths):
            hook = model.get_submodule(path).register_forward_hook(partial(_listen, sums, path))
            stack.callback(hook.remove)
        for done, ids in enumerate(torch.split(windows, 1), 1):
            send_back(model, ids, generator)
            progress(done, len(windows))
    for one in sums.values():
        one.information /= windows.numel()
        one.relative /= windows.numel()
    return sums


def _listen(sums: dict[str, Seen], path: str, _: nn.Module, __: Any, output: Any) -> Any:
    first = output if isinstance(output, Tensor) else output[0]
    if not first.requires_grad:
        return output
    copy = first.clone()  # what is changed in place later would take its gradient along
    copy.register_hook(partial(_add, sums, path, first.detach()))
    return copy if isinstance(output, Tensor) else (copy, *output[1:])


def _add(sums: dict[str, Seen], path: str, output: Tensor, gradient: Tensor) -> None:
    if path not in sums:
        sums[path] = Seen(*torch.zeros(2, gradient.shape[-1], gradient.shape[-1], device=gradient.device))
    sums[path].add(output, gradient)


def factor_of(information: Tensor) -> Tensor | None:
    """Return a factor of the damped information; None where it is no metric: zero, or not finite."""
    mean = information.diagonal().mean()
    if not bool(information.isfinite().all()) or not float(mean) > 0:
        return None
    damped = information.double() / mean + DAMPING * torch.eye(len(information), dtype=torch.float64)
    found: Tensor = torch.linalg.cholesky(damped).float()
    return found
