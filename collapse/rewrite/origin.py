"""What the source calls a tensor of the output, and the graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from collapse.checkpoint import Checkpoint
from collapse.plan import DropLayers, Plan, Reroot
from collapse.rewrite.free import added_names
from collapse.rewrite.tensors import erased_names, layer_number, output_name

if TYPE_CHECKING:  # the probe reads names without torch
    from collapse.naming import Naming
    from collapse.program import Program


def origins(naming: Naming, source: Checkpoint, plan: Plan, program: Program) -> dict[str, tuple[str, str]]:
    """Return, by the output model's tensor names, the source's file name and the graph's name of each.

    An added tensor has the name that it has in the values file.
    """
    gone = erased_names(plan)[0]
    found: dict[str, tuple[str, str]] = {}
    for name in filter(source.is_weight, source.tensors):
        before, after = program.model_name(name), naming.resolve(output_name(plan, name))[0]
        if name not in gone and before is not None and after is not None:
            found[after] = (name, before)
    for name, graph_name in added_names(plan).items():
        found[naming.resolve(output_name(plan, name))[0] or name] = (name, graph_name)
    return found


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
