"""`scripts/bench json SOURCE MODEL...`: whether finished models still write JSON, and keep brackets in balance."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Let every model complete JSON records that were cut, and write the record."""
    from benchmarks.json.run import main as run

    return run(arguments)
