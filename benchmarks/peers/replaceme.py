"""ReplaceMe (Shopkhoev et al., 2025): drop a run of blocks and put a least-squares linear map in its place.

With M the output of the feed-forward network before the cut, Y what the residual stream adds to it and L the output of
the cut run, T = argmin |M T + Y - L|^2 = (M^T M)^-1 M^T (L - Y), and T goes into the weight that gives M.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.peers.blocks import batches, residual_stream
from benchmarks.peers.calibration import Calibration
from benchmarks.peers.cut import Removal
from benchmarks.peers.streams import least_run
from benchmarks.peers.structure import Structure
from collapse.errors import UnsupportedError


def replaceme(calibration: Calibration, share: float) -> Removal:
    """Drop the run of least cosine distance that has a block before it, and fit the map on all tokens."""
    count = calibration.blocks_for(share)
    start = least_run(1 - calibration.turns.cosine, count, first=1)
    return fold(calibration.model, calibration.structure, calibration.ids, start, count)


def fold(model: PreTrainedModel, structure: Structure, ids: torch.Tensor, start: int, count: int) -> Removal:
    """Return the removal of `count` blocks from `start` on, with the map in the block before.

    Where a norm follows the feed-forward network no weight can take the map up; it is then a matrix of its own behind
    the norm, and counts as one.
    """
    leaf = last_leaf(model, structure, ids[:1], start - 1)
    matrix = least_squares(model, structure, ids, leaf, start, count)
    module, gone = model.get_submodule(leaf), tuple(range(start, start + count))
    if not isinstance(module, nn.Linear):
        return Removal("replaceme", gone, after={leaf: matrix})
    weights = {f"{leaf}.weight": (matrix.double().T @ module.weight.double()).float()}
    if module.bias is not None:
        weights[f"{leaf}.bias"] = (module.bias.double() @ matrix.double()).float()
    return Removal("replaceme", gone, weights=weights)


@torch.no_grad()
def last_leaf(model: PreTrainedModel, structure: Structure, ids: torch.Tensor, block: int) -> str:
    """Return the path of the module that runs last within a block and changes what it is given."""
    site = f"{structure.layers.site}.{block}"
    ran: list[tuple[str, torch.Tensor]] = []

    def hook(path: str) -> Any:
        return lambda _, args, output: ran.append((path, output)) if _changes(args, output) else None

    leaves = [(path, m) for path, m in model.get_submodule(site).named_modules() if not list(m.children())]
    hooks = [module.register_forward_hook(hook(f"{site}.{path}")) for path, module in leaves]
    try:
        stream, _ = residual_stream(model, structure.blocks(model), ids)
    finally:
        for handle in hooks:
            handle.remove()
    if not ran or ran[-1][1].shape != stream[block + 1].shape:
        raise UnsupportedError("does not end with a module that adds to the residual stream", where=site)
    return ran[-1][0]


def _changes(args: tuple[Any, ...], output: Any) -> bool:
    same = bool(args) and isinstance(args[0], torch.Tensor) and args[0].shape == output.shape
    return not (same and torch.equal(args[0], output))


@torch.no_grad()
def least_squares(
    model: PreTrainedModel, structure: Structure, ids: torch.Tensor, leaf: str, start: int, count: int
) -> torch.Tensor:
    """Return T [width, width] by the normal equations in double precision; of several solutions the smallest."""
    made: list[torch.Tensor] = []
    hook = model.get_submodule(leaf).register_forward_hook(lambda _, __, output: made.append(output))
    gram: torch.Tensor | float = 0.0
    moment: torch.Tensor | float = 0.0
    try:
        for batch in batches(ids, model.get_input_embeddings().weight.shape[0]):
            stream, _ = residual_stream(model, structure.blocks(model), batch)
            outputs = made.pop().flatten(0, 1).double()
            rest = stream[start].flatten(0, 1).double() - outputs
            wanted = stream[start + count].flatten(0, 1).double() - rest
            gram, moment = gram + outputs.T @ outputs, moment + outputs.T @ wanted
    finally:
        hook.remove()
    solution: torch.Tensor = torch.linalg.lstsq(gram, moment, driver="gelsd").solution
    return solution.float()
