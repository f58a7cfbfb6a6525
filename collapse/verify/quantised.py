"""Says in the verdict how quantised weights were run."""

from __future__ import annotations

from collapse.checkpoint import Checkpoint
from collapse.source_model import Way
from collapse.verdict import Check

WAYS = {
    "transformers": "transformers, which dequantises them on the CPU",
    "reference": "collapse's own reference; the kernels that serve them were not run",
    "plain": "nobody: none is left",
}


def quantised_checks(source: Checkpoint, before: Way, after: Way) -> tuple[Check, ...]:
    """Return who turned the quantised weights of source and output into fp32; nothing for a plain source."""
    if source.quantisation is None:
        return ()
    ways = {"source": before, "output": after}
    said = "; ".join(f"{whose}'s by {WAYS[way]}" for whose, way in ways.items())
    detail = f"both by {WAYS[before]}" if before == after else said
    groups = source.quantisation.groups
    figures: dict[str, float | int | str] = {"groups": len(groups), "method": source.quantisation.scheme.method, **ways}
    return (Check(name="quantised weights", passed=True, detail=f"made numbers {detail}", figures=figures),)
