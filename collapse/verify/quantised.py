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
    same = f"source and output by {WAYS[before]}"
    detail = same if before == after else "; ".join(f"{side} by {WAYS[way]}" for side, way in ways.items())
    groups = source.quantisation.groups
    figures: dict[str, float | int | str] = {"groups": len(groups), "method": source.quantisation.scheme.method, **ways}
    return (Check(name="quantised weights", passed=True, detail=f"read as numbers: {detail}", figures=figures),)
