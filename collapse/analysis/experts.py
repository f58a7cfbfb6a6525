"""Experts of a mixture, and the rewrites that keep some of them: one tensor a part in the files, or rows of one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from transformers import PreTrainedConfig

from collapse.analysis.channels import config_changes, gives_shapes
from collapse.analysis.layers import edited_config, text_part
from collapse.analysis.units import file_names
from collapse.auto import config_from
from collapse.canonical import dumps
from collapse.checkpoint import Checkpoint
from collapse.plan import Axis, DropLayers, Evidence, IndexSet, Narrow, Skipped
from collapse.program import Program
from collapse.trace import meta_model

ASKED = r"per_tok(en)?$|^(?!index_).*top_?k(_experts)?$|^moe_k$"  # config fields: how many experts a token is sent to
GROUPS = "n_group|num_expert_groups?|moe_n_groups?"  # in how many runs of experts a router divides them


@dataclass(frozen=True)
class Experts:
    """The experts of one module.

    `prefix` is what comes before an expert's number in the files, None where a tensor there holds all of them;
    `stacked` are the model's tensors with one row an expert, `router` the files' axes beside them that count experts.
    """

    site: str
    size: int
    prefix: str | None
    stacked: tuple[str, ...]
    router: tuple[Axis, ...]

    def tensors(self, program: Program) -> tuple[str, ...]:
        """Return the model's tensors that have a row for each expert."""
        router = (str(program.model_name(axis.tensor)) for axis in self.router)
        return tuple(dict.fromkeys((*self.stacked, *router)))

    def rewrites(
        self, kept: IndexSet, checkpoint: Checkpoint, evidence: Evidence, name: str
    ) -> tuple[Narrow | DropLayers, ...]:
        """Return the rewrites of pass `name` that keep some experts and their rows of the router."""
        rows = Narrow(
            pass_name=name, site=self.site, evidence=evidence, axes=self.router, size=self.size, kept=kept,
            relabels="channels",
        )  # fmt: skip
        if self.prefix is None:
            return (rows,)
        gone = {f"{self.prefix}{number}." for number in range(self.size) if number not in kept}
        tensors = tuple(tensor for tensor in checkpoint.tensors if any(tensor.startswith(start) for start in gone))
        dropped = DropLayers(
            pass_name=name, site=self.site, evidence=evidence, prefix=self.prefix, size=self.size, kept=kept,
            tensors=tensors,
        )  # fmt: skip
        return rows, dropped


def experts_of(program: Program, checkpoint: Checkpoint, block: str) -> Iterator[Experts | Skipped]:
    """Yield the experts of every module of a block that holds three-dimensional weights."""
    files = file_names(program, checkpoint)
    modules: dict[str, list[str]] = {}
    for name, shape in program.shapes.items():
        kind = program.module_types.get(name.rpartition(".")[0], "")
        if name.startswith(f"{block}.") and len(shape) == 3 and not kind.startswith("Conv"):
            modules.setdefault(name.rpartition(".")[0], []).append(name)
    for site, stacked in modules.items():
        size = program.shapes[stacked[0]][0]
        whole = [name for name in stacked if name in files]
        prefix = _prefix(program, checkpoint, stacked)
        parent = site.rpartition(".")[0]
        counted = _counted(dumps(dict(checkpoint.config)), size)
        beside = [
            name for name, shape in program.shapes.items()
            if name.startswith(f"{parent}.") and shape[:1] == (size,) and (not counted or name in counted)
        ]  # fmt: skip
        router = [n for n in beside if n in files and (n not in stacked or n in whole)]
        if (prefix is None and len(whole) < len(stacked)) or not router or set(router) <= set(stacked):
            reason = "the files' tensors of the experts, or the rows of a router, are not recognised"
            yield Skipped(pass_name="experts", site=site, reason=reason)
            continue
        axes = tuple(Axis(tensor=files[name], dim=0) for name in router)
        yield Experts(site, size, prefix, tuple(stacked), axes)


