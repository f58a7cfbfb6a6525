"""Keeps the lists of modules in a `quantization_config` true to the names of the output.

Entries that are paths are renamed; then every module that stays is asked for on both sides, which also finds
expressions that would speak of another module than before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from collapse.checkpoint import Checkpoint
from collapse.config_paths import with_edits
from collapse.errors import PlanError
from collapse.plan import DropLayers, Reroot
from collapse.quantised import scheme_of
from collapse.quantised.modules import Selector, module_lists, renamed

NEW_PLAN = "make a new plan"


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


def require_modules(
    checkpoint: Checkpoint,
    after: Mapping[str, Any],
    names: Mapping[str, str],
    dropped: Sequence[DropLayers],
    rooted: Sequence[Reroot],
) -> None:
    """Refuse an output whose lists speak of other modules than the source's.

    `after` is the output's config.json, `names` the tensors that stay: their names in source and output.
    """
    if checkpoint.quantisation is None or not (dropped or rooted):
        return
    mains = {group.main for group in checkpoint.quantisation.groups}
    weights = [(old, new) for old, new in names.items() if old in mains or old.endswith(".weight")]
    modules = {(old.rpartition(".")[0], new.rpartition(".")[0]) for old, new in weights}
    named = [module_names(dropped, rooted, old, new) for old, new in sorted(modules)]
    require_same_modules(checkpoint.config, after, named)
