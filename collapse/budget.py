"""What a user is willing to lose, and what is to be saved for it: `kl<=0.02,flips<=2%,params=-30%`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, get_args

from collapse.errors import PlanError

Kind = Literal["loss", "size"]
Loss = Literal["regret", "bits", "kl", "flips", "confident-flips"]

RATES = ("flips", "confident-flips")  # shares of tokens, so at most 100 %
PERCENT = ("regret", *RATES)  # written in per cent
LOSSES: tuple[str, ...] = get_args(Loss)
SIZES = ("params", "flops", "decode")
EXAMPLE = "write for example kl<=0.02, regret<=1%, confident-flips<=1% or params=-30%"
_FORM = re.compile(r"([a-z-]+)\s*(<=|=)\s*(-?\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)\s*(%?)")


@dataclass(frozen=True)
class Budget:
    """One bound: on a loss, which must not exceed `limit`, or on a size, which should change by `limit`.

    `limit` is in nats per token for `kl`, in bits per byte for `bits`, and a fraction for the others: 0.01 is 1 %,
    -0.3 is 30 % less. `str` gives the form that `parse_budgets` reads.
    """

    metric: str
    limit: float
    kind: Kind

    def __str__(self) -> str:
        if self.kind == "size":
            return f"{self.metric}={_percent(self.limit)}"
        return f"{self.metric}<={_percent(self.limit) if self.metric in PERCENT else repr(self.limit)}"


def parse_budgets(text: str) -> tuple[Budget, ...]:
    """Return the budgets of a comma-separated list; raises `PlanError` for a bad one or a metric named twice."""
    budgets = tuple(parse_budget(part) for part in text.split(","))
    names = [budget.metric for budget in budgets]
    for budget in budgets:
        if names.count(budget.metric) > 1:
            raise PlanError(f"{budget.metric} is given more than once", where=f"budget {text!r}", fix="give it once")
    return budgets


def format_budgets(budgets: Iterable[Budget]) -> str:
    """Return the text form of several budgets."""
    return ",".join(map(str, budgets))


def parse_budget(text: str) -> Budget:
    """Return the budget that `text` says; raises `PlanError` with what is wrong with it."""
    where = f"budget {text.strip()!r}"
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise PlanError("is not METRIC<=LIMIT or METRIC=-PERCENT%", where=where, fix=EXAMPLE)
    metric, relation, number, percent = match.groups()
    if metric not in (*LOSSES, *SIZES):
        raise PlanError(f"unknown metric {metric}", where=where, fix=f"choose among {', '.join((*LOSSES, *SIZES))}")
    limit = float(Decimal(number) / 100 if percent else Decimal(number))
    kind: Kind = "size" if metric in SIZES else "loss"
    if problem := _problem(metric, kind, relation, limit, bool(percent)):
        raise PlanError(problem, where=where, fix=EXAMPLE)
    return Budget(metric, limit, kind)


def _problem(metric: str, kind: Kind, relation: str, limit: float, percent: bool) -> str | None:
    """Return what is wrong with a budget whose form is right, or None."""
    if kind == "size":
        sound = relation == "=" and percent and -1 < limit < 0
        return None if sound else f"{metric} is a size and takes a cut between -100% and 0%, as in {metric}=-30%"
    if relation != "<=":
        return f"{metric} is a loss and takes an upper limit, as in {metric}<={'1%' if metric in PERCENT else '0.02'}"
    if percent and metric not in PERCENT:
        return f"{metric} is in {'nats per token' if metric == 'kl' else 'bits per byte'}, not in per cent"
    if not 0 <= limit < float("inf") or (metric in RATES and limit >= 1):
        return f"the limit of {metric} must be {'at least 0% and below 100%' if metric in RATES else 'at least 0'}"
    return None


def _percent(fraction: float) -> str:
    return f"{(Decimal(repr(fraction)) * 100).normalize():f}%"
