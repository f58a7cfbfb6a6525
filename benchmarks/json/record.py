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
    """One property on the same prompts: `lost` are those where the source alone has it, `gained` the model alone.

    `p_value` is of the exact sign test: the probability of at least as many `lost` among the prompts on which they
    differ, if either were as likely to fail there.
    """

    lost: int
    gained: int
    p_value: float


class Judgement(Record):
    """Whether a model breaks brackets more often than its source, whatever its KL.

    It does where one of two tests says so, each at half of `alpha`: closing what is not open (`matched`), and not
    having closed everything by its own kind in the end (`balanced`). A source that seldom comes to an end says little
    by the second, and one that never closes a wrong bracket says most by the first.
    """

    matched: Paired
    balanced: Paired
    alpha: float
    verdict: Verdict


class Entry(Record):
    """One model. `matched` and `balanced` have a 1 for each prompt where it did, in order; the source is not judged."""

    name: str
    parameters: int
    bytes: int
    shares: Shares
    matched: str
    balanced: str
    losses: Totals | None = None
    judgement: Judgement | None = None


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


def judge(source: Sequence[Outcome], model: Sequence[Outcome], alpha: float = ALPHA) -> Judgement:
    """Judge a model by the source's outcomes on the same prompts."""
    found = {name: paired(marks(source, name), marks(model, name)) for name in ("matched", "balanced")}
    breaks = min(one.p_value for one in found.values()) <= alpha / len(found)
    return Judgement(**found, alpha=alpha, verdict="breaks brackets" if breaks else "no more than the source")


def paired(source: str, model: str) -> Paired:
    """Compare the marks of a source and a model."""
    pairs = list(zip(source, model, strict=True))
    lost, gained = pairs.count(("1", "0")), pairs.count(("0", "1"))
    differing = lost + gained
    p = float(binomtest(lost, differing, 0.5, alternative="greater").pvalue) if differing else 1.0
    return Paired(lost=lost, gained=gained, p_value=p)


def marks(outcomes: Sequence[Outcome], name: str) -> str:
    """Return a digit for each outcome: 1 where it has the property of this name."""
    return "".join(str(int(getattr(one, name))) for one in outcomes)
