"""`scripts/bench peers MODEL`: what other methods lose at the same size, each by its own paper's one-shot criterion."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Run what the record lacks of the grid of methods, shares, texts and vocabularies."""
    from benchmarks.peers.run import main as run

    return run(arguments)
