"""What a node must be given to compute only some rows of its output."""

from __future__ import annotations

import torch
from torch import fx

from collapse.analysis.call_sizes import Shapes
from collapse.analysis.flop_rules import op_name
from collapse.analysis.reachability import written_arguments
from collapse.analysis.row_rules import RULES, SEEDED, Cut, Pull, Rule, aligned, is_pointwise, is_tensor


def pull(node: fx.Node, cut: Cut, shapes: Shapes) -> Pull | None:
    """Return what `node` needs to compute `cut` of its output, or None where it must be computed whole."""
    rule = rule_of(node)
    shape = shapes(node)
    if rule is None or shape is None or shape[cut.dim] != cut.size or any(map(is_tensor, node.kwargs.values())):
        return None
    return rule(node, cut, shapes)


def rule_of(node: fx.Node) -> Rule | None:
    """Return the rule of a node's operator; none for one that writes or draws random numbers."""
    if node.op != "call_function" or written_arguments(node):
        return None
    if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
        return SEEDED.get(op_name(node))
    return RULES.get(op_name(node)) or (aligned if is_pointwise(node) else None)
