"""Compute the last position of the logits only, and no more of the last layer than it needs."""

from __future__ import annotations

from dataclasses import dataclass

from collapse.analysis.flops import Cost, cost
from collapse.passes.base import Context, Proposal
from collapse.plan import Evidence, Skipped, Specialise
from collapse.rewrite.last_token import last_token

SITE = "logits"


@dataclass(frozen=True)
class LastToken:
    """The pass; see `propose_last_token`."""

    name: str = "last-token"

    def propose(self, context: Context) -> Proposal:
        """Propose a graph that gives logits of the last position only."""
        return propose_last_token(context, self.name)


def propose_last_token(context: Context, name: str) -> Proposal:
    """Propose it where logits are asked for at the last position only, and matrix work is saved.

    Generation reads the logits of the last position. In the last layer the queries, what follows attention and the
    head are then needed there alone; keys and values are needed everywhere, for the cache as well.
    """
    if context.schema.task != "generate":
        return _left(name, f"the task is to {context.schema.task}: logits of every position are asked for")
    before, after = _costs(context)
    saved = before.prefill_flops - after.prefill_flops
    if saved <= 0:
        reason = "no matrix work is saved: the operator that gives what the head reads mixes positions"
        return _left(name, reason)
    evidence = Evidence(
        grade="proved",
        claim="the logits of the last new position and the cache are those of the whole graph",
        method="a slice of the last position, pushed back through operators that commute with taking rows",
        figures={
            "prompt": context.schema.workload.prompt,
            "prefill_flops_before": before.prefill_flops,
            "prefill_flops_after": after.prefill_flops,
            "prefill_flops_saved": saved,
        },
    )
    return Proposal((Specialise(pass_name=name, site=SITE, evidence=evidence, graph="next-token"),))


def _costs(context: Context) -> tuple[Cost, Cost]:
    prompt = context.schema.workload.prompt
    before, after = (
        cost(program, prompt=prompt, element_bytes=4) for program in (context.program, last_token(context.program))
    )
    return before, after


def _left(name: str, reason: str) -> Proposal:
    return Proposal(skipped=(Skipped(pass_name=name, site=SITE, reason=reason),))
