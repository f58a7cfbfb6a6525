"""The config interpreter: what config.json of the output says."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from collapse.errors import PlanError
from collapse.plan import Plan, Reroot, Rewrite


def config_edits(config: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return `config` with the dotted-path edits of all rewrites applied, later ones over earlier ones.

    A part that is a number is the place in a list. A config is re-rooted last. Raises `PlanError` where the object or
    the place in a list that an edit is about is not there; the last part may be a new field.
    """
    rooted = plan.of_kind(Reroot)
    edited = _edited(config, [rewrite for rewrite in plan.rewrites if rewrite not in rooted])
    for rewrite in rooted:
        edited = _edited(_rooted(edited, rewrite), [rewrite])
    return edited


def _rooted(config: Mapping[str, Any], rewrite: Reroot) -> dict[str, Any]:
    part = config.get(rewrite.config_root) if rewrite.config_root else config
    if not isinstance(part, Mapping):
        raise PlanError(f"config.json has no {rewrite.config_root}", where=rewrite.site, fix="make a new plan")
    own = {name: part[name] for name in rewrite.fields if name in part}
    return own | {name: config[name] for name in rewrite.inherits if config.get(name) is not None}


def _edited(config: Mapping[str, Any], rewrites: Sequence[Rewrite]) -> dict[str, Any]:
    edited = copy.deepcopy(dict(config))
    for rewrite in rewrites:
        for path, value in sorted(rewrite.config.items()):
            *parents, last = path.split(".")
            place: Any = edited
            for part in parents:
                place = _part_of(place, part)
            if isinstance(place, dict):
                place[last] = copy.deepcopy(value)
            elif _part_of(place, last) is not None:
                place[int(last)] = copy.deepcopy(value)
            else:
                raise PlanError(f"config.json has no {path}", where=path, fix="make a new plan")
    return edited


def _part_of(place: Any, part: str) -> Any:
    """Return a field of an object or an element of a list; None where there is none."""
    if isinstance(place, dict):
        return place.get(part)
    inside = isinstance(place, list) and part.isdecimal() and int(part) < len(place)
    return place[int(part)] if inside else None
