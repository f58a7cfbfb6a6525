"""Fold what the schema makes constant: masks without padding, constants, tables of positions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from collapse.passes.base import Context, Proposal
from collapse.plan import Evidence, Skipped, Specialise
from collapse.program import Program
from collapse.rewrite.fold import Folded, fold

SITE = "graph"


@dataclass(frozen=True)
class ConstantFold:
    """The pass; see `propose_constant_fold`."""

    name: str = "constant-fold"

    def propose(self, context: Context) -> Proposal:
        """Propose a graph in which constants and functions of positions are read, not computed."""
        return propose_constant_fold(context, self.name)


def propose_constant_fold(context: Context, name: str) -> Proposal:
    """Propose it where nodes go; what is left for its size, or for want of `max_tokens`, is a near miss."""
    bound, unpadded = context.schema.max_tokens, context.schema.padding == "none"
    folded = fold(context.program, max_tokens=bound, unpadded=unpadded)
    before, after = count_nodes(context.program), count_nodes(folded.program)
    near = _near_misses(folded, name)
    if after >= before:
        reason = "no node is constant, uniform or a function of positions alone under the schema"
        return Proposal(skipped=(*near, *(() if near else (Skipped(pass_name=name, site=SITE, reason=reason),))))
    figures = {
        "nodes_before": before,
        "nodes_after": after,
        "nodes_folded": before - after,
        "tables": len(folded.nodes),
        "table_bytes": folded.table_bytes,
    }
    evidence = Evidence(
        grade="proved",
        claim="logits and cache have the same bits" + (f" for up to {bound} tokens" if bound else ""),
        method="values that follow from constants, from positions or from a mask of ones, evaluated once",
        figures=figures,
    )
    edit = Specialise(
        pass_name=name, site=SITE, evidence=evidence, graph="fold-constants", max_tokens=bound, unpadded=unpadded
    )
    return Proposal((edit,), near)


def count_nodes(program: Program) -> int:
    """Return the number of calls in the graph."""
    return sum(node.op == "call_function" for node in program.graph.graph.nodes)


def _near_misses(folded: Folded, name: str) -> tuple[Skipped, ...]:
    reasons = Counter(left.reason for left in folded.left)
    first = {left.reason: left.node for left in reversed(folded.left)}
    return tuple(
        Skipped(pass_name=name, site=first[reason], reason=reason, figures={"nodes": count})
        for reason, count in sorted(reasons.items())
    )
