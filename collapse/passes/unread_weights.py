"""Erase tensors that nothing reads: copies under a second name, and tensors that no module claims."""

from __future__ import annotations

from dataclasses import dataclass

from collapse.passes.base import Context, Proposal
from collapse.plan import Erase, Evidence, Skipped


@dataclass(frozen=True)
class UnreadWeights:
    """The pass; see `propose_unread`."""

    name: str = "unread-weights"

    def propose(self, context: Context) -> Proposal:
        """Propose erasing what no program under the schema reads."""
        return propose_unread(context, self.name)


def propose_unread(context: Context, name: str) -> Proposal:
    """Sort the file's tensors into claimed and unclaimed, read and unread; erase what is safely neither.

    A tensor that a module claims but no graph reads stays where plain transformers would miss it and fill the
    hole with random numbers; it is listed as a near miss.
    """
    rewrites: list[Erase] = []
    skipped: list[Skipped] = []
    unclaimed = unclaimed_tensors(context)
    copies = {
        tensor: f"it is tied to {first} and holds the same bytes" for tensor, first in context.tied_copies.items()
    }
    for tensor, reason in sorted({**unclaimed, **copies}.items()):
        rewrites.append(_erase(context, name, tensor, reason))
    for tensor in sorted(context.checkpoint.tensors):
        if context.program.model_name(tensor) in context.reachability.unread and tensor not in copies:
            reason = "no program reads it, but its module claims it: plain transformers would report it missing"
            skipped.append(Skipped(pass_name=name, site=tensor, reason=reason))
    if not rewrites and not skipped:
        reason = "every tensor in the files is claimed by a module and read by the traced graph"
        skipped.append(Skipped(pass_name=name, site="model", reason=reason))
    return Proposal(tuple(rewrites), tuple(skipped))


def unclaimed_tensors(context: Context) -> dict[str, str]:
    """Return the tensors of the files that transformers itself reports as unexpected when it loads the model.

    The model is loaded for this only where a name in the files is not a name of the model.
    """
    foreign = [tensor for tensor in context.checkpoint.tensors if context.program.model_name(tensor) is None]
    if not foreign:
        return {}
    unexpected = context.loaded[1]
    return {tensor: "no module of the model claims it" for tensor in foreign if tensor in unexpected}


def _erase(context: Context, name: str, tensor: str, reason: str) -> Erase:
    info = context.checkpoint.tensors[tensor]
    evidence = Evidence(
        grade="proved",
        claim=f"{tensor} is never read: {reason}",
        method="names and ties of the model, liveness in the traced graph by tied group",
        figures={"bytes": info.nbytes, "parameters": info.numel},
    )
    return Erase(pass_name=name, site=tensor, evidence=evidence, tensors=(tensor,))
