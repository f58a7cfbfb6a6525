"""`scripts/architectures`: run the architecture suite, and write what it found to reports/ and docs/."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.architecture_record import Row, load, save
from benchmarks.results import ROOT
from collapse.passes import PASSES

DOCS = ROOT / "docs" / "architectures.md"
HEADER = ("case", "class", "parameters", "removed", "largest logit difference", "greedy equal", "graph bit-equal")
RULES = ("---", "---", "--:", "---", "--:", "---", "--:")
TEXT = """\
# Architectures

Tiny models with random weights, built from transformers' own config classes. Each goes through the whole of
`collapse export` under a schema that states half of the token ids and at most 24 tokens, and is reloaded with plain
transformers. `scripts/architectures` writes this page and `reports/architectures.json`; `tests/test_architectures.py`
runs the same suite and compares.

*removed* is the share of the elements in the files, by pass; after *graph* stand passes that changed the graph alone.
*largest logit difference* is that between source and output over the kept ids, in prefill and through the cache (a
dash: the model has none). *graph bit-equal* counts the positions at which the rewritten graph, run in memory on the
source's weights, and the output from disk give the same bits.

{verified}

## Refused

Each refusal is one line on the command line; nothing is published.

{refused}
"""


def render(rows: Sequence[Row]) -> str:
    """Return the page: a table of the verified models and one of the refused."""
    verified = [_verified(row) for row in rows if row.refused is None]
    refused = [(row.name, f"`{row.model}`", row.refused) for row in rows if row.refused is not None]
    tables = {
        "verified": _table(HEADER, RULES, verified),
        "refused": _table(("case", "class", "reason"), ("---", "---", "---"), refused),
    }
    return TEXT.format(**tables)


def _verified(row: Row) -> tuple[str, ...]:
    differences = " / ".join("–" if d is None else f"{d:.1g}" for d in (row.prefill_difference, row.cache_difference))
    equal = f"yes ({row.greedy_tokens})" if row.greedy_equal else "up to a near tie"
    bits = f"{row.graph_bit_equal} of {row.graph_positions}"
    return (row.name, f"`{row.model}`", f"{row.parameters}", _removed(row), differences, equal, bits)


def _removed(row: Row) -> str:
    """Return the share of all passes, then of each; a pass that took no element changed the graph alone."""
    counts = {one.name: row.removed[one.name] for one in PASSES if one.name in row.removed}
    parts = [f"{name} {count / row.parameters:.1%}" for name, count in counts.items() if count]
    edits = [name for name, count in counts.items() if not count]
    whole = [f"{row.total / row.parameters:.1%}" + (f": {', '.join(parts)}" if parts else "")]
    return "; ".join(whole + ([f"graph: {', '.join(edits)}"] if edits else []))


def _table(header: Sequence[str], rules: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (header, rules, *rows))


def main(arguments: Sequence[str]) -> int:
    """Run the suite, or those cases of it that are named, and write record and page."""
    parser = argparse.ArgumentParser(prog="scripts/architectures", description=__doc__)
    parser.add_argument("cases", nargs="*", help="run just these, and keep what is recorded of the others")
    options = parser.parse_args(arguments)
    from tests.architecture_cases import CASES  # transformers' messages come up with these
    from tests.architecture_suite import run

    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; the cases are {', '.join(CASES)}")
    known = {row.name: row for row in load()} if options.cases else {}
    for name in options.cases or CASES:
        print(name, file=sys.stderr)
        known[name] = run(name)
    rows = [known[name] for name in CASES if name in known]
    save(rows)
    DOCS.write_text(render(rows), encoding="utf-8")
    return 0
