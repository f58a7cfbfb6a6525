"""Right plans, and files or graphs that are not what they say, as a wrong writer or graph interpreter would make them.

The manifest is made of the wrong files, so that its digests agree.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import fx

from benchmarks.faults.planted import Planted
from benchmarks.faults.subjects import VOCABULARY, Subject
from benchmarks.faults.wrong_plans import layers_without, specialise, vocabulary
from collapse.program import Program
from collapse.rewrite.copying import copy_graph
from collapse.rewrite.leaves import output_node

WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]
Edit = Callable[[Tensors], None]
Change = Callable[[dict[str, Any]], None]


def edit_tensors(edit: Edit, out: Path) -> None:
    """Rewrite the weight file of a finished output, in its own order."""
    tensors = load_file(out / WEIGHTS)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / WEIGHTS, {"format": "pt"})


def edit_json(file: str, change: Change, out: Path) -> None:
    """Rewrite a JSON file of a finished output."""
    values = json.loads((out / file).read_bytes())
    change(values)
    (out / file).write_text(json.dumps(values, indent=2) + "\n")


def _tensors(subject: Subject, edit: Edit, site: str, *rewrites: Any) -> Planted:
    return Planted(subject, _kept_plan(subject, *rewrites), site, tamper=partial(edit_tensors, edit))


def _kept_plan(subject: Subject, *rewrites: Any):  # type: ignore[no-untyped-def]
    """Return a right plan: a vocabulary of the rows that the contract names, and other rewrites."""
    kept = KEPT if any(rewrite.site == "vocabulary" for rewrite in rewrites) else None
    return subject.plan(*(rewrites or (specialise("nothing", use_cache=True),)), kept=kept)


KEPT = tuple(token for token in range(VOCABULARY) if token not in {9, 17, 30})


def _matrices(subject: Subject) -> list[str]:
    inside = subject.layers.prefix
    return [n for n, info in subject.checkpoint.tensors.items() if n.startswith(inside) and len(info.shape) == 2]


def _table(subject: Subject) -> str:
    return vocabulary(subject, KEPT).axes[0].tensor


def swapped_rows(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """Two kept rows of the token table change places."""
    for _ in range(2):
        first, second = draw.sample(range(len(KEPT)), 2)
        table = _table(subject)
        edit = partial(_swap, table, first, second)
        yield _tensors(subject, edit, table, vocabulary(subject, KEPT))


def _swap(name: str, first: int, second: int, tensors: Tensors) -> None:
    tensors[name][[first, second]] = tensors[name][[second, first]]


def shifted_rows(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """Every row of the token table stands one place further."""
    table = _table(subject)

    def edit(tensors: Tensors) -> None:
        tensors[table] = tensors[table].roll(1, 0)

    yield _tensors(subject, edit, table, vocabulary(subject, KEPT))


def one_row(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """One element of one kept row is another one."""
    for name in (_table(subject), draw.choice(_matrices(subject))):
        row = draw.randrange(min(subject.checkpoint.tensors[name].shape[0], len(KEPT)))

        def edit(tensors: Tensors, name: str = name, row: int = row) -> None:
            tensors[name][row, 3] += 0.25

        yield _tensors(subject, edit, name, vocabulary(subject, KEPT))


def swapped_channels(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """Two rows of a weight within a layer change places."""
    for name in draw.sample(_matrices(subject), 2):
        first, second = draw.sample(range(subject.checkpoint.tensors[name].shape[0]), 2)
        yield _tensors(subject, partial(_swap, name, first, second), name)


def transposed(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """A square matrix is written transposed."""
    shapes = {name: subject.checkpoint.tensors[name].shape for name in _matrices(subject)}
    square = [name for name, shape in shapes.items() if shape[0] == shape[1]]
    for name in draw.sample(square, min(1, len(square))):

        def edit(tensors: Tensors, name: str = name) -> None:
            tensors[name] = tensors[name].T

        yield _tensors(subject, edit, name)


def _parts(subject: Subject, number: int) -> dict[str, str]:
    """Return the tensors of one layer by what comes after its number."""
    prefix = f"{subject.layers.prefix}{number}."
    return {name.removeprefix(prefix): name for name in subject.checkpoint.tensors if name.startswith(prefix)}


def neighbour_norm(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """A layer has the norm weights of its neighbour."""
    size = subject.layers.size
    for number in draw.sample(range(size), 2):
        mine, theirs = _parts(subject, number), _parts(subject, (number + 1) % size)
        norms = [part for part in mine if ("norm" in part or "ln_" in part) and part.endswith("weight")]
        for part in draw.sample(norms, min(1, len(norms))):

            def edit(tensors: Tensors, to: str = mine[part], of: str = theirs[part]) -> None:
                tensors[to] = tensors[of].clone()

            yield _tensors(subject, edit, mine[part])


def wrong_number(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """Two of the layers that stay after a drop have each other's number."""
    size = subject.layers.size
    for gone in range(size):
        dead = _with_dead_layer(subject, gone)
        left = [number for number in range(size) if number != gone]
        names = [
            (f"{subject.layers.prefix}0.{part}", f"{subject.layers.prefix}1.{part}") for part in _parts(subject, 0)
        ]

        def edit(tensors: Tensors, names: list[tuple[str, str]] = names) -> None:
            for first, second in names:
                tensors[first], tensors[second] = tensors[second], tensors[first]

        yield _tensors(dead, edit, f"{subject.layers.prefix}{left[0]}.", layers_without(dead, gone))


