"""Edits of the graph alone, which no checkpoint can say: applied to the collapsed program, in a fixed order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from collapse.errors import PlanError
from collapse.plan import GraphEdit, Plan, Specialise
from collapse.program import Program
from collapse.rewrite.fold import Folded, fold, folded_values
from collapse.rewrite.last_token import last_token


@dataclass(frozen=True)
class Specialised:
    """A program after its graph edits.

    Attributes:
        program: takes what the given program takes; logits are `[batch, 1, vocabulary]` after `next-token`.
        next_token: whether its logits are of the last position only.
        max_tokens: the longest sequence that it serves, past included; None where there is no bound.
        unpadded: whether it takes attention masks of ones alone.
    """

    program: Program
    next_token: bool = False
    max_tokens: int | None = None
    unpadded: bool = False
    folded: Folded | None = None

    def weights(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what the program reads: the weights and buffers `given`, and the folded values made from them."""
        made = folded_values(self.folded, given, self.max_tokens) if self.folded else {}
        wanted = {item.target for item in self.program.inputs}
        return {name: tensor for name, tensor in {**given, **made}.items() if name in wanted}


def specialise(program: Program, plan: Plan) -> Specialised:
    """Apply the graph edits of `plan` to a program that is collapsed already, and so to one traced from its output.

    Raises `PlanError` where an edit is asked for twice.
    """
    folding, narrowing = _edit(plan, "fold-constants"), _edit(plan, "next-token")
    folded = fold(program, max_tokens=folding.max_tokens, unpadded=folding.unpadded) if folding else None
    whole = folded.program if folded else program
    return Specialised(
        program=last_token(whole) if narrowing else whole,
        next_token=narrowing is not None,
        max_tokens=folding.max_tokens if folding else None,
        unpadded=folding.unpadded if folding else False,
        folded=folded,
    )


def has_graph_edits(plan: Plan) -> bool:
    """Whether the plan edits the graph beyond what a checkpoint can say."""
    return any(rewrite.graph is not None for rewrite in plan.of_kind(Specialise))


def _edit(plan: Plan, kind: GraphEdit) -> Specialise | None:
    found = [rewrite for rewrite in plan.of_kind(Specialise) if rewrite.graph == kind]
    if len(found) > 1:
        raise PlanError(f"asks for {kind} twice", where=found[1].site, fix="make a new plan")
    return found[0] if found else None
