"""Which tensors a plan touched, and which blocks source and student both have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise

from collapse.checkpoint import Checkpoint
from collapse.plan import AddBias, DropLayers, Narrow, Plan, Replace, Rewrite, StandIn
from collapse.program import Program
from collapse.rewrite.free import added_tensors
from collapse.rewrite.tensors import erased_names, layer_number
from collapse.verify.computed import exact_part

TRAINABLE = frozenset({"F64", "F32", "F16", "BF16"})
Names = Mapping[str, tuple[str, str]]  # the output model's name -> the file's and the graph's, as `origins` gives them


def costly_rewrites(plan: Plan) -> tuple[Rewrite, ...]:
    """Return the rewrites that make another function of the model, in order: what there is to heal."""
    exact = exact_part(plan).rewrites
    return tuple(one for one in plan.rewrites if one not in exact and not _only_edits(one))


def _only_edits(rewrite: Rewrite) -> bool:
    """Whether a rewrite is of the graph or the config alone, or leaves the module that it is about in the files."""
    return rewrite.kind == "specialise" or getattr(rewrite, "stage", None) == "fuse"


def touched(checkpoint: Checkpoint, program: Program, plan: Plan) -> frozenset[str]:
    """Return, by the names of the source or of the values file, the tensors that healing trains by default.

    - Every tensor with an axis that lost channels (neurons, heads, experts), and every one with computed values.
    - Of a dropped block, all tensors of the block kept before it and of the one kept after it.
    - Of a module that is gone or has a stand-in, the other tensors of its block, and those of the map itself.
    - Of a module that got a bias, the bias and its other tensors.

    Left out are what the plan takes away, and what cannot be replaced: quantised weights, and tensors that transformers
    merges with others.
    """
    found = {name for rewrite in costly_rewrites(plan) for name in _of(rewrite, checkpoint)}
    return frozenset(found & trainable(checkpoint, program, plan))


def trainable(checkpoint: Checkpoint, program: Program, plan: Plan) -> frozenset[str]:
    """Return, by the same names, every tensor of the output that a healing could give other values."""
    gone = erased_names(plan)[0]
    found = set(added_tensors(plan))
    for name, info in checkpoint.tensors.items():
        model_name, merged = program.naming.resolve(name)
        plain = info.dtype in TRAINABLE and checkpoint.group(name) is None and checkpoint.is_weight(name)
        if plain and model_name is not None and not merged and name not in gone:
            found.add(name)
    return frozenset(found)


def _of(rewrite: Rewrite, checkpoint: Checkpoint) -> Iterator[str]:
    if isinstance(rewrite, Narrow):
        yield from (axis.tensor for axis in rewrite.axes)
    elif isinstance(rewrite, Replace):
        yield from rewrite.tensors
    elif isinstance(rewrite, DropLayers):
        beside = _beside(rewrite)
        yield from (name for name in checkpoint.tensors if layer_number(rewrite, name) in beside)
    elif isinstance(rewrite, AddBias):
        yield from (name for name in checkpoint.tensors if name.startswith(rewrite.prefix))
    else:
        blocks = {block for name in getattr(rewrite, "tensors", ()) if (block := _block(name))}
        yield from (name for name in checkpoint.tensors if _block(name) in blocks)
    if isinstance(rewrite, StandIn | AddBias):
        yield from (f"{rewrite.prefix}{part}" for part in rewrite.added)


def _beside(rewrite: DropLayers) -> frozenset[int]:
    """Return the kept blocks right before and after those that went."""
    kept = list(rewrite.kept)
    places = [-1, *kept, rewrite.size]
    gaps = [(left, right) for left, right in pairwise(places) if right - left > 1]
    return frozenset(number for gap in gaps for number in gap if 0 <= number < rewrite.size)


def _block(name: str) -> str | None:
    """Return the outermost numbered part of a tensor's name, None where it has none."""
    found = re.match(r"(?:.*?\.)?\d+(?=\.)", name)
    return found.group(0) if found else None


def blocks_by_number(names: Names, site: str) -> dict[int, str]:
    """Return the module path of every block of a model, by the number that it has in the source's list `site`."""
    found: dict[int, str] = {}
    for name, (_, graph_name) in names.items():
        inside = re.match(rf"{re.escape(site)}\.(\d+)(\..*)", graph_name)
        if inside and name.endswith(inside.group(2)):
            found.setdefault(int(inside.group(1)), name.removesuffix(inside.group(2)))
    return found
