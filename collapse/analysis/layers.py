"""Which module lists are a model's layers, and what dropping some of them asks of files and config.

Nothing is known by a model's name: a list of blocks is found in the module tree, its prefix in the files' names, the
config fields by building the model with them changed. A block that would be built otherwise after renumbering (for
instance one that takes a constant from its own number) is a reason to leave the list alone.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from collapse.checkpoint import Checkpoint
from collapse.plan import DropLayers, Evidence, IndexSet, Skipped
from collapse.program import Program
from collapse.token_ids import ID_FIELD, ID_LISTS
from collapse.trace import meta_model

OWN_NUMBER = frozenset({"layer_idx", "layer_id", "layer_index", "block_idx", "index", "layer_number"})
Signature = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Layers:
    """One list of blocks: its module path, the prefix of its tensors in the files, and how config.json speaks of it.

    `count` is the dotted field with the number of blocks; `lists` are the fields with one entry a block, by value.
    """

    site: str
    prefix: str
    size: int
    count: str
    lists: Mapping[str, tuple[Any, ...]]


def layer_lists(program: Program, checkpoint: Checkpoint, config: PreTrainedConfig) -> tuple[Layers | Skipped, ...]:
    """Return every outermost list of blocks of the traced model, or why it cannot lose blocks."""
    return tuple(_described(site, size, checkpoint, program, config) for site, size in block_lists(program))


def drop_layers(
    layers: Layers, kept: Iterable[int], checkpoint: Checkpoint, config: PreTrainedConfig, evidence: Evidence, name: str
) -> DropLayers | Skipped:
    """Return the rewrite of pass `name` that keeps the numbered blocks, with its config edits, or why it is declined.

    The edited config is built on the meta device, and each kept block must be what it was: the same modules, shapes
    and scalar attributes, but for its own number.
    """
    rows = IndexSet.of(kept)
    edits = {layers.count: len(rows)} | {field: [values[n] for n in rows] for field, values in layers.lists.items()}
    changed = _differs(layers, rows, edits, config)
    if changed:
        return Skipped(pass_name=name, site=layers.site, reason=changed)
    numbers = {tensor: _number(tensor, layers.prefix) for tensor in checkpoint.tensors}
    gone = tuple(t for t, number in numbers.items() if number is not None and number not in rows)
    return DropLayers(
        pass_name=name, site=layers.site, evidence=evidence, config=edits,
        prefix=layers.prefix, size=layers.size, kept=rows, tensors=gone,
    )  # fmt: skip


def block_lists(program: Program) -> Iterator[tuple[str, int]]:
    """Yield (path, number of blocks) of the outermost module lists whose blocks the graph runs."""
    ran = {
        str(path) for node in program.graph.graph.nodes for path, _ in (node.meta.get("nn_module_stack") or {}).values()
    }
    blocks: dict[str, int] = {}
    for path in program.module_types:
        parent, _, last = path.rpartition(".")
        if last.isdecimal() and path in ran and not re.search(r"\.\d+(\.|$)", parent):
            blocks[parent] = blocks.get(parent, 0) + 1
    yield from blocks.items()


def _described(
    site: str, size: int, checkpoint: Checkpoint, program: Program, config: PreTrainedConfig
) -> Layers | Skipped:
    def skipped(reason: str) -> Skipped:
        return Skipped(pass_name="layers", site=site, reason=reason)

    prefixes = {_prefix_of(name, program.model_name(name), site) for name in checkpoint.tensors} - {None}
    if len(prefixes) != 1:
        return skipped(f"the files name its blocks in {len(prefixes)} ways, not one")
    part, where = text_part(config)
    lists = {
        f"{where}{field}": tuple(value) for field, value in part.to_dict().items() if _is_per_layer(field, value, size)
    }
    for field, value in part.to_dict().items():
        if type(value) is int and value == size:
            layers = Layers(site, str(prefixes.pop()) if len(prefixes) == 1 else "", size, f"{where}{field}", lists)
            prefixes = {layers.prefix}
            if _sets_count(layers, config):
                return layers
    return skipped("no field of the config makes the model shorter by its first or last block")


def text_part(config: PreTrainedConfig) -> tuple[PreTrainedConfig, str]:
    """Return the config of the language model, and the dotted prefix under which the whole config has it."""
    part = config.get_text_config(decoder=True)
    if part is config:
        return config, ""
    name = next(name for name in config.sub_configs if getattr(config, name, None) is part)
    return part, f"{name}."


def _prefix_of(name: str, model_name: str | None, site: str) -> str | None:
    """Return what comes before the block's number in a file's name of a tensor of one of the blocks."""
    found = re.match(re.escape(site) + r"\.(\d+)\.", model_name or "")
    if found is None:
        return None
    place = re.search(rf"(?:^|\.)({found.group(1)})\.", name)
    return name[: place.start(1)] if place else ""


def _number(name: str, prefix: str) -> int | None:
    number, dot, _ = name.removeprefix(prefix).partition(".")
    return int(number) if name.startswith(prefix) and dot and number.isdecimal() else None


def _is_per_layer(field: str, value: Any, size: int) -> bool:
    """Whether a field lists one entry a block; lists of token ids or class names do not, whatever their length."""
    if not isinstance(value, list | tuple) or len(value) != size:
        return False
    return field != "architectures" and not ID_FIELD.search(field) and field not in ID_LISTS


def edited_config(config: PreTrainedConfig, edits: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the transformers config with dotted fields changed, as config.json would be."""
    values = copy.deepcopy(config.to_dict())
    for path, value in edits.items():
        *parents, last = path.split(".")
        place = values
        for parent in parents:
            place = place[parent]
        place[last] = copy.deepcopy(value)
    return type(config).from_dict(values)


