"""Turns operators that write into their argument into ones that return the result, where nobody can tell."""

from __future__ import annotations

import torch
from torch import fx

from collapse.analysis.reachability import storage_roots, written_arguments


def without_writes(graph: fx.Graph) -> None:
    """Rewrite `add_(x, y)` as `add(x, y)` and the like, where only what follows from it reads x afterwards."""
    roots = storage_roots(graph)
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        plain = _plain(node)
        if plain is None or not node.args or written_arguments(node) != node.args[:1]:
            continue
        shared = {other for other, root in roots.items() if root is roots[node]}
        readers = {user for other in shared for user in other.users if order[user] > order[node]}
        derived = _derived(node)
        if roots[node].op == "call_function" and all(set(user.all_input_nodes) & shared <= derived for user in readers):
            node.target = plain


def _plain(node: fx.Node) -> torch._ops.OpOverload | None:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._opname.endswith("_"):
        return None
    packet = getattr(getattr(torch.ops, target.namespace), target._opname.removesuffix("_"), None)
    return getattr(packet, target._overloadname, None) if packet is not None else None


def _derived(node: fx.Node) -> set[fx.Node]:
    """Return the node and everything computed from it."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in found:
            found.add(current)
            stack.extend(current.users)
    return found
