"""The config interpreter: what config.json of the output says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from collapse.config_paths import with_edits
from collapse.errors import PlanError
from collapse.free_layout import nested
from collapse.plan import DropLayers, Plan, Reroot, Rewrite
from collapse.rewrite.free import free_sites
from collapse.rewrite.module_lists import with_modules


def config_edits(config: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return `config` with the dotted-path edits of all rewrites applied, later ones over earlier ones.

    A part that is a number is the place in a list. Lists of modules in a quantization_config follow the names of the
    output. A config is re-rooted last. Raises `PlanError` where the object or
    the place in a list that an edit is about is not there; the last part may be a new field.
    Where the plan needs the free layout, all of that becomes the base of a config that says so.
    """
    rooted = plan.of_kind(Reroot)
    renamed = with_modules(config, plan.of_kind(DropLayers), rooted)
    edited = _edited(renamed, [rewrite for rewrite in plan.rewrites if rewrite not in rooted])
    for rewrite in rooted:
        edited = _edited(_rooted(edited, rewrite), [rewrite])
    sites = free_sites(plan)
    return nested(edited, sites) if sites else edited


def _rooted(config: Mapping[str, Any], rewrite: Reroot) -> dict[str, Any]:
    part = config.get(rewrite.config_root) if rewrite.config_root else config
    if not isinstance(part, Mapping):
        raise PlanError(f"config.json has no {rewrite.config_root}", where=rewrite.site, fix="make a new plan")
    own = {name: part[name] for name in rewrite.fields if name in part}
    return own | {name: config[name] for name in rewrite.inherits if config.get(name) is not None}


def _edited(config: Mapping[str, Any], rewrites: Sequence[Rewrite]) -> dict[str, Any]:
    edited = dict(config)
    for rewrite in rewrites:
        edited = with_edits(edited, _spelled(edited, rewrite.config))
    return edited


def _spelled(config: Mapping[str, Any], edits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the edits, and the same of a field that stands there under another name, which transformers renames.

    A reader that knows only the other name would take the old number.
    """
    found = dict(edits)
    for path, value in edits.items():
        *parents, field = path.split(".")
        part: Any = config
        for name in parents:
            part = part.get(name) if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and field not in part:
            others = [name for name in _other_names(part.get("model_type"), field) if name in part]
            found |= {".".join((*parents, name)): value for name in others}
    return found


def _other_names(kind: object, field: str) -> list[str]:
    from transformers import CONFIG_MAPPING  # it brings torch, which a writer or a probe does without

    names = CONFIG_MAPPING[kind].attribute_map if kind in CONFIG_MAPPING else {}
    return [name for name, real in names.items() if real == field]