def _with_dead_layer(subject: Subject, number: int) -> Subject:
    from benchmarks.faults.removals import dead_layer_subject

    return dead_layer_subject(subject, number)


def lost_bias(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """A bias is written as zeros."""
    names = [name for name in subject.checkpoint.tensors if name.endswith("bias")]
    for name in draw.sample(names, min(2, len(names))):

        def edit(tensors: Tensors, name: str = name) -> None:
            tensors[name] = torch.zeros_like(tensors[name])

        yield _tensors(subject, edit, name)


def stale_generation_id(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """A token id of generation_config.json or config.json was not renumbered."""
    kept = tuple(range(1, VOCABULARY))
    for file, field in (("generation_config.json", "eos_token_id"), ("config.json", "bos_token_id")):
        raw = json.loads((subject.checkpoint.root / file).read_bytes())
        if isinstance(raw.get(field), int):
            stale = partial(edit_json, file, partial(dict.update, **{field: raw[field]}))
            plan = subject.plan(vocabulary(subject, kept), kept=kept)
            yield Planted(subject, plan, field, tamper=stale, seen=False)


def shifted_types(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """config.json hands the kinds of attention to the wrong layers, though the plan does not."""
    types = subject.checkpoint.config.get("layer_types")
    if types and len(set(types)) > 1:
        rolled = [*types[1:], types[0]]
        shift = partial(edit_json, "config.json", lambda values: values.update(layer_types=rolled))
        yield Planted(subject, _kept_plan(subject), "config.json: layer_types", tamper=shift)


def wrong_cache(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """The graph gives two layers each other's cache entries."""
    for kind in (0, 1):  # keys, values
        yield Planted(subject, _kept_plan(subject), "rewritten graph", spoil=partial(_swap_entries, kind))


def _swap_entries(kind: int, program: Program) -> Program:
    graph = copy_graph(program.graph)
    results: Any = output_node(graph.graph).args[0]
    tensors = [n for n, leaf in enumerate(program.cache, 1) if leaf.shape]
    first, second = tensors[kind], tensors[kind + 2]
    swapped: list[fx.Node] = list(results)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    output_node(graph.graph).args = (tuple(swapped),)
    graph.recompile()
    return program.with_graph(graph)


WRONG_OUTPUTS = {
    "swapped rows": swapped_rows,
    "shifted rows": shifted_rows,
    "one row": one_row,
    "swapped channels": swapped_channels,
    "transposed matrix": transposed,
    "neighbour's norm": neighbour_norm,
    "wrong layer number": wrong_number,
    "lost bias": lost_bias,
    "stale id in a file": stale_generation_id,
    "shifted layer types in the file": shifted_types,
    "cache of another layer": wrong_cache,
}
