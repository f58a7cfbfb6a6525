"""What a plan of the free layout puts into files and config: added tensors, and one entry for each changed module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from collapse.errors import PlanError
from collapse.plan import AddBias, Added, DropLayers, Narrow, Plan, Reroot, StandIn

NEW_PLAN = "make a new plan"


def adding(plan: Plan) -> tuple[StandIn | AddBias, ...]:
    """Return the rewrites that may add tensors, in order."""
    return tuple(rewrite for rewrite in plan.rewrites if isinstance(rewrite, StandIn | AddBias))


def added_tensors(plan: Plan) -> dict[str, Added]:
    """Return what the plan adds, by the name that it has in the values file; raises `PlanError` for a name twice."""
    found: dict[str, Added] = {}
    for rewrite in adding(plan):
        for part, tensor in rewrite.added.items():
            name = f"{rewrite.prefix}{part}"
            if name in found:
                raise PlanError("the tensor is added twice", where=name, fix=NEW_PLAN)
            found[name] = tensor
    return found


def added_names(plan: Plan) -> dict[str, str]:
    """Return the state-dict name that the rewritten graph has for each added tensor, by its name in the values file."""
    return {f"{one.prefix}{part}": f"{one.site}.{part}" for one in adding(plan) for part in one.added}


def free_sites(plan: Plan) -> list[dict[str, Any]]:
    """Return the entries of config.json for the modules that the output has otherwise, by their paths there.

    Modules that are built otherwise come first, then those that maps stand in for, then biases. Raises `PlanError`
    where a module goes that gets something, and for a model that is taken out of another at the same time.
    """
    sites = [*_local(plan), *_stand_ins(plan), *_biases(plan)]
    if sites and plan.of_kind(Reroot):
        reason = "the free layout cannot be made while a model is taken out of a larger one"
        raise PlanError(reason, where=plan.of_kind(Reroot)[0].site, fix="do that first, and collapse its output")
    return sites


def _local(plan: Plan) -> Iterator[dict[str, Any]]:
    fields: dict[str, dict[str, Any]] = {}
    for rewrite in plan.of_kind(Narrow):
        held = fields.setdefault(rewrite.site, {})
        for name, value in rewrite.local.items():
            if held.setdefault(name, value) != value:
                reason = f"is built with {name} = {held[name]}, and with {value}"
                raise PlanError(reason, where=rewrite.site, fix=NEW_PLAN)
    gone = {rewrite.site for rewrite in plan.of_kind(StandIn)}
    for site, values in sorted(fields.items(), key=lambda item: item[0].count(".")):  # a module before its parts
        path = _path(plan, site)
        if path is not None and values and site not in gone:
            yield {"site": path, "config": dict(sorted(values.items()))}


def _stand_ins(plan: Plan) -> Iterator[dict[str, Any]]:
    for rewrite in plan.of_kind(StandIn):
        shapes: Mapping[str, Any] = {part: list(rewrite.added[part].shape) for part in sorted(rewrite.added)}
        yield {"site": _kept(plan, rewrite), "by": rewrite.by, "outputs": rewrite.outputs, "shapes": dict(shapes)}


def _biases(plan: Plan) -> Iterator[dict[str, Any]]:
    for rewrite in plan.of_kind(AddBias):
        yield {"site": _kept(plan, rewrite), "bias": rewrite.added["bias"].shape[0]}


def _kept(plan: Plan, rewrite: StandIn | AddBias) -> str:
    path = _path(plan, rewrite.site)
    if path is None:
        raise PlanError(f"{rewrite.kind} of a module in a block that goes", where=rewrite.site, fix=NEW_PLAN)
    return path


def _path(plan: Plan, site: str) -> str | None:
    """Return the module's path in the output; None for one in a block that goes."""
    for dropped in plan.of_kind(DropLayers):
        number, dot, rest = site.removeprefix(f"{dropped.site}.").partition(".")
        if site.startswith(f"{dropped.site}.") and number.isdecimal():
            if int(number) not in dropped.kept:
                return None
            site = f"{dropped.site}.{list(dropped.kept).index(int(number))}{dot}{rest}"
    return site
