"""A certificate: upper confidence bounds on what a plan loses, each beside the budget it has to meet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Literal

from pydantic import Field

from collapse.budget import Budget, Loss
from collapse.certify.losses import SequenceLoss
from collapse.certify.metrics import METRICS, Design, units_of, upper_bound
from collapse.errors import PlanError
from collapse.plan import Evidence, Record

Procedure = Literal["fixed-sequence", "bonferroni"]
Figures = dict[str, float | int | str]


class Bound(Record):
    """One metric: what was found, what it is at most, and what it may be."""

    metric: Loss
    limit: float
    estimate: float | None = Field(description="on the held-out text, losses counted up to the cap")
    upper: float | None = Field(description="None where the text says nothing about the metric")
    cap: float = Field(description="of one sequence's loss, per token of the length")
    clipped: int = Field(description="sequences beyond the cap")

    @property
    def met(self) -> bool:
        """Whether the bound is within the limit and no sequence was counted as less than it lost."""
        return self.at_most is not None and self.at_most <= self.limit

    @property
    def at_most(self) -> float | None:
        """The bound on the loss itself; None where a sequence lost more than was counted of it, or nothing is known."""
        return None if self.clipped else self.upper

    def __str__(self) -> str:
        return str(Budget(self.metric, self.limit, "loss"))


class Certificate(Record):
    """What is known of one plan's losses from held-out text that chose nothing.

    Each bound is wrong with a probability of at most `delta`, shared in equal parts (Bonferroni) by `tries` plans that
    were tried on the same text. That every budget is met, as `met` says, is then wrong no more often: to say so all of
    their tests must agree, so one budget that is not met is enough to be found out by its own (the intersection-union
    test, Berger 1982). That all bounds hold together is not said. `rank` is the plan's place in a fixed sequence of
    tests, which shares nothing: there `met` is certified, while the bounds themselves are not those of all plans
    together.
    """

    bounds: tuple[Bound, ...] = Field(min_length=1)
    delta: float
    method: str
    sequences: int
    tokens: int
    length: int
    lost_mass: float = Field(description="the source's probability of ids that were cut, mean per token")
    split: str = Field(description="digest of the held-out sequences")
    tries: int = Field(default=1, ge=1)
    rank: int = Field(default=1, ge=1)

    @property
    def met(self) -> bool:
        """Whether every bound is within its limit."""
        return all(bound.met for bound in self.bounds)

    def to_evidence(self) -> Evidence:
        """Return it as evidence: *certified* where every budget is met, else *measured*."""
        return Evidence(
            grade="certified" if self.met else "measured",
            claim=_claim(self),
            method=_method(self),
            figures=_figures(self),
        )


def certify(
    sequences: Sequence[SequenceLoss], budgets: Iterable[Budget], design: Design, *, tries: int = 1
) -> Certificate:
    """Bound every loss budget's metric on held-out sequences, which are assumed exchangeable with those to come.

    Args:
        sequences: in any order; nothing depends on it.
        budgets: those of sizes are no matter of statistics and are left out.
        design: what was fixed before.
        tries: plans that are tried on the same sequences, of which any may be picked.

    Raises `PlanError` without a loss budget, and where sequences do not fit the design.
    """
    losses = [budget for budget in budgets if budget.kind == "loss"]
    if not losses or tries < 1:
        raise PlanError("there is no budget of a loss to certify", fix="give one, for example kl<=0.02")
    delta = design.delta / tries
    tokens = sum(sequence.tokens for sequence in sequences)
    return Certificate(
        bounds=tuple(_bound(sequences, budget, design, delta) for budget in losses),
        delta=design.delta,
        method=design.method,
        sequences=len(sequences),
        tokens=tokens,
        length=design.length,
        lost_mass=sum(sequence.lost_mass for sequence in sequences) / tokens,
        split=design.split,
        tries=tries,
    )


def learn_then_test(
    plans: Iterable[Sequence[SequenceLoss]],
    budgets: Iterable[Budget],
    design: Design,
    procedure: Procedure = "fixed-sequence",
    tries: int = 1,
) -> tuple[Certificate, ...]:
    """Certify several plans on the same text, so that a false one is certified with probability at most delta.

    Angelopoulos et al. (2021), "Learn then test". `fixed-sequence`: plans go from the mildest to the hardest, an
    order that the text did not choose, each at full delta, up to the first that fails; later ones are not asked
    for. `bonferroni`: every plan at delta / `tries`, in any order. Returns a certificate for each plan tested, in
    order; those whose `met` is true are certified (of a fixed sequence: all but a last one that failed).

    Args:
        plans: the losses of each plan; taken one by one, so that they can be computed as they are asked for.
        tries: number of plans, for `bonferroni` only.

    Raises `PlanError` as `certify` does, and where there are more plans than `tries`.
    """
    shared = tries if procedure == "bonferroni" else 1
    wanted, tested = tuple(budgets), list[Certificate]()
    for sequences in plans:
        if procedure == "bonferroni" and len(tested) == tries:
            raise PlanError(f"there are more plans than the {tries} tries that share delta", fix="say how many first")
        certificate = certify(sequences, wanted, design, tries=shared)
        rank = len(tested) + 1 if procedure == "fixed-sequence" else 1
        tested.append(certificate.model_copy(update={"rank": rank}))
        if procedure == "fixed-sequence" and not certificate.met:
            break
    return tuple(tested)


def _bound(sequences: Sequence[SequenceLoss], budget: Budget, design: Design, delta: float) -> Bound:
    metric = METRICS[budget.metric]
    units = units_of(sequences, metric, design)
    return Bound(
        metric=metric.name,
        limit=budget.limit,
        estimate=units.estimate,
        upper=upper_bound(units, metric, design, delta),
        cap=units.cap,
        clipped=units.clipped,
    )


def _claim(certificate: Certificate) -> str:
    """What is promised where it is met; else what was seen."""
    where = f"text like the held-out sequences, up to {certificate.length} tokens each"
    if not certificate.met:
        seen = ", ".join(f"{b.metric} {b.estimate:.3g}" for b in certificate.bounds if b.estimate is not None)
        failed = ", ".join(str(b) for b in certificate.bounds if not b.met)
        return f"on {certificate.sequences} held-out sequences: {seen or 'nothing'}; not shown for {where}: {failed}"
    capped = [b for b in certificate.bounds if not (METRICS[b.metric].is_rate and b.cap == 1)]
    said = ", ".join(f"{b.metric} up to {b.cap:g} {METRICS[b.metric].unit} per token of that length" for b in capped)
    counted = f", where a sequence counts with its {said}" if capped else ""
    budgets = ", ".join(str(bound) for bound in certificate.bounds)
    return f"on average over {where}{counted}: {budgets}, with confidence {1 - Decimal(repr(certificate.delta))}"


def _method(certificate: Certificate) -> str:
    shared = f" / {certificate.tries}" if certificate.tries > 1 else ""
    parts = [
        f"{certificate.method} bound over {certificate.sequences} sequences that chose nothing",
        f"{'each ' if len(certificate.bounds) > 1 else ''}at delta{shared}",
    ]
    if len(certificate.bounds) > 1:
        parts.append("all budgets together at the same (intersection-union)")
    if certificate.tries > 1:
        parts.append(f"{certificate.tries} plans share the text (Bonferroni)")
    if certificate.rank > 1:
        parts.append(f"plan {certificate.rank} of a fixed sequence of tests, all before it met (learn then test)")
    return "; ".join(parts)


def _figures(certificate: Certificate) -> Figures:
    figures: Figures = {
        name: getattr(certificate, name)
        for name in ("delta", "method", "sequences", "tokens", "length", "lost_mass", "split", "tries", "rank")
    }
    for bound in certificate.bounds:
        name = bound.metric.replace("-", "_")
        values = {"estimate": bound.estimate, "at_most": bound.at_most, "limit": bound.limit, "cap": bound.cap}
        figures |= {f"{name}_{key}": value for key, value in values.items() if value is not None}
        figures[f"{name}_clipped"] = bound.clipped
    return figures
