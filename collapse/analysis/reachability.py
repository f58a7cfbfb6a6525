"""Which nodes, and so which tensors, the outputs of a traced graph depend on.

Torch's own dead-code elimination keeps weights alive through asserts and deletes real mutation. Here what
counts as an effect is a policy that can be read: writing to a tensor counts when that tensor is read later or
belongs to the caller; the operators in `NO_EFFECT` never count, although their signature says they write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from collapse.program import Program

aten = torch.ops.aten

# Operators whose schema or implementation claims an effect that no output can see.
NO_EFFECT = frozenset(
    {
        aten.detach_.default,  # cuts autograd history; values stay
        aten.lift_fresh_copy.default,
        aten._assert_tensor_metadata.default,
        aten._assert_async.msg,
        aten._assert_scalar.default,
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
        torch._C._set_grad_enabled,
    }
)


@dataclass(frozen=True)
class Reachability:
    """Facts about one program.

    Attributes:
        live: names of the nodes that some output depends on.
        read: state-dict names of parameters and buffers that are read, all tied names included.
        unread: the others.
    """

    live: frozenset[str]
    read: frozenset[str]
    unread: tuple[str, ...]


def reachability(program: Program) -> Reachability:
    """Find what the outputs of `program` depend on. A tied group is read as soon as one of its names is."""
    live = live_nodes(program.graph.graph)
    read: set[str] = set()
    for item in program.inputs:
        if item.role in {"parameter", "buffer"} and item.placeholder in live:
            read.update(program.aliases(item.target))
    unread = tuple(sorted(set(program.shapes) - read))
    return Reachability(frozenset(live), frozenset(read), unread)


def live_nodes(graph: fx.Graph) -> set[str]:
    """Return the names of all nodes that an output, or a write the caller can see, depends on."""
    roots = storage_roots(graph)
    writes = [(node, roots[written]) for node in graph.nodes for written in written_arguments(node)]
    pending = [node for node in graph.nodes if node.op == "output" or _outlives(node, roots)]
    live: set[fx.Node] = set()
    while pending:
        live_now = closure(pending, live)
        touched = {roots[node] for node in live_now}
        pending = [node for node, root in writes if root in touched and node not in live]
    return {node.name for node in live}


def closure(start: Iterable[fx.Node], live: set[fx.Node]) -> set[fx.Node]:
    """Add everything that `start` depends on to `live`, which is returned."""
    stack = list(start)
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack.extend(node.all_input_nodes)
    return live


def _outlives(node: fx.Node, roots: dict[fx.Node, fx.Node]) -> bool:
    """Whether a node's effect outlives the call: it writes to what the caller owns, or hides its body from us."""
    if node.op in {"placeholder", "output", "get_attr"} or node.target in NO_EFFECT:
        return False
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    return any(roots[written].op in {"placeholder", "get_attr"} for written in written_arguments(node))


def written_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the arguments that the node writes to, by the operator's schema; `out=` arguments included."""
    if node.op != "call_function" or node.target in NO_EFFECT or not isinstance(node.target, torch._ops.OpOverload):
        return ()
    written: list[object] = []
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        written.extend(value if isinstance(value, list | tuple) else [value])
    return tuple(value for value in written if isinstance(value, fx.Node))


def storage_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map each node to the node whose storage it may share: views and in-place results lead to their base."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        base = _aliased(node)
        roots[node] = roots[base] if base is not None else node
    return roots


def written_storage(graph: fx.Graph) -> tuple[Mapping[fx.Node, fx.Node], frozenset[fx.Node]]:
    """Return the root of every node, and the roots whose storage some node writes to."""
    roots = storage_roots(graph)
    return roots, frozenset(roots[target] for node in graph.nodes for target in written_arguments(node))


def _aliased(node: fx.Node) -> fx.Node | None:
    if node.op != "call_function":
        return None
    if not isinstance(node.target, torch._ops.OpOverload):
        # getitem on a split or chunk still views its base, on other results it takes a tensor of their own
        first = node.args[0] if node.args else None
        return first if isinstance(first, fx.Node) and not _has_own_results(first) else None
    if not any(result.alias_info is not None for result in node.target._schema.returns):
        return None
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and position < len(node.args) and isinstance(node.args[position], fx.Node):
            return node.args[position]  # type: ignore[return-value]
    return None


def _has_own_results(node: fx.Node) -> bool:
    """Whether a node gives several new tensors, such as the values and the places of the largest elements."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    return len(returns) > 1 and all(result.alias_info is None for result in returns)


def remove_dead_nodes(graph: fx.Graph, keep: frozenset[str] | set[str] = frozenset()) -> tuple[str, ...]:
    """Erase every node that is neither live nor named in `keep`; return the names of those erased.

    Keep the user's inputs, so that the calling convention of the graph stays.
    """
    wanted = live_nodes(graph) | keep
    erased = [node for node in reversed(list(graph.nodes)) if node.name not in wanted]
    for node in erased:
        graph.erase_node(node)
    return tuple(node.name for node in erased)
