"""The channels of a block that can go as units, and the rewrites that take some of them, config edits included.

A neuron is an input of a product that comes from other products elementwise. A KV group is what one key/value head is
made from, with its query heads. An expert is a part that transformers merges into one tensor on load, or a row of it,
with its row of the router. All are found in the graph and the files, none by a module's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from transformers import PreTrainedConfig

from collapse.analysis.heads import kv_groups_of
from collapse.analysis.layers import edited_config, text_part
from collapse.analysis.products import neurons_of, products_of
from collapse.analysis.units import Channels, file_names
from collapse.checkpoint import Checkpoint
from collapse.models.rebuild import changed_config
from collapse.plan import Evidence, IndexSet, Narrow, Skipped
from collapse.program import Program
from collapse.trace import meta_model

Shapes = Mapping[str, tuple[int, ...]]


def channels_of(program: Program, checkpoint: Checkpoint, block: str) -> tuple[Channels | Skipped, ...]:
    """Return the neurons and KV groups of one block, or why they are left alone."""
    files, products = file_names(program, checkpoint), products_of(program, block)
    return (*neurons_of(products, files), *kv_groups_of(program, block, products, files))


def narrow_channels(
    kept: Sequence[tuple[Channels, Iterable[int]]],
    program: Program,
    config: PreTrainedConfig,
    evidence: Evidence,
    name: str,
) -> tuple[Narrow, ...] | Skipped:
    """Return the rewrites of pass `name` that keep the given units of each group of channels, or why not.

    The native layout has one number for all layers: the groups must lose as many units each, and the config is edited
    where the model that it builds then has just the shapes of the rewrites.
    """
    chosen = [(channels, IndexSet.of(units)) for channels, units in kept]
    rewrites = [narrow for channels, units in chosen for narrow in channels.narrows(units, evidence, name)]
    shapes = narrowed_shapes(program, rewrites)
    for edits in _edits(chosen, config):
        if gives_shapes(config, edits, shapes):
            return (rewrites[0].model_copy(update={"config": edits}), *rewrites[1:])
    reason = f"no edit of the config gives every layer just its kept units ({_counts(chosen)})"
    return Skipped(pass_name=name, site=chosen[0][0].site, reason=reason)


def narrow_sites(
    kept: Sequence[tuple[Channels, Iterable[int]]],
    program: Program,
    config: PreTrainedConfig,
    evidence: Evidence,
    name: str,
) -> tuple[Narrow, ...] | Skipped:
    """Return the rewrites of pass `name` that keep the given units of each group of channels, or why not.

    In the free layout every group may keep another number; one that keeps all has no rewrite. The fields of the config
    are looked for with which the architecture builds the group's module, and that alone is taken of it, with just the
    shapes of the rewrites.
    """
    found: list[Narrow] = []
    for channels, units in kept:
        rows = IndexSet.of(units)
        if len(rows) == channels.size:
            continue
        rewrites = channels.narrows(rows, evidence, name)
        fields = _local(channels, rows, rewrites, program, config)
        if fields is None:
            reason = f"no edit of the config gives the module just its kept units ({_counts([(channels, rows)])})"
            return Skipped(pass_name=name, site=channels.site, reason=reason)
        found += [rewrites[0].model_copy(update={"local": fields}), *rewrites[1:]]
    return tuple(found)


def _local(
    channels: Channels, rows: IndexSet, rewrites: Sequence[Narrow], program: Program, config: PreTrainedConfig
) -> dict[str, Any] | None:
    part, _ = text_part(config)
    if part is not config:  # the free layout is for models of text alone
        return None
    start = f"{channels.site}."
    wanted = {path: shape for path, shape in narrowed_shapes(program, rewrites).items() if path.startswith(start)}
    fixed = dict(channels.fixed)
    counts = {now: each * len(rows) for now, each in channels.counts.items()}
    for changed in config_changes(config, counts, frozenset(fixed)):
        try:
            state = meta_model(changed_config(config, fixed | changed)).state_dict()
        except Exception:  # a config or model class may raise anything for values that do not fit
            continue
        if all(path in state and tuple(state[path].shape) == shape for path, shape in wanted.items()):
            return fixed | changed
    return None


def narrowed_shapes(program: Program, rewrites: Iterable[Narrow]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter after the rewrites."""
    shapes = {name: list(shape) for name, shape in program.shapes.items()}
    for rewrite in rewrites:
        for axis in rewrite.axes:
            for alias in program.aliases(str(program.model_name(axis.tensor))):
                shapes[alias][axis.dim] = len(rewrite.kept)
    return {name: tuple(shape) for name, shape in shapes.items()}


def _edits(chosen: Sequence[tuple[Channels, IndexSet]], config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """Yield sets of config edits, small ones first; fields that a config might derive are written out beside them."""
    part, where = text_part(config)
    channels, units = chosen[0]
    wanted = {now: each * len(units) for now, each in channels.counts.items()}
    for changed in config_changes(part, wanted, frozenset(channels.fixed)):
        yield {f"{where}{field}": value for field, value in (dict(channels.fixed) | changed).items()}


def config_changes(part: PreTrainedConfig, wanted: Mapping[int, int], but: frozenset[str]) -> Iterator[dict[str, int]]:
    """Yield ways to say new numbers for old ones: in up to three fields that have them, or in one that has no value."""
    values = part.to_dict()
    fields = [field for field, value in values.items() if type(value) is int and value in wanted and field not in but]
    for count in (1, 2, 3):
        for some in combinations(fields, count):
            yield {field: wanted[values[field]] for field in some}
    for field in (field for field, value in values.items() if value is None):
        yield from ({field: number} for number in wanted.values())


def gives_shapes(config: PreTrainedConfig, edits: Mapping[str, Any], shapes: Shapes) -> bool:
    """Whether the model of the edited config has just these shapes."""
    try:
        state = meta_model(edited_config(config, edits)).state_dict()
    except Exception:  # a config class may raise anything for values that do not fit
        return False
    return all(tuple(tensor.shape) == shapes.get(name) for name, tensor in state.items())


def _counts(chosen: Sequence[tuple[Channels, IndexSet]]) -> str:
    return ", ".join(f"{channels.site}: {len(units)} of {channels.size}" for channels, units in chosen[:4])
