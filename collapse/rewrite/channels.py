"""Narrows channels in a graph: heads, neurons and experts, whose number stands in the graph as literal sizes.

The literals are not guessed. The config with the rewrites' edits is traced again, and that graph is taken, but only
where it is the source's graph node for node: the same operators, wired alike, with the same floats and dtypes, and
other integers only where an operator takes a size. So this path depends on the config edits but never on the files:
what the weights are comes from the rewrites' axes alone, applied to the source's weights in memory. Propagating kept
index sets through every operator would not need the config either, but one missing operator rule would refuse a
model; a config edit that means more than sizes is refused here by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from transformers import AutoConfig

from collapse.canonical import dumps
from collapse.errors import PlanError
from collapse.plan import DropLayers, Narrow, Plan, Rewrite
from collapse.program import Program
from collapse.rewrite.config import config_edits
from collapse.trace import trace

aten = torch.ops.aten
SIZED = frozenset(
    {
        *(aten.view.default, aten.reshape.default, aten.expand.default, aten._unsafe_view.default),
        *(aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.narrow.default),
        *(aten.one_hot.default, aten.full.default, aten.zeros.default, aten.ones.default, aten.arange.default),
        *(aten.arange.start_step, aten.new_zeros.default, aten.empty.memory_format, aten.histc.default),
        aten.unflatten.int,
    }
)  # operators that take sizes; an integer of any other one (the k of a topk, say) must stay


def experts_of(program: Program, rewrite: DropLayers) -> frozenset[str]:
    """Return the model's tensors with one row an expert that the files have in parts, of which some are dropped.

    Empty for a list of blocks that are modules of their own, whose tensors are not all parts.
    """
    resolved = [program.naming.resolve(name) for name in rewrite.tensors]
    whole = not all(merged for _, merged in resolved)
    return frozenset() if whole else frozenset(name for name, _ in resolved if name is not None)


def is_channels(program: Program, rewrite: Rewrite) -> bool:
    """Whether a rewrite changes sizes that stand in the graph."""
    if isinstance(rewrite, DropLayers):
        return bool(experts_of(program, rewrite))
    return isinstance(rewrite, Narrow) and rewrite.relabels == "channels"


def narrow_channels(
    program: Program, plan: Plan, config: Mapping[str, Any] | None, shapes: Mapping[str, tuple[int, ...]]
) -> Program:
    """Return the program with the plan's channels narrowed; `shapes` are those that the parameters must have then.

    Raises `PlanError` where the edited config gives another model than the rewrites.
    """
    rewrites = tuple(rewrite for rewrite in plan.rewrites if is_channels(program, rewrite))
    if not rewrites:
        return program
    if config is None:
        raise PlanError("channels cannot be narrowed without the config", where=rewrites[0].site)
    edited = config_edits(config, plan.model_copy(update={"rewrites": rewrites}))
    try:
        found = _traced(dumps(edited))
    except Exception as error:  # a config class may raise anything for values that do not fit
        reason = f"the edited config cannot be built ({(str(error) or type(error).__name__).splitlines()[0][:200]})"
        raise PlanError(reason, where=rewrites[0].site, fix="make a new plan") from None
    for name, shape in shapes.items():
        if found.shapes.get(name) != shape:
            reason = f"the edited config gives {name} the shape {found.shapes.get(name)}, the plan {shape}"
            raise PlanError(reason, where=rewrites[0].site, fix="make a new plan")
    _require_same(program, found, rewrites[0].site)
    return found


@lru_cache(maxsize=1)
def _traced(config: str) -> Program:
    """Trace a config given as canonical JSON; a plan is often rewritten twice in a row."""
    return trace(AutoConfig.for_model(**json.loads(config)))


def _require_same(source: Program, found: Program, site: str) -> None:
    before, after = list(source.graph.graph.nodes), list(found.graph.graph.nodes)
    places = [{node: number for number, node in enumerate(nodes)} for nodes in (before, after)]
    if len(before) != len(after):
        raise PlanError(f"the edited config gives a graph of {len(after)} nodes, not {len(before)}", where=site)
    for old, new in zip(before, after, strict=True):
        same = (old.op, old.target) == (new.op, new.target) if old.op == "call_function" else old.op == new.op
        left, right = (_plain((node.args, node.kwargs), at) for node, at in ((old, places[0]), (new, places[1])))
        if not same or not _alike(left, right, old.target in SIZED):
            reason = f"the edited config changes more than sizes: {old.name} is {new.format_node()}"
            raise PlanError(reason, where=site, fix="make a new plan")
    roles = [[(item.role, item.target) for item in program.inputs] for program in (source, found)]
    if roles[0] != roles[1]:
        raise PlanError("the edited config gives a graph with other inputs", where=site)


def _plain(value: Any, places: Mapping[fx.Node, int]) -> Any:
    """Replace nodes by their place, so that arguments of two graphs can be compared."""
    return map_aggregate(value, lambda leaf: f"node {places[leaf]}" if isinstance(leaf, fx.Node) else leaf)


def _alike(left: Any, right: Any, sized: bool) -> bool:
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(_alike(a, b, sized) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_alike(left[key], right[key], sized) for key in left)
    if sized and type(left) is int and type(right) is int:
        return True
    return type(left) is type(right) and bool(left == right)
