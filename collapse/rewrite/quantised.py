"""What a plan does to quantised weights: each is one thing, however many tensors it has.

A plan speaks of the weight, by its main tensor and in its own rows; what that means for scales, zero points and
packed values is worked out here. So one half of a pair cannot be edited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from collapse.checkpoint import Checkpoint
from collapse.errors import PlanError
from collapse.plan import IndexSet, Narrow
from collapse.quantised import Cut, Group

Rows = dict[str, dict[int, IndexSet]]
NEW_PLAN = "make a new plan"


def axis_size(checkpoint: Checkpoint, name: str, dim: int) -> int | None:
    """Return the rows of one dimension of a tensor or quantised weight; None where it has no such dimension.

    Raises `PlanError` for a companion, and for a weight that cannot be cut there.
    """
    group = checkpoint.group(name)
    if group is None:
        shape = checkpoint.tensors[name].shape
        return shape[dim] if 0 <= dim < len(shape) else None
    if name != group.main:
        reason = f"is a companion of {group.main} and is never cut without it: name that tensor and its own rows"
        raise PlanError(reason, where=name, fix=NEW_PLAN)
    if dim not in group.cuts:
        return None
    cut = group.cuts[dim]
    if isinstance(cut, str) or group.shape is None:
        reason = f"the quantised weight cannot be cut here: {cut}"
        raise PlanError(reason, where=f"{group.main} dim {dim}", fix="keep it whole")
    return group.shape[dim]


def cut_rows(checkpoint: Checkpoint, name: str, dim: int, kept: IndexSet) -> Rows:
    """Return what keeping these rows of a tensor leaves of it and, where it is quantised, of its companions."""
    group = checkpoint.group(name)
    if group is None or group.shape is None:
        return {name: {dim: kept}}
    cut = group.cuts[dim]
    assert isinstance(cut, Cut), cut  # `axis_size` has refused the others
    _require_blocks(kept, cut.block, group.shape[dim], f"{group.main} dim {dim}")
    return {group.stem + part: {own: _fewer(kept, step)} for part, (own, step) in cut.tensors.items()}


def refusal(checkpoint: Checkpoint, rewrites: Iterable[Narrow]) -> str | None:
    """Return why the quantised weights of a checkpoint cannot be cut so; a pass that is told leaves the site alone."""
    try:
        for rewrite in rewrites:
            for axis in rewrite.axes:
                narrow_rows(checkpoint, rewrite, axis.tensor, axis.dim)
    except PlanError as error:
        return f"{error.where}: {error.what}"
    return None


def _require_blocks(kept: IndexSet, block: int, size: int, where: str) -> None:
    for start, stop in kept.runs:
        if start % block or (stop % block and stop != size):
            reason = f"rows [{start}, {stop}) do not begin and end between blocks of {block} that share a scale or word"
            raise PlanError(reason, where=where, fix="keep whole blocks")


def _fewer(kept: IndexSet, step: int) -> IndexSet:
    return kept if step == 1 else IndexSet(runs=tuple((start // step, -(-stop // step)) for start, stop in kept.runs))


def require_whole_groups(
    checkpoint: Checkpoint, gone: frozenset[str], placeholders: frozenset[str], rename: Callable[[str], str]
) -> None:
    """Refuse a plan that takes, replaces or renames one tensor of a quantised weight without the others."""
    for group in checkpoint.quantisation.groups if checkpoint.quantisation else ():
        for chosen, verb in ((gone, "takes out"), (placeholders, "replaces")):
            taken = [name for name in group.members if name in chosen]
            left = [name for name in group.members if name not in chosen]
            if taken and left:
                reason = f"the plan {verb} {taken[0]} without {left[0]}, but they are one quantised weight"
                raise PlanError(reason, where=group.weight, fix=NEW_PLAN)
        _require_one_name(group, rename)


def _require_one_name(group: Group, rename: Callable[[str], str]) -> None:
    parts = [(name.removeprefix(group.stem), rename(name)) for name in group.members]
    stems = {new.removesuffix(part) if new.endswith(part) else new for part, new in parts}
    if len(stems) > 1:
        names = " and ".join(new for _, new in parts[:2])
        raise PlanError(f"the plan would call one quantised weight {names}", where=group.weight, fix=NEW_PLAN)


def narrow_rows(checkpoint: Checkpoint, rewrite: Narrow, name: str, dim: int) -> Rows:
    """Return what one axis of the rewrite leaves of which tensors; raises `PlanError` where it does not fit."""
    size, where = axis_size(checkpoint, name, dim), f"{name} dim {dim}"
    if size is None:
        group = checkpoint.group(name)
        dimensions = len(checkpoint.tensors[name].shape if group is None else group.cuts)
        raise PlanError(f"the tensor has {dimensions} dimensions", where=where, fix=NEW_PLAN)
    if size != rewrite.size:
        raise PlanError(
            f"has {size} rows, the plan says {rewrite.size}", where=where, fix=f"{NEW_PLAN} for this source"
        )
    return cut_rows(checkpoint, name, dim, rewrite.kept)
