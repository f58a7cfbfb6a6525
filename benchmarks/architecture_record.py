"""The record of what the architecture suite found: `reports/architectures.json`, one entry a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter, ValidationError

from benchmarks.results import ROOT
from collapse.canonical import digest, dumps
from collapse.errors import CollapseError
from collapse.plan import Plan, Record, first_problem

RECORD = ROOT / "reports" / "architectures.json"
FIGURES = 3  # significant digits of a measured figure that the digest of a plan counts


class Row(Record):
    """What became of one tiny model: verified with its figures, or refused with the reason.

    `parameters` counts the elements in the source's files, `removed` those that each pass with a rewrite took. The
    differences are the largest between logits of source and output, by check; `greedy_equal` says whether all
    `greedy_tokens` were equal. Of the positions at which the rewritten graph was compared with the output,
    `graph_bit_equal` were so.
    """

    name: str
    kind: str
    model: str
    parameters: int
    removed: dict[str, int] = Field(default_factory=dict)
    prefill_difference: float | None = None
    cache_difference: float | None = None
    greedy_tokens: int = 0
    greedy_equal: bool | None = None
    graph_positions: int = 0
    graph_bit_equal: int = 0
    plan: str | None = None
    refused: str | None = None

    @property
    def total(self) -> int:
        """Elements that all passes took."""
        return sum(self.removed.values())

    def stable(self) -> dict[str, Any]:
        """Return what does not depend on the machine's arithmetic: all but differences and bit-equal counts."""
        return self.model_dump(exclude={"prefill_difference", "cache_difference", "graph_bit_equal"})


def plan_digest(plan: Plan) -> str:
    """Return the digest of what was decided: without the versions that did, and with measured figures rounded."""
    return digest(_rounded(plan.model_dump(mode="json", by_alias=True, exclude={"created_by"})))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.{FIGURES}g}") if isinstance(value, float) else value


def load(path: Path = RECORD) -> tuple[Row, ...]:
    """Return the recorded rows; raises `CollapseError` where the record cannot be read."""
    try:
        return TypeAdapter(tuple[Row, ...]).validate_json(path.read_bytes())
    except OSError as error:
        raise CollapseError(f"cannot be read ({error.strerror})", where=path.name) from None
    except ValidationError as error:
        raise CollapseError(first_problem(error), where=path.name, fix="run scripts/architectures") from None


def save(rows: Sequence[Row], path: Path = RECORD) -> None:
    """Write the rows, in the order of the suite."""
    path.write_text(dumps([row.model_dump(mode="json") for row in rows]), encoding="utf-8")
