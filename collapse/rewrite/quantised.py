"""What a plan does to quantised weights: each is one thing, however many tensors it has.

A plan speaks of the weight, by its main tensor and in its own rows; what that means for scales, zero points and
packed values is worked out here. So one half of a pair cannot be edited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from collapse.checkpoint import Checkpoint
from collapse.config_paths import with_edits
from collapse.errors import PlanError
from collapse.plan import DropLayers, IndexSet, Narrow, Reroot
from collapse.quantised import Cut, Group, scheme_of
from collapse.quantised.modules import Selector, module_lists, renamed

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


def with_modules(config: Mapping[str, Any], dropped: Sequence[DropLayers], rooted: Sequence[Reroot]) -> dict[str, Any]:
    """Return config.json with the lists of its `quantization_config` in the names of the output."""
    scheme = scheme_of(config)
    if scheme is None or not (dropped or rooted):
        return dict(config)
    values = renamed(scheme.values, partial(_new_path, dropped, rooted))
    return with_edits(config, {scheme.place: values}) if values != scheme.values else dict(config)


def _new_path(dropped: Sequence[DropLayers], rooted: Sequence[Reroot], entry: str) -> str | None:
    """Return a module's path in the output; None for one that is gone."""
    path: str | None = entry
    for layers in sorted(dropped, key=lambda rewrite: -len(rewrite.prefix)):  # inner numbers first, as files have them
        path = path and _renumbered(layers, path)
    for rewrite in rooted:
        path = path and _rooted(rewrite, path)
    return path


def _renumbered(dropped: DropLayers, entry: str) -> str | None:
    """Renumber a path that begins as the files or the model have it, or with the last parts of that."""
    for prefix in sorted({p for whole in (dropped.prefix, f"{dropped.site}.") for p in _endings(whole)}, key=len)[::-1]:
        number, dot, rest = entry.removeprefix(prefix).partition(".")
        if entry.startswith(prefix) and number.isdecimal() and int(number) < dropped.size:
            if int(number) not in dropped.kept:
                return None
            return f"{prefix}{list(dropped.kept).index(int(number))}{dot}{rest}"
    return entry


def _endings(prefix: str) -> list[str]:
    """Return the last parts of a path, from the shortest on that has all its numbers."""
    parts = prefix.removesuffix(".").split(".")
    first = next((place for place, part in enumerate(parts) if part.isdecimal()), len(parts))
    return [".".join(parts[start:]) + "." for start in range(first)]


def _rooted(rooted: Reroot, entry: str) -> str | None:
    path = f"{entry}."
    lefts = sorted((pair for pair in (*rooted.modules, *rooted.names) if path.startswith(pair[0])), key=_by_length)
    endings = tuple(_endings(path))  # files may leave out the first parts of a path in the model
    if any(name.startswith(endings) for name in rooted.tensors) and not any(left for left, _ in lefts):
        return None
    if not lefts:
        return entry
    left, right = lefts[0]
    return (right + path.removeprefix(left)).removesuffix(".") or None


def _by_length(pair: tuple[str, str]) -> int:
    return -len(pair[0])


def module_names(
    dropped: Sequence[DropLayers], rooted: Sequence[Reroot], old: str, new: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what a module that stays is called in the source and in the output: in the files, and in the model.

    `old` and `new` are its paths in the files.
    """
    before, after = [old], [new]
    for layers in dropped:
        for path, names in ((old, before), *(() if rooted else ((new, after),))):
            if path.startswith(layers.prefix):
                names.append(f"{layers.site}.{path.removeprefix(layers.prefix)}")
    pairs = [(right, left) for rewrite in rooted for left, right in rewrite.modules if new.startswith(right)]
    before += [left + new.removeprefix(right) for right, left in sorted(pairs, key=_by_length)[:1]]
    return tuple(before), tuple(after)


def require_same_modules(
    before: Mapping[str, Any], after: Mapping[str, Any], modules: Iterable[tuple[tuple[str, ...], tuple[str, ...]]]
) -> None:
    """Refuse lists that speak of other modules than before.

    `before` and `after` are the configs of source and output, `modules` what the modules that stay are called in each.
    Raises `PlanError` with the list and the module.
    """
    old, new = scheme_of(before), scheme_of(after)
    if old is None:
        return
    if new is None:
        raise PlanError("the output would have no quantization_config", where="config.json", fix=NEW_PLAN)
    pairs = list(modules)
    now = module_lists(new.values)
    for path, entries in module_lists(old.values).items():
        was, becomes = Selector(entries), Selector(now.get(path, ()))
        for lefts, rights in pairs:
            spoken = any(map(was, lefts))
            if spoken != any(map(becomes, rights)):
                lost = f"speaks of {lefts[-1]}, but of {rights[-1]}, which that becomes, no longer"
                gained = f"does not speak of {lefts[-1]}, but would of {rights[-1]}, which that becomes"
                reason = lost if spoken else gained
                raise PlanError(reason, where=f"{old.place}.{path}", fix="write the entry as the path of a module")


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
