"""The difference between two models in figures, for a pull request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collapse.analysis.config_cost import config_only, cost_of_config
from collapse.errors import CollapseError
from collapse.report.data import Figures, Report, modules_of
from collapse.report.folding import fold, unfold
from collapse.report.text import FIGURES, change, exact, short, table

REPORT = "report.json"
DEFAULT_PROMPT = 512
SHOWN = ("params", "prefill_flops", "decode_flops_per_token")


@dataclass(frozen=True)
class Side:
    """One model: its name, the prompt that its figures are for, and the figures of it and of its modules."""

    name: str
    prompt: int
    figures: Figures
    modules: Mapping[str, Figures]


def load_side(path: str | Path, *, prompt: int) -> Side:
    """Read one side of a comparison.

    A report.json, or a directory that holds one, stands for the collapsed model; its prompt is the report's.
    Any other model directory is counted from its config for `prompt` tokens. Raises `CollapseError` for a plan,
    which holds no figures, and for anything else.
    """
    place = Path(path)
    report = _report_file(place)
    if report is not None:
        return _from_report(Report.load(report), place)
    if place.is_dir() or place.name == "config.json":
        return _from_config(place, prompt)
    raise CollapseError("no model directory and no report.json", where=str(path), fix="give one of the two")


def load_sides(base: str | Path, new: str | Path, *, prompt: int | None = None) -> tuple[Side, Side]:
    """Read both sides of a comparison.

    A side that has no report is counted for `prompt` tokens; by default for those of the other side's report, else
    for 512. Raises `CollapseError` where a side cannot be read, or where both are counted for different prompts.
    """
    reports = [report for path in (base, new) if (report := _report_file(Path(path))) is not None]
    if prompt is None:
        prompt = Report.load(reports[0]).workload.prompt if reports else DEFAULT_PROMPT
    sides = load_side(base, prompt=prompt), load_side(new, prompt=prompt)
    check_comparable(*sides)
    return sides


def _report_file(place: Path) -> Path | None:
    """Return the report.json that `place` is or holds; None for a model."""
    report = place / REPORT if place.is_dir() else place
    return report if report.is_file() and report.suffix == ".json" and report.name != "config.json" else None


def _from_report(report: Report, place: Path) -> Side:
    modules = {path: item.after for item in report.modules for path in unfold(item.path) if item.after}
    name = place.name if place.is_dir() else f"{report.source.name}, collapsed"
    return Side(name, report.workload.prompt, report.after, modules)


def _from_config(place: Path, prompt: int) -> Side:
    found = cost_of_config(config_only(place), prompt=prompt)
    modules = modules_of(found.cost, found.cost, found.prefill)
    plain = {path: item.before for item in modules for path in unfold(item.path)}
    folder = place if place.is_dir() else place.parent
    return Side(folder.resolve().name, prompt, Figures.of(found.cost), plain)


def check_comparable(base: Side, new: Side) -> None:
    """Raise `CollapseError` where the two sides are counted for different prompts."""
    if base.prompt != new.prompt:
        what = f"{base.name} is counted for {base.prompt} prompt tokens, {new.name} for {new.prompt}"
        raise CollapseError(what, where="report", fix="give --prompt with the number of the report")


def to_json(base: Side, new: Side) -> dict[str, Any]:
    """Return both sides, their difference, and the modules that differ, as plain JSON values."""
    before, after = base.figures.model_dump(), new.figures.model_dump()
    return {
        "base": {"name": base.name, **before},
        "new": {"name": new.name, **after},
        "difference": {name: after[name] - before[name] for name in before},
        "prompt": base.prompt,
        "modules": [
            {"path": path, "count": count, "base": left.model_dump(), "new": right.model_dump()}
            for path, count, left, right in changed_modules(base, new)
        ],
    }


def changed_modules(base: Side, new: Side) -> list[tuple[str, int, Figures, Figures]]:
    """Return path, number, and both figures of each module that differs, equal consecutive layers folded."""
    paths = dict.fromkeys((*base.modules, *new.modules))
    pairs = {path: (base.modules.get(path, Figures()), new.modules.get(path, Figures())) for path in paths}
    folded = fold(pairs)
    return [(item.path, item.count, *item.value) for item in folded if item.value[0] != item.value[1]]


def to_markdown(base: Side, new: Side) -> str:
    """Return the comparison as Markdown, modules folded away behind a summary."""
    rows = []
    for name, words in FIGURES.items():
        before, after = getattr(base.figures, name), getattr(new.figures, name)
        rows.append(
            (
                words,
                exact(before),
                exact(after),
                f"{after - before:+,}" if before != after else "0",
                change(before, after),
            )
        )
    parts = [f"### FLOP diff: {base.name} -> {new.name}", table(("", "base", "new", "difference", "change"), rows)]
    changed = changed_modules(base, new)
    if base.figures == new.figures and not changed:
        parts.append("No figure differs.")
    if changed:
        parts += [
            f"<details><summary>{len(changed)} modules differ (equal layers folded)</summary>",
            _module_table(changed),
            "</details>",
        ]
    parts.append(f"One sequence, {base.prompt} prompt tokens; a multiply-accumulate is 2 FLOPs; head once a prefill.")
    return "\n\n".join(parts) + "\n"


def _module_table(changed: list[tuple[str, int, Figures, Figures]]) -> str:
    rows = []
    for path, count, left, right in changed:
        cells = (f"{short(getattr(left, name))} -> {short(getattr(right, name))}" for name in SHOWN)
        rows.append((f"`{path}`", str(count), *cells))
    return table(("module", "times", "parameters", "prefill FLOPs", "decode FLOPs per token"), rows)
