"""Checks that the reloaded model has, tensor by tensor, the weights that the rewritten graph reads.

Samples reach only some rows of a large table; this reaches all. The two sides come from the source on two ways: byte
ranges copied by the writer and read back by transformers, and rows selected in memory by the graph interpreter.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from collapse.fingerprint import fingerprint
from collapse.verdict import Check

SHOWN = 5


def _fp32(tensor: torch.Tensor) -> str:
    return fingerprint(tensor.detach().to(torch.float32))


def fingerprints(model: nn.Module) -> dict[str, str]:
    """Return the digest of every tensor of a model by its state-dict name; tied names share one computation."""
    known: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    for tensor in tensors.values():
        if id(tensor) not in known:
            known[id(tensor)] = _fp32(tensor)
    return {name: known[id(tensor)] for name, tensor in tensors.items()}


def weights_check(
    there: Mapping[str, str], names: Mapping[str, tuple[str, str]], weights: Mapping[str, torch.Tensor]
) -> Check:
    """Compare the digests `there` of the reloaded model with the rewritten `weights` of the graph."""
    known: dict[int, str] = {}
    wrong: list[str] = []
    for name, (origin, graph_name) in names.items():
        tensor = weights[graph_name]
        expected = known.get(id(tensor)) or known.setdefault(id(tensor), _fp32(tensor))
        if there.get(name) != expected:
            wrong.append(f"{name} (from {origin})")
    figures: dict[str, float | int | str] = {"tensors": len(names), "differ": len(wrong)}
    if wrong:
        detail = f"{len(wrong)} tensors of the reloaded model are not what the graph reads: {', '.join(wrong[:SHOWN])}"
        return Check(name="graph: weights", passed=False, detail=detail, figures=figures)
    detail = f"all {len(names)} tensors of the reloaded model are what the graph reads, bit for bit"
    return Check(name="graph: weights", passed=True, detail=detail, figures=figures)
