"""Computed weights in memory: what passes give, and what a rewritten graph reads in place of the source's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from collapse.errors import PlanError
from collapse.plan import Plan, Replace
from collapse.program import Program
from collapse.rewrite.free import added_names
from collapse.rewrite.values import Values, open_values


class Computed:
    """Keeps what passes compute in files of a temporary folder; a context manager, at whose end they are gone."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._root: Path | None = None
        self._files: list[Values] = []

    def __enter__(self) -> Computed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write tensors, by the source's names, in the dtype and shape that they have in the output."""
        if not tensors:
            return
        if self._root is None:
            self._root = Path(self._open.enter_context(TemporaryDirectory(prefix="collapse-values-")))
        path = self._root / f"{len(self._files)}.safetensors"
        save_file(
            {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()},
            path,
        )
        self._files.append(open_values(path))

    @property
    def values(self) -> Values | None:
        """All that was added, later tensors over earlier ones of the same name; None where there is nothing."""
        found = {name: info for values in self._files for name, info in values.tensors.items()}
        return Values(self._files[0].root, found) if self._files else None


def replaced_weights(
    program: Program, weights: Mapping[str, torch.Tensor], plan: Plan, values: Values | None
) -> dict[str, torch.Tensor]:
    """Return what the plan puts in place of `weights`, by state-dict name, each under all names that it is tied to.

    The tensors have the dtype of `weights`. Raises `PlanError` where the values are not given or have another shape,
    and as `replaced_names` does.
    """
    found: dict[str, torch.Tensor] = {}
    for origin, name in replaced_names(program, plan).items():
        tensor = _read(values, origin).to(weights[name].dtype, copy=True)  # out of the mapped file
        if tensor.shape != weights[name].shape:
            reason = f"the values have the shape {list(tensor.shape)}, the graph reads {list(weights[name].shape)}"
            raise PlanError(reason, where=origin, fix="make a new plan")
        found |= dict.fromkeys(program.aliases(name), tensor)
    return found


def added_weights(weights: Mapping[str, torch.Tensor], plan: Plan, values: Values | None) -> dict[str, torch.Tensor]:
    """Return the tensors that the plan adds by the state-dict names that the rewritten graph has for them.

    They have the dtype of `weights`. Raises `PlanError` where the values are not given.
    """
    dtype = next((tensor.dtype for tensor in weights.values() if tensor.is_floating_point()), torch.float32)
    return {name: _read(values, origin).to(dtype, copy=True) for origin, name in added_names(plan).items()}


def replaced_names(program: Program, plan: Plan) -> dict[str, str]:
    """Return the state-dict name of each tensor that the plan replaces, by the source's name in the files.

    Raises `PlanError` for tensors that transformers does not take one by one into the model.
    """
    found: dict[str, str] = {}
    for origin in (name for rewrite in plan.of_kind(Replace) for name in rewrite.tensors):
        name, merged = program.naming.resolve(origin)
        if name is None or merged:
            reason = "it is only a part of a tensor of the model" if merged else "the model has no such tensor"
            raise PlanError(f"cannot be replaced: {reason}", where=origin, fix="make a new plan")
        found[origin] = name
    return found


def _read(values: Values | None, name: str) -> torch.Tensor:
    if values is None:
        raise PlanError("the plan computes the tensor, but no values are given", where=name)
    path, inside = values.place(name)
    with safe_open(path, framework="pt") as stream:
        tensor: torch.Tensor = stream.get_tensor(inside)
    return tensor
