"""Checks that the reloaded model has, tensor by tensor, the weights that the rewritten graph reads.

Samples reach only some rows of a large table; this reaches all. The two sides come from the source on two ways: byte
ranges copied by the writer and read back by transformers, and rows selected in memory by the graph interpreter.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from collapse.checkpoint import Checkpoint
from collapse.fingerprint import fingerprint
from collapse.naming import Naming
from collapse.plan import Plan
from collapse.program import Program
from collapse.rewrite.free import added_names
from collapse.rewrite.tensors import erased_names, output_name
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


def origins(naming: Naming, source: Checkpoint, plan: Plan, program: Program) -> dict[str, tuple[str, str]]:
    """Return, by the output model's tensor names, the source's file name and the graph's name of each.

    An added tensor has the name that it has in the values file.
    """
    gone = erased_names(plan)[0]
    found: dict[str, tuple[str, str]] = {}
    for name in filter(source.is_weight, source.tensors):
        before, after = program.model_name(name), naming.resolve(output_name(plan, name))[0]
        if name not in gone and before is not None and after is not None:
            found[after] = (name, before)
    for name, graph_name in added_names(plan).items():
        found[naming.resolve(output_name(plan, name))[0] or name] = (name, graph_name)
    return found


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
