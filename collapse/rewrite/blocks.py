"""Drops blocks of a module list from a graph: a dropped block passes its input on, and its cache entries go."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import fx

from collapse.errors import PlanError
from collapse.plan import DropLayers
from collapse.program import Program
from collapse.rewrite.leaves import leaves_of


def drop_blocks(graph: fx.Graph, program: Program, rewrite: DropLayers) -> tuple[int, ...]:
    """Take the blocks of `rewrite` that are not kept out of `graph`; return the cache entries that go with them.

    Raises `PlanError` where the graph has no such list of blocks, and where another block reads more of a dropped one
    than the value that flows through the blocks.
    """
    blocks = {int(path.rpartition(".")[2]) for path in program.module_types if _is_block(path, rewrite.site)}
    if len(blocks) != rewrite.size or blocks != set(range(len(blocks))):
        raise PlanError(f"the model has {len(blocks)} blocks here, the plan says {rewrite.size}", where=rewrite.site)
    leaves: list[int] = []
    for number in range(rewrite.size):
        if number not in rewrite.kept:
            leaves += _drop_block(graph, program, f"{rewrite.site}.{number}")
    return tuple(leaves)


def _is_block(path: str, site: str) -> bool:
    return re.fullmatch(re.escape(site) + r"\.\d+", path) is not None


def _drop_block(graph: fx.Graph, program: Program, site: str) -> tuple[int, ...]:
    inside = inside_of(graph, site)
    if not inside:
        raise PlanError("the graph has no such block", where=site, fix="trace the model and look at its modules")
    leaves = leaves_of(graph, program, inside)
    leaving = leaving_values(graph, inside)
    if len(leaving) != 1:
        names = ", ".join(node.name for node in leaving) or "nothing"
        reason = f"other modules read {len(leaving)} values of this block ({names}), not just the one it passes on"
        raise PlanError(reason, where=site, fix="keep this block")
    leaving[0].replace_all_uses_with(passed_in(graph, inside, leaving[0], site))
    return leaves


def is_inside(node: fx.Node, site: str) -> bool:
    """Whether the node was traced within the module `site` or one of its children."""
    stack = node.meta.get("nn_module_stack") or {}
    return any(str(path) == site for path, _ in stack.values())


def inside_of(graph: fx.Graph, site: str) -> set[fx.Node]:
    """Return the nodes of the module `site`."""
    return {node for node in graph.nodes if node.op == "call_function" and is_inside(node, site)}


def leaving_values(graph: fx.Graph, inside: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes of a module that others read, in order.

    That they are put in the cache does not count, nor does arithmetic on the sizes of the graph's inputs, which stays.
    """
    return [node for node in graph.nodes if node in inside and _read_outside(node, inside) and not _is_size(node)]


def _is_size(node: fx.Node) -> bool:
    """Whether a value is computed from sizes of the graph's inputs alone."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return all(source.op == "placeholder" or _is_size(source) for source in node.all_input_nodes)


def _read_outside(node: fx.Node, inside: set[fx.Node]) -> bool:
    return any(user not in inside and user.op != "output" for user in node.users) or _is_logits(node)


def _is_logits(node: fx.Node) -> bool:
    return any(user.op == "output" and user.args[0][0] is node for user in node.users)  # type: ignore[index]


def passed_in(graph: fx.Graph, inside: set[fx.Node], leaving: fx.Node, site: str) -> fx.Node:
    """Return the one value that enters `inside` and has the shape of `leaving`; raises `PlanError` if there is none."""
    nodes: Iterable[fx.Node] = graph.nodes
    entering = dict.fromkeys(
        source for node in nodes if node in inside for source in node.all_input_nodes if source not in inside
    )
    shape = leaving.meta["val"].shape
    same = [node for node in entering if node.op != "placeholder" and _has_shape(node, shape)]
    if len(same) != 1:
        raise PlanError(f"{len(same)} inputs of the module have the shape of its output, not one", where=site)
    return same[0]


def _has_shape(node: fx.Node, shape: torch.Size) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.shape == shape
