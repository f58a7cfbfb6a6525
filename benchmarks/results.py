"""The record of what exports achieved: `reports/results.json`, one entry a model and schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from collapse.canonical import dumps
from collapse.errors import CollapseError
from collapse.plan import Record, first_problem

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "reports" / "results.json"


class Result(Record):
    """What one export did. FLOPs are those of the schema's workload, decode figures are per new token."""

    model: str
    schema_type: str
    params_before: int
    params_after: int
    bytes_before: int
    bytes_after: int
    prefill_flops_before: int
    prefill_flops_after: int
    decode_flops_per_token_before: int
    decode_flops_per_token_after: int
    weight_bytes_per_decode_token_before: int
    weight_bytes_per_decode_token_after: int
    verified: bool

    @classmethod
    def from_report(cls, report: dict[str, Any], *, model: str) -> Result:
        """Take the figures out of an export's report.json; raises `CollapseError` naming a missing field."""
        try:
            measures = [name.removesuffix("_before") for name in cls.model_fields if name.endswith("_before")]
            figures = {f"{name}_{when}": report[when][name] for name in measures for when in ("before", "after")}
            return cls(
                model=model, schema_type=report["schema"]["type"], verified=_is_verified(report["verified"]), **figures
            )
        except (KeyError, TypeError) as error:
            raise CollapseError(f"no field {error}", where="report.json", fix="export again") from None
        except ValidationError as error:
            raise CollapseError(first_problem(error), where="report.json", fix="export again") from None


def _is_verified(value: Any) -> bool:
    return value is True or value == "verified" or (isinstance(value, dict) and value.get("status") == "verified")


def load(path: Path = RESULTS) -> tuple[Result, ...]:
    """Return the recorded results, or none where there is no record yet."""
    if not path.is_file():
        return ()
    try:
        return TypeAdapter(tuple[Result, ...]).validate_json(path.read_bytes())
    except ValidationError as error:
        raise CollapseError(first_problem(error), where=path.name) from None


def save(results: Sequence[Result], path: Path = RESULTS) -> None:
    """Write the results in order of model and schema."""
    ordered = sorted(results, key=lambda result: (result.model, result.schema_type))
    path.write_text(dumps([result.model_dump(mode="json") for result in ordered]), encoding="utf-8")


def read_report(folder: Path) -> dict[str, Any]:
    """Return the report.json of an export's output directory; raises `CollapseError` where there is none."""
    try:
        value = json.loads((folder / "report.json").read_bytes())
    except (OSError, ValueError) as error:
        raise CollapseError(
            f"no readable report.json ({error})", where=str(folder), fix="give the output of an export"
        ) from None
    return dict(value)
