"""What an error in what a module writes costs the model: a metric, from gradients of the source.

The Fisher information of a module's output y is F = E[g g^T], g the gradient by y of -log p of a label drawn from p,
mean over tokens. A small error e costs e^T F e / 2 nats, as a KL divergence (Amari, 1998). A residual of least squares
that is measured by F counts what the logits will see of it. The fit itself is the same in every metric, as each output
is solved for on its own; which inputs it can do without is not.
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

    def factor(self, path: str) -> Tensor | None:
        """Return L [out, out] with F = L L^T, so that the row e costs |e L|^2 / 2; None without a metric."""
        return None if self.reason else self._factors[path]

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
        without = len(readers) - sum(factor_of(one) is not None for one in found.values())
        return f"{without} of {len(readers)} readers get no gradients" if without else None

    @cached_property
    def _factors(self) -> dict[str, Tensor]:
        gathered = information(self.model, self.paths, self.windows, self.seed, self.progress)
        found = {path: factor_of(gathered.pop(path)) for path in list(gathered)}
        return {path: one for path, one in found.items() if one is not None}


def silent(_: int, __: int) -> None:
    """Tell nobody."""


def information(
    model: nn.Module, paths: Sequence[str], windows: Tensor, seed: int, progress: Progress = silent
) -> dict[str, Tensor]:
    """Return the Fisher information [out, out] of what each module writes; none of one that no logit depends on.

    Gradients that are not finite are left out.
    """
    generator = torch.Generator().manual_seed(seed)
    sums: dict[str, Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(differentiable(model))
        for path in dict.fromkeys(paths):
            hook = model.get_submodule(path).register_forward_hook(partial(_listen, sums, path))
            stack.callback(hook.remove)
        for done, ids in enumerate(torch.split(windows, 1), 1):
            send_back(model, ids, generator)
            progress(done, len(windows))
    return {path: one / windows.numel() for path, one in sums.items()}


def _listen(sums: dict[str, Tensor], path: str, _: nn.Module, __: Any, output: Any) -> Any:
    first = output if isinstance(output, Tensor) else output[0]
    if not first.requires_grad:
        return output
    copy = first.clone()  # what is changed in place later would take its gradient along
    copy.register_hook(partial(_add, sums, path))
    return copy if isinstance(output, Tensor) else (copy, *output[1:])


def _add(sums: dict[str, Tensor], path: str, gradient: Tensor) -> None:
    flat = gradient.flatten(0, -2).float()
    product = flat.T @ flat
    if bool(product.isfinite().all()):
        sums[path] = sums[path] + product if path in sums else product


def factor_of(information: Tensor) -> Tensor | None:
    """Return a factor of the damped information; None where it is no metric: zero, or not finite."""
    mean = information.diagonal().mean()
    if not bool(information.isfinite().all()) or not float(mean) > 0:
        return None
    damped = information.double() / mean + DAMPING * torch.eye(len(information), dtype=torch.float64)
    found: Tensor = torch.linalg.cholesky(damped).float()
    return found
