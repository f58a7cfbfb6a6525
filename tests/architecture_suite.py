"""Runs one case through trace, plan, export, verification and reload; every process runs a case once."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.architecture_record import Row, plan_digest
from collapse.checkpoint import Checkpoint
from collapse.errors import CollapseError
from collapse.options import Options
from collapse.pipeline import Result, export, make_plan
from collapse.plan import Plan
from collapse.rewrite.tensors import output_tensors
from collapse.trace import meta_model
from collapse.verdict import Check
from tests.architecture_cases import CASES, TOKENS
from tests.architecture_configs import POSITIONS, VOCABULARY

OPTIONS = Options(prompts=2, new_tokens=8)
POSITION_OFFSET = 2  # rows that some learned position tables have before the first position


@cache
def run(name: str) -> Row:
    """Return what becomes of the case called `name`."""
    case = CASES[name]
    _spare_the_collector()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "model"
        model = case.save(root).__name__
        source = Checkpoint.open(root)
        whole = Row(name=name, kind=case.kind, model=model, parameters=_elements(source))
        try:
            result = export(root, Path(folder) / "output", case.schema, OPTIONS)
        except CollapseError as error:
            where = "" if error.where.startswith(folder) else f"{error.where}: "
            return whole.model_copy(update={"refused": f"{where}{error.what}"})
        return whole.model_copy(update=_figures(source, result))


def _spare_the_collector() -> None:
    """Set what is alive apart: an export collects garbage several times, which else walks all of torch each time."""
    gc.collect()
    gc.freeze()


def plan_of(name: str, root: Path) -> Plan:
    """Write the case's checkpoint into `root`, and decide only."""
    CASES[name].save(root)
    return make_plan(root, CASES[name].schema, OPTIONS).plan


def _figures(source: Checkpoint, result: Result) -> dict[str, object]:
    checks = {check.name: check for check in result.report.verified.checks}
    graph = checks["graph: prefill"].figures
    greedy = checks["greedy"].figures
    return {
        "removed": removed_by_pass(source, result.plan),
        "prefill_difference": _difference(checks.get("logits: prefill")),
        "cache_difference": _difference(checks.get("logits: cache")),
        "greedy_tokens": greedy["tokens"],
        "greedy_equal": greedy["tokens"] == int(greedy["prompts"]) * OPTIONS.new_tokens,
        "graph_positions": graph["positions"],
        "graph_bit_equal": graph["bit_equal_positions"],
        "plan": plan_digest(result.plan),
    }


def removed_by_pass(source: Checkpoint, plan: Plan) -> dict[str, int]:
    """Return how many elements of the files go with each pass's rewrites, in the plan's order."""
    removed: dict[str, int] = {}
    left = _elements(source)
    for count, rewrite in enumerate(plan.rewrites, start=1):
        after = sum(
            t.numel for t in output_tensors(source, plan.model_copy(update={"rewrites": plan.rewrites[:count]}))
        )
        removed[rewrite.pass_name] = removed.get(rewrite.pass_name, 0) + left - after
        left = after
    return removed


def elements_beyond_the_schema(name: str) -> int:
    """Return how many elements no input of the case reaches, by the sizes of axes alone: the table has no other 53."""
    case = CASES[name]
    kept = set(TOKENS) | set(_named_ids(case.config.to_dict()))
    total = 0
    for parameter in meta_model(case.config).parameters():
        rows = parameter.shape[0]
        gone = VOCABULARY - len(kept) if rows == VOCABULARY else 0
        if rows in {POSITIONS, POSITIONS + POSITION_OFFSET}:
            gone = POSITIONS - case.max_tokens
        total += gone * (parameter.numel() // rows)
    return total


def _named_ids(config: Mapping[str, Any]) -> Iterator[int]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _named_ids(value)
        elif str(key).endswith(("_token_id", "_token_index")) and isinstance(value, int):
            yield value


def _elements(source: Checkpoint) -> int:
    return sum(info.numel for info in source.tensors.values())


def _difference(check: Check | None) -> float | None:
    return None if check is None else float(check.figures["max_abs_diff"])
