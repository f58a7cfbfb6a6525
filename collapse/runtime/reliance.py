"""Which clauses of the schema a plan leaned on, in words for the error that an input outside of it gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal

from collapse.plan import AddBias, DropLayers, Narrow, Plan, Reroot, ShortCircuit, Specialise, StandIn

Clause = Literal["max_tokens", "tokens", "modality", "padding"]
CLAUSES: tuple[Clause, ...] = ("max_tokens", "tokens", "modality", "padding")


def reliance(plan: Plan) -> Mapping[Clause, tuple[str, ...]]:
    """Return for each clause what would not hold without it, such as `positions dropped rows from 640 on`.

    An empty tuple says that no rewrite leaned on the clause. What was certified or measured leans on all of
    them: its data kept the whole schema.
    """
    found: dict[Clause, list[str]] = {clause: [] for clause in CLAUSES}
    for clause, words in (*_stated(plan), *_sampled(plan)):
        if words not in found[clause]:
            found[clause].append(words)
    return {clause: tuple(words) for clause, words in found.items()}


def _stated(plan: Plan) -> Iterator[tuple[Clause, str]]:
    """Yield what follows from one clause alone."""
    for rewrite in plan.rewrites:
        name = rewrite.pass_name
        if isinstance(rewrite, Narrow) and rewrite.relabels == "positions":
            yield "max_tokens", f"{name} dropped rows from {rewrite.kept.runs[-1][1]} on"
        elif isinstance(rewrite, Narrow) and rewrite.relabels == "tokens":
            yield "tokens", f"{name} kept {len(rewrite.kept)} of {rewrite.size} ids"
        elif isinstance(rewrite, Reroot):
            yield "modality", f"{name} left out {len(rewrite.tensors)} tensors that text does not reach"
            if (bound := rewrite.evidence.figures.get("max_tokens")) is not None:
                yield "max_tokens", f"{name} was proved up to {bound} tokens"
        elif isinstance(rewrite, Specialise):
            if rewrite.max_tokens is not None:
                what = f"set {', '.join(rewrite.config)} for" if rewrite.config else "folded what is constant in"
                yield "max_tokens", f"{name} {what} at most {rewrite.max_tokens} tokens"
            if rewrite.unpadded:
                yield "padding", f"{name} folded what is constant without padding"


def _sampled(plan: Plan) -> Iterator[tuple[Clause, str]]:
    """Yield what was found true of data under the whole schema."""
    leaning = (
        rewrite
        for rewrite in plan.rewrites
        if isinstance(rewrite, ShortCircuit | DropLayers | StandIn | AddBias)
        or (isinstance(rewrite, Narrow) and rewrite.relabels == "channels")
    )
    counts = Counter((r.pass_name, r.evidence.grade) for r in leaning if r.evidence.grade != "proved")
    for (name, grade), count in counts.items():
        sites = f"{count} {'site' if count == 1 else 'sites'}"
        for clause in CLAUSES:
            yield clause, f"{name} collapsed {sites}, {grade} on such inputs only"
