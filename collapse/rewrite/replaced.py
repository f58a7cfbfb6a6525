"""Which tensors a plan gives computed data, and why it must not."""

from __future__ import annotations

from collections.abc import Container, Mapping

from collapse.checkpoint import Checkpoint
from collapse.errors import PlanError
from collapse.plan import Plan, Replace

NEW_PLAN = "make a new plan"


def replaced_digests(checkpoint: Checkpoint, plan: Plan, erased: Container[str]) -> dict[str, str]:
    """Return the SHA-256 (hex) of the new data of each replaced tensor, by the source's name.

    Raises `PlanError` for one that the checkpoint lacks, that the plan erases or replaces twice, that is quantised,
    or that is tied to another one of the files which keeps other data.
    """
    found: dict[str, str] = {}
    for rewrite in plan.of_kind(Replace):
        for name in rewrite.tensors:
            reason = _refusal(checkpoint, name, found, erased)
            if reason is not None:
                raise PlanError(reason, where=name, fix=NEW_PLAN)
            found[name] = rewrite.tensors[name]
    if found:
        from collapse.analysis.ties import require_whole_ties  # only plans with computed data need transformers

        require_whole_ties(checkpoint, found, erased)
    return found


def _refusal(checkpoint: Checkpoint, name: str, found: Mapping[str, str], erased: Container[str]) -> str | None:
    if name not in checkpoint.tensors:
        return "the checkpoint has no such tensor to replace"
    if name in erased:
        return "the tensor is both erased and replaced"
    if name in found:
        return "the tensor is replaced twice"
    if checkpoint.group(name) is not None:
        return "the tensor is part of a quantised weight, which cannot be replaced"
    return None