def _sets_count(layers: Layers, config: PreTrainedConfig) -> bool:
    """Whether the model has one block fewer when the field says so; some config classes insist on the last block."""
    for gone in (layers.size - 1, 0):
        rest = {field: [*values[:gone], *values[gone + 1 :]] for field, values in layers.lists.items()}
        model = _built(config, {layers.count: layers.size - 1} | rest)
        if model is not None and _blocks(model, layers.site) == layers.size - 1:
            return True
    return False


def _built(config: PreTrainedConfig, edits: Mapping[str, Any]) -> nn.Module | None:
    try:
        model: nn.Module = meta_model(edited_config(config, edits))
        return model
    except Exception:  # a config class may raise anything for values that do not fit
        return None


def _blocks(model: nn.Module, site: str) -> int:
    try:
        return len(list(model.get_submodule(site).children()))
    except AttributeError:
        return 0


def _differs(layers: Layers, kept: IndexSet, edits: Mapping[str, Any], config: PreTrainedConfig) -> str | None:
    """Return why the model of the edited config is not the old one without the dropped blocks, or None."""
    before, after = meta_model(config), _built(config, edits)
    if after is None or _blocks(after, layers.site) != len(kept):
        return "transformers cannot build the model with these blocks alone"
    for new, old in enumerate(kept):
        was, now = (signature(m, f"{layers.site}.{n}") for m, n in ((before, old), (after, new)))
        if was != now:
            path = next((a[0] for a, b in zip(was, now, strict=False) if a != b), "")
            return f"block {old} would be built otherwise as block {new} (at {path or 'its modules'})"
    return None


def signature(model: nn.Module, path: str) -> Signature:
    """Describe a module by what its forward can depend on: types, shapes and scalars, but not its own number."""
    root = model.get_submodule(path)
    return tuple(_described_module(name, module) for name, module in root.named_modules())


def _described_module(name: str, module: nn.Module) -> tuple[Any, ...]:
    shapes = tuple((key, tuple(value.shape)) for key, value in module.named_parameters(recurse=False))
    scalars = tuple(
        (key, str(value))
        for key, value in sorted(vars(module).items())
        if key not in OWN_NUMBER and isinstance(value, bool | int | float | str | torch.dtype | type(None))
    )
    return name, type(module).__name__, shapes, scalars
