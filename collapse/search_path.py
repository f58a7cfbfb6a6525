"""`collapse-path.json`: the models that a search under a budget went through, of which one is taken. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator

from collapse.canonical import dumps
from collapse.errors import PlanError
from collapse.plan import Layout, Plan, Record, first_problem

SIZES = ("params", "flops", "decode")  # as budgets name them
PATH_FILE = "collapse-path.json"
SUFFIX = ".path.json"  # beside a plan file: plan.json has its path in plan.path.json


class Sizes(Record):
    """Counted in a graph, with the element sizes of the source's files; the figures are those of reports."""

    params: int
    prefill_flops: int
    weight_bytes_per_decode_token: int


class Losses(Record):
    """What was found on held-out text, which chose nothing: KL in nats a token, `regret` and the others as shares."""

    tokens: int
    kl: float
    regret: float
    flips: float
    confident_flips: float


class HeldBound(Record):
    """An upper confidence bound beside what the budget allows; None where text says nothing, or lost beyond the cap."""

    metric: str
    limit: float
    at_most: float | None
    met: bool


class PathPoint(Record):
    """One model: what it is without, how large that leaves it, and what it loses.

    `lost` counts units of each kind, all blocks together; `by_block`, in the free layout alone, those of each block
    that loses some, by its number; `maps` what stands in for sublayers there, by their path. `shares` are what is left
    of the source's sizes, as budgets name them, reckoned from what each block and unit holds; `counted` are the same
    counted in the model's graph, where the search needed that. `kl` is the mean divergence from the source on the text
    that chose, nats a token; `tried` so many models of about this size were compared.
    """

    dropped: tuple[int, ...] = ()
    lost: dict[str, int] = Field(default_factory=dict)
    by_block: dict[str, dict[int, int]] = Field(default_factory=dict)
    maps: dict[str, str] = Field(default_factory=dict)
    shares: dict[str, float]
    counted: dict[str, float] = Field(default_factory=dict)
    kl: float
    tried: int
    held_out: Losses | None = None
    bounds: tuple[HeldBound, ...] = ()
    taken: bool = False

    @field_validator("shares")
    @classmethod
    def _of_all_sizes(cls, shares: dict[str, float]) -> dict[str, float]:
        if missing := [name for name in SIZES if name not in shares]:
            raise ValueError(f"has no {missing[0]}")
        return shares


class SearchPath(Record):
    """The file: points in the order in which the search came to them, with the sizes `before`, those of the source.

    `plan` is the digest of the plan that the search led to; `choosing` and `held_out` are digests of the token ids of
    the text that chose, and of the text that judged.
    """

    format: Literal["collapse-path/1"] = "collapse-path/1"
    plan: str = ""
    layout: Layout
    moves: tuple[str, ...]
    budgets: tuple[str, ...]
    choosing: str
    held_out: str
    before: Sizes
    points: tuple[PathPoint, ...]

    def of(self, plan: Plan) -> SearchPath:
        """Return the path as that of `plan`."""
        return self.model_copy(update={"plan": plan.digest})

    def save(self, file: Path) -> None:
        """Write the path as canonical JSON."""
        file.write_text(dumps(self.model_dump(mode="json")), encoding="utf-8")


def path_beside(plan_file: Path) -> Path:
    """Return where the path of a plan file stands: `plan.json` has it in `plan.path.json`."""
    return plan_file.with_suffix(SUFFIX)


def save_path(found: SearchPath | None, plan_file: Path) -> None:
    """Write the path beside a plan file; where there is none, that of an earlier plan of the name goes."""
    if found is None:
        path_beside(plan_file).unlink(missing_ok=True)
    else:
        found.save(path_beside(plan_file))


def load_path(plan: Plan, plan_file: Path) -> SearchPath | None:
    """Return the path that led to the plan at `plan_file`; None where there is no file of it.

    Raises `PlanError` where the file cannot be read, or is that of another plan.
    """
    file = path_beside(plan_file)
    if not file.exists():
        return None
    try:
        found = SearchPath.model_validate_json(file.read_bytes())
    except OSError as error:
        raise PlanError(f"cannot be read ({error.strerror})", where=str(file)) from None
    except ValidationError as error:
        raise PlanError(first_problem(error), where=str(file), fix="delete it, or make the plan again") from None
    if found.plan != plan.digest:
        reason = f"is the path to the plan {found.plan[:12]}, this one is {plan.digest[:12]}"
        raise PlanError(reason, where=str(file), fix="delete it, or make the plan again")
    return found
