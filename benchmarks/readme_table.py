"""`scripts/readme_table`: rewrite the table in README.md from `reports/results.json`. Nothing is typed in by hand."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import results
from collapse.errors import CollapseError

README = results.ROOT / "README.md"
BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
EMPTY = "No run is recorded yet; `scripts/bench collect out/smollm2-log` records the one that `scripts/demo` made."
HEADER = (
    "model", "schema", "parameters", "weights on disk", "prefill FLOPs", "decode FLOPs a token",
    "weight bytes read a token", "verified",
)  # fmt: skip
NUMERIC = range(2, 7)


def render(rows: Sequence[results.Result]) -> str:
    """Return the Markdown table, one line a result, each figure as before, after and change."""
    if not rows:
        return EMPTY
    rules = ["--:" if column in NUMERIC else "---" for column in range(len(HEADER))]
    return "\n".join(_line(cells) for cells in (HEADER, rules, *map(_cells, rows)))


def rewrite(text: str, table: str) -> str:
    """Return `text` with what stands between the two markers replaced; raises `CollapseError` without them."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise CollapseError(f"no {BEGIN} ... {END}", where="README.md", fix="put the markers back")
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def shortened(value: float) -> str:
    """Return a number with three significant digits and a decimal prefix: 134515008 becomes `135M`."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        digits = f"{value:.3g}"
        if abs(float(digits)) < 1000:
            return f"{float(digits):g}{prefix}"
        value /= 1000
    return f"{value:.3g}E"


def change(before: int, after: int) -> str:
    """Return the change in percent with one digit, or a dash where there was nothing."""
    return f"{100 * (after - before) / before:+.1f} %".replace("-", "−").replace("+0.0", "0.0") if before else "–"


def _cells(row: results.Result) -> tuple[str, ...]:
    figures = (
        _figure(row.params_before, row.params_after),
        _figure(row.bytes_before, row.bytes_after, "B"),
        _figure(row.prefill_flops_before, row.prefill_flops_after),
        _figure(row.decode_flops_per_token_before, row.decode_flops_per_token_after),
        _figure(row.weight_bytes_per_decode_token_before, row.weight_bytes_per_decode_token_after, "B"),
    )
    return (row.model, f"`{row.schema_type}`", *figures, "yes" if row.verified else "no")


def _figure(before: int, after: int, unit: str = "") -> str:
    return f"{shortened(before)}{unit} → {shortened(after)}{unit} ({change(before, after)})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str]) -> int:
    """Rewrite README.md, or with `--check` only say whether it is up to date (exit status 1 when not)."""
    parser = argparse.ArgumentParser(prog="scripts/readme_table", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when README is out of date")
    parser.add_argument("--readme", type=Path, default=README, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    old = options.readme.read_text(encoding="utf-8")
    new = rewrite(old, render(results.load()))
    if options.check:
        return int(old != new)
    options.readme.write_text(new, encoding="utf-8")
    return 0