@lru_cache(maxsize=8)
def _counted(config: str, size: int) -> frozenset[str]:
    """Return the tensors with a row for each of `size` experts: those that have one less where the config says so.

    Empty where no field of the config, JSON, gives some three-dimensional tensor one row less, and all others the rest
    of their shape: a number of experts may be the width of something else, too.
    """
    whole = config_from(json.loads(config))
    before = {name: tuple(one.shape) for name, one in meta_model(whole).state_dict().items()}
    part, where = text_part(whole)
    for changed in config_changes(part, {size: size - 1}, frozenset()):
        try:
            made = meta_model(edited_config(whole, {f"{where}{field}": value for field, value in changed.items()}))
        except Exception:  # a config class may raise anything for values that do not fit
            continue
        after = {name: tuple(one.shape) for name, one in made.state_dict().items()}
        changes = {name for name, shape in before.items() if after.get(name) != shape}
        fewer = all(
            before[name][:1] == (size,) and after.get(name) == (size - 1, *before[name][1:]) for name in changes
        )
        if fewer and any(len(before[name]) == 3 for name in changes):
            return frozenset(changes)
    return frozenset()


def _prefix(program: Program, checkpoint: Checkpoint, stacked: list[str]) -> str | None:
    """Return what comes before the number of the expert in the names of the parts that are merged into `stacked`."""
    names = [name for name in checkpoint.tensors if program.naming.resolve(name) in {(one, True) for one in stacked}]
    found = {match.group(1) for name in names if (match := re.fullmatch(r"(.*\.)\d+\.[^0-9]*[a-z_][\w.]*", name))}
    return found.pop() if len(found) == 1 else None


def drop_experts(
    kept: Iterable[tuple[Experts, Iterable[int]]],
    program: Program,
    checkpoint: Checkpoint,
    config: PreTrainedConfig,
    evidence: Evidence,
    name: str,
) -> tuple[Narrow | DropLayers, ...] | Skipped:
    """Return the rewrites of pass `name` that keep the given experts of each module, with config edits, or why not.

    The native layout has one number of experts for all layers, and each token needs as many as the router chooses.
    """
    chosen = [(experts, IndexSet.of(numbers)) for experts, numbers in kept]
    rewrites = [one for experts, rows in chosen for one in experts.rewrites(rows, checkpoint, evidence, name)]
    shapes = _shapes(program, chosen)
    part, where = text_part(config)
    experts, rows = chosen[0]
    if any(len(numbers) < needed(config) for _, numbers in chosen):
        reason = f"{len(rows)} experts are left, fewer than a token is sent to"
        return Skipped(pass_name=name, site=experts.site, reason=reason)
    for changed in config_changes(part, {experts.size: len(rows)}, frozenset()):
        edits = {f"{where}{field}": value for field, value in changed.items()}
        if gives_shapes(config, edits, shapes):
            return (rewrites[0].model_copy(update={"config": edits}), *rewrites[1:])
    reason = "no edit of the config gives every layer just its kept experts"
    return Skipped(pass_name=name, site=experts.site, reason=reason)


def needed(config: PreTrainedConfig) -> int:
    """Return how many experts a token is sent to, at least one."""
    fields = text_part(config)[0].to_dict().items()
    asked = [value for name, value in fields if re.search(ASKED, name)]
    counts = [count for value in asked for count in (value if isinstance(value, list | tuple) else (value,))]
    return max((count for count in counts if type(count) is int), default=1)


def grouped(config: PreTrainedConfig) -> bool:
    """Whether the router chooses among groups of experts, by number, before it chooses experts."""
    fields = text_part(config)[0].to_dict().items()
    return any(type(value) is int and value > 1 for name, value in fields if re.fullmatch(GROUPS, name))


def _shapes(program: Program, chosen: Iterable[tuple[Experts, IndexSet]]) -> dict[str, tuple[int, ...]]:
    shapes = dict(program.shapes)
    for experts, rows in chosen:
        for name in experts.tensors(program):
            shapes[name] = (len(rows), *shapes[name][1:])
    return shapes
