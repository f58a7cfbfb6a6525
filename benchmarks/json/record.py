"""The record of the JSON benchmark, and the rule by which a model breaks brackets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from scipy.stats import binomtest

from benchmarks.json.complete import Outcome
from benchmarks.losses import Totals
from collapse.plan import Record

Verdict = Literal["breaks brackets", "no more than the source"]
ALPHA = 0.05


class Shares(Record):
    """Shares of continuations; `balanced` are matched and closed. New tokens are a mean."""

    grammar: float
    matched: float
    closed: float
    balanced: float
    parses: float
    new_tokens: float

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Shares:
        """Return the shares of some outcomes."""
        return cls(
            **{name: sum(float(getattr(o, name)) for o in outcomes) / len(outcomes) for name in cls.model_fields}
        )


class Paired(Record):
    """Brackets on the same prompts: `lost` are balanced by the source alone, `gained` by the model alone.

    `p_value` is of the exact sign test: the probability of at least as many `lost` among the prompts on which they
    differ, if either were as likely to fail there. At most `alpha`, the model breaks brackets, whatever its KL.
    """

    lost: int
    gained: int
    p_value: float
    alpha: float
    verdict: Verdict


class Entry(Record):
    """One model. `balanced` has a 1 for each prompt that it balanced, in order; the source has no `paired`."""

    name: str
    parameters: int
    bytes: int
    shares: Shares
    balanced: str
    losses: Totals | None = None
    paired: Paired | None = None


class JsonReport(Record):
    """All models on the same prompts. Losses are on the whole records, whose beginnings are the prompts."""

    source: str
    digest: str
    prompts: int
    prompt_tokens: tuple[int, ...]
    new_tokens: int
    prompts_by_source: dict[str, int]
    text: dict[str, Any]
    entries: tuple[Entry, ...]
    machine: dict[str, str | int]


def paired(source: Sequence[Outcome], model: Sequence[Outcome], alpha: float = ALPHA) -> Paired:
    """Judge a model by the source's outcomes on the same prompts."""
    pairs = [(one.balanced, other.balanced) for one, other in zip(source, model, strict=True)]
    lost, gained = pairs.count((True, False)), pairs.count((False, True))
    differing = lost + gained
    p = float(binomtest(lost, differing, 0.5, alternative="greater").pvalue) if differing else 1.0
    verdict: Verdict = "breaks brackets" if p <= alpha else "no more than the source"
    return Paired(lost=lost, gained=gained, p_value=p, alpha=alpha, verdict=verdict)


def marks(outcomes: Sequence[Outcome]) -> str:
    """Return a digit for each outcome: 1 where brackets are balanced."""
    return "".join(str(int(one.balanced)) for one in outcomes)
