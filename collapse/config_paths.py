"""Dotted paths into a config.json, such as `text_config.layer_types.3`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from collapse.errors import PlanError


def with_edits(config: Mapping[str, Any], edits: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `config` with the value of each dotted path put in its place.

    A part that is a number is the place in a list. Raises `PlanError` where the object or the place in a list that an
    edit is about is not there; the last part may be a new field.
    """
    edited = copy.deepcopy(dict(config))
    for path, value in sorted(edits.items()):
        *parents, last = path.split(".")
        place: Any = edited
        for part in parents:
            place = _part_of(place, part)
        if isinstance(place, dict):
            place[last] = _sorted(value)
        elif _part_of(place, last) is not None:
            place[int(last)] = _sorted(value)
        else:
            raise PlanError(f"config.json has no {path}", where=path, fix="make a new plan")
    return edited


def _sorted(value: Any) -> Any:
    """Copy a value with its fields sorted, as they are in a saved plan: both must write the same bytes."""
    if isinstance(value, Mapping):
        return {name: _sorted(value[name]) for name in sorted(value)}
    return [_sorted(part) for part in value] if isinstance(value, list | tuple) else copy.deepcopy(value)


def _part_of(place: Any, part: str) -> Any:
    """Return a field of an object or an element of a list; None where there is none."""
    if isinstance(place, dict):
        return place.get(part)
    inside = isinstance(place, list) and part.isdecimal() and int(part) < len(place)
    return place[int(part)] if inside else None
