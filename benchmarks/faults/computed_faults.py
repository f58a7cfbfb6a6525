"""Computed weights: outputs that have other ones than the plan says, and right ones, which must be verified."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.faults.planted import Planted
from benchmarks.faults.subjects import Subject
from benchmarks.faults.wrong_outputs import KEPT, WEIGHTS, Tensors, edit_tensors
from benchmarks.faults.wrong_plans import layers_without, vocabulary
from collapse.fingerprint import data_digest
from collapse.plan import Evidence, Replace, Rewrite
from collapse.rewrite.values import Values, open_values

MEASURED = Evidence(grade="measured", claim="the loss hardly moves", method="planted")


def _whole(subject: Subject) -> list[str]:
    """Return the matrices within layers that transformers takes as they are."""
    inside = [name for name, info in subject.checkpoint.tensors.items() if len(info.shape) == 2]
    layers = (name for name in inside if name.startswith(subject.layers.prefix))
    return [name for name in layers if not subject.program.naming.resolve(name)[1]]


def _computed(subject: Subject, names: Sequence[str], draw: random.Random) -> tuple[Replace, Values]:
    """Return the replacement of tensors by nearby ones, and those in a values file beside the source."""
    seed = draw.randrange(1 << 30)
    generator = torch.Generator().manual_seed(seed)
    held = load_file(subject.checkpoint.root / WEIGHTS)
    new = {name: held[name] + torch.randn(held[name].shape, generator=generator) * 0.1 for name in names}
    path: Path = subject.checkpoint.root.parent / f"values-{seed}.safetensors"
    save_file(new, path)
    digests = {name: data_digest(tensor) for name, tensor in new.items()}
    return Replace(**{"pass": "planted"}, site=names[0], evidence=MEASURED, tensors=digests), open_values(path)


def other_data(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """One element of a replaced tensor is another one, or the tensor has the source's data."""
    edits: tuple[Callable[[str, Tensors], None], ...] = (_one_element, partial(_old_data, subject))
    for name, edit in zip(draw.sample(_whole(subject), len(edits)), edits, strict=True):
        new, values = _computed(subject, [name], draw)
        plan = subject.plan(vocabulary(subject, KEPT), new, kept=KEPT)
        yield Planted(subject, plan, name, tamper=partial(edit_tensors, partial(edit, name)), values=values)


def _one_element(name: str, tensors: Tensors) -> None:
    tensors[name][2, 3] += 0.25


def _old_data(subject: Subject, name: str, tensors: Tensors) -> None:
    tensors[name] = load_file(subject.checkpoint.root / WEIGHTS)[name]


def live_layer_beside(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """A live layer goes as proved, in a plan that computes weights of another layer."""
    gone = draw.randrange(subject.layers.size)
    left = [name for name in _whole(subject) if not name.startswith(f"{subject.layers.prefix}{gone}.")]
    new, values = _computed(subject, [draw.choice(left)], draw)
    live = layers_without(subject, gone)
    yield Planted(subject, subject.plan(live, new), live.site, values=values)


def computed_weights(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """Weights of two matrices and, in one plan, of a smaller vocabulary."""
    for rewrites, kept in (((), None), ((vocabulary(subject, KEPT),), KEPT)):
        names = draw.sample(_whole(subject), 2)
        new, values = _computed(subject, names, draw)
        every: tuple[Rewrite, ...] = (*rewrites, new)
        yield Planted(subject, subject.plan(*every, kept=kept), names[0], values=values)


COMPUTED_FAULTS = {"other computed data": other_data, "live layer beside computed data": live_layer_beside}
COMPUTED_WEIGHTS = {"computed weights": computed_weights}
