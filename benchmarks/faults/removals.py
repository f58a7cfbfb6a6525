"""True removals: what is taken out is dead, so that a verdict other than `verified` is a false alarm."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from benchmarks.faults.planted import Planted
from benchmarks.faults.subjects import LONGEST, VOCABULARY, Subject, make_subject
from benchmarks.faults.wrong_outputs import KEPT
from benchmarks.faults.wrong_plans import erase, layers_without, position_names, positions, vocabulary
from collapse.analysis.layers import edited_config
from collapse.checkpoint import Checkpoint
from collapse.trace import meta_model

OUTPUT = re.compile(r"(o_proj|out_proj|c_proj|down_proj|w2|fc2|fc_out|dense|dense_4h_to_h)\.(weight|bias)$|down_proj$")
Mutate = Callable[[PreTrainedModel, random.Random], None]


def another(subject: Subject, name: str, mutate: Mutate, seed: int = 1) -> Subject:
    """Return a source of the same kind with other weights, beside the given one."""
    folder = subject.checkpoint.root.parent / name
    return make_subject(subject.kind, folder, seed, mutate)


def dead_layer_subject(subject: Subject, *numbers: int, seed: int = 1) -> Subject:
    """Return a source in which the numbered layers add nothing: their output weights are zero."""
    name = f"dead-{'-'.join(map(str, numbers))}-{seed}"
    return another(subject, name, partial(_kill_layers, subject.layers.site, numbers), seed)


def _kill_layers(site: str, numbers: tuple[int, ...], model: PreTrainedModel, draw: random.Random) -> None:
    for number in numbers:
        block = model.get_submodule(f"{site}.{number}")
        killed = [p for name, p in block.named_parameters() if OUTPUT.search(name)]
        for parameter in killed:
            parameter.zero_()


def dead_layers(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """Each layer, and a pair of them, made dead and dropped; with rows that go in the same plan."""
    for numbers in ((0,), (1,), (2,), (0, 2)):
        dead = dead_layer_subject(subject, *numbers, seed=draw.randrange(1 << 30))
        dropped = layers_without(dead, *numbers)
        yield Planted(dead, dead.plan(dropped), dropped.site)
        if numbers == (0,):
            plan = dead.plan(dropped, vocabulary(dead, KEPT), kept=KEPT)
            yield Planted(dead, plan, dropped.site)


def unreachable_rows(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """Rows that the contract never names."""
    for count in (5, 20, 40):
        kept = tuple(sorted({2, 3, 4, *draw.sample(range(VOCABULARY), count)}))
        yield Planted(subject, subject.plan(vocabulary(subject, kept), kept=kept), "vocabulary")


def unclaimed(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """A tensor in the files that no module claims."""
    extra = another(subject, "unclaimed", lambda model, draw: None)
    path = extra.checkpoint.root / "model.safetensors"
    save_file(load_file(path) | {"old.table": torch.ones(3, 5)}, path, {"format": "pt"})
    reopened = replace(extra, checkpoint=Checkpoint.open(extra.checkpoint.root))
    yield Planted(reopened, reopened.plan(erase("old.table", "old.table")), "old.table")


def tied_copies(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """The second copy of a tied tensor."""
    if not subject.config.tie_word_embeddings:
        return
    copied = another(subject, "copied", lambda model, draw: None)
    path, (first, *_) = copied.checkpoint.root / "model.safetensors", _tied(copied)
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors[first].clone()}, path, {"format": "pt"})
    reopened = replace(copied, checkpoint=Checkpoint.open(copied.checkpoint.root))
    yield Planted(reopened, reopened.plan(erase("lm_head.weight", "lm_head.weight")), "lm_head.weight")


def _tied(subject: Subject) -> list[str]:
    names = {name for group in subject.program.tied for name in group}
    return [name for name in subject.checkpoint.tensors if subject.program.model_name(name) in names]


def zero_biases(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """Biases that are all zero, and a config that can say so."""
    values = subject.config.to_dict()
    for field in (name for name, value in values.items() if "bias" in name and value is True):
        without = set(meta_model(edited_config(subject.config, {field: False})).state_dict())
        gone = set(subject.program.shapes) - without
        if gone:
            dead = another(subject, f"zero-{field}", partial(_zero, gone))
            files = [name for name in dead.checkpoint.tensors if dead.program.model_name(name) in gone]
            yield Planted(dead, dead.plan(erase(field, *files, **{field: False})), field)


def _zero(names: set[str], model: PreTrainedModel, draw: random.Random) -> None:
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.zero_()


def far_positions(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """Rows of a position table beyond the longest request."""
    for table, rows in position_names(subject):
        for count in (LONGEST, LONGEST + 7):
            yield Planted(subject, subject.plan(positions(subject, table, rows, count)), table)


REMOVALS = {
    "dead layers": dead_layers,
    "unreachable rows": unreachable_rows,
    "unclaimed tensors": unclaimed,
    "tied copies": tied_copies,
    "zero biases": zero_biases,
    "far positions": far_positions,
}
