"""Channels that can go as a unit, as facts: which rows of which tensors belong to which unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from collapse.checkpoint import Checkpoint
from collapse.plan import Axis, Evidence, IndexSet, Narrow
from collapse.program import Program

Kind = Literal["neurons", "kv-groups"]


@dataclass(frozen=True)
class Part:
    """An axis of `size` rows, the same in each of `axes`; unit `u` has rows `start + u * width` on, in each range.

    `ranges` are pairs (start, width): a fused tensor has several.
    """

    axes: tuple[Axis, ...]
    size: int
    ranges: tuple[tuple[int, int], ...]

    def rows(self, units: Iterable[int]) -> IndexSet:
        """Return the rows of some units."""
        chosen = list(units)
        return IndexSet.of(
            start + unit * width + row for start, width in self.ranges for unit in chosen for row in range(width)
        )


@dataclass(frozen=True)
class Channels:
    """`size` units of the module `site` that can go one by one.

    `counts` are the numbers by which a config may know them: what it says now -> how many of that are one unit.
    `fixed` are fields that a config may derive from other numbers, and that must then stay.
    """

    kind: Kind
    site: str
    size: int
    parts: tuple[Part, ...]
    counts: Mapping[int, int]
    fixed: Mapping[str, int] = field(default_factory=dict)

    def narrows(self, kept: IndexSet, evidence: Evidence, name: str) -> tuple[Narrow, ...]:
        """Return the rewrites of pass `name` that keep some units, one for each size of axis, without config edits."""
        return tuple(
            Narrow(
                pass_name=name, site=self.site, evidence=evidence, axes=part.axes, size=part.size,
                kept=part.rows(kept), relabels="channels",
            )
            for part in self.parts
        )  # fmt: skip


def file_names(program: Program, checkpoint: Checkpoint) -> dict[str, str]:
    """Return the files' name of each state-dict name whose tensor the files have whole; of a quantised one its main."""
    resolved = {name: program.naming.resolve(name) for name in checkpoint.tensors if checkpoint.is_weight(name)}
    return {str(found): name for name, (found, merged) in resolved.items() if found is not None and not merged}
