"""What the source calls a tensor of the output."""

from __future__ import annotations

from collections.abc import Iterator

from collapse.plan import DropLayers, Plan, Reroot
from collapse.rewrite.tensors import layer_number, output_name


def source_name(plan: Plan, name: str) -> str:
    """Return what the source calls the output's tensor `name`: the other way round than `output_name`.

    A name that no tensor of the source would get is returned as it is.
    """
    for candidate in (*_unrooted(plan, name), name):
        found = _numbered_back(plan, candidate)
        if output_name(plan, found) == name:
            return found
    return name


def _unrooted(plan: Plan, name: str) -> Iterator[str]:
    for rooted in plan.of_kind(Reroot):
        yield from (left + name[len(right) :] for left, right in rooted.names if name.startswith(right))


def _numbered_back(plan: Plan, name: str) -> str:
    """Put the source's numbers of blocks into a name, outer blocks first, since an inner prefix has the source's."""
    for dropped in sorted(plan.of_kind(DropLayers), key=lambda rewrite: len(rewrite.prefix)):
        number, kept = layer_number(dropped, name), list(dropped.kept)
        if number is not None and number < len(kept):
            start = len(dropped.prefix)
            name = f"{dropped.prefix}{kept[number]}{name[start + len(str(number)) :]}"
    return name
