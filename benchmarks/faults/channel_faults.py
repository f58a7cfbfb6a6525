"""Faults and true removals of heads, neurons and experts: the same units in every layer, as the native layout asks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from benchmarks.faults.planted import Planted
from benchmarks.faults.subjects import EVIDENCE, Subject, make_subject
from collapse.analysis.channels import channels_of, narrow_channels
from collapse.analysis.experts import Experts, drop_experts, experts_of
from collapse.analysis.units import Channels, Kind
from collapse.plan import Narrow, Rewrite, Skipped
from collapse.rewrite.graph import rewrite_program

Units = dict[int, int]  # layer -> the one unit that goes there


def blocks(subject: Subject) -> list[str]:
    """Return the module paths of the layers."""
    return [f"{subject.layers.site}.{number}" for number in range(subject.layers.size)]


def channels(subject: Subject, kind: Kind) -> list[Channels]:
    """Return the channels of one kind of every layer; empty where some layer has none."""
    found = [channels_of(subject.program, subject.checkpoint, block) for block in blocks(subject)]
    chosen = [one for layer in found for one in layer if isinstance(one, Channels) and one.kind == kind]
    return chosen if len(chosen) == len(found) else []


def without(subject: Subject, kind: Kind, gone: Units) -> tuple[Narrow, ...]:
    """Return the rewrites that take a unit from every layer; empty where model or config do not allow it."""
    found = channels(subject, kind)
    kept = [(one, set(range(one.size)) - {gone[layer]}) for layer, one in enumerate(found)]
    if not kept or found[0].size < 2:
        return ()
    rewrites = narrow_channels(kept, subject.program, subject.config, EVIDENCE, "planted")
    return () if isinstance(rewrites, Skipped) or not _traceable(subject, rewrites) else rewrites


def _traceable(subject: Subject, rewrites: Sequence[Rewrite]) -> bool:
    """Whether the graph of the edited config is the source's; where it is not, both are refused by name."""
    try:
        rewrite_program(subject.program, subject.plan(*rewrites), subject.checkpoint.config)
    except Exception:
        return False
    return True


def _live(kind: Kind, subject: Subject, draw: random.Random) -> Iterator[Planted]:
    found = channels(subject, kind)
    for _ in range(3 if found else 0):
        rewrites = without(subject, kind, {n: draw.randrange(one.size) for n, one in enumerate(found)})
        if rewrites:
            yield Planted(subject, subject.plan(*rewrites), rewrites[0].site)


def _mismatched(kind: Kind, subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """Of the tensors of one layer, one loses another unit than the rest, and neither is dead."""
    found = channels(subject, kind)
    for layer in range(min(2, len(found))):
        gone, other = draw.sample(range(found[0].size), 2)
        rewrites = list(without(subject, kind, dict.fromkeys(range(len(found)), gone)))
        places = [place for place, narrow in enumerate(rewrites) if narrow.site == found[layer].site]
        if places:
            place = draw.choice(places)
            rewrites[place : place + 1] = _torn(rewrites[place], found[layer], other, draw)
            yield Planted(subject, subject.plan(*rewrites), found[layer].site)


def _torn(narrow: Narrow, one: Channels, other: int, draw: random.Random) -> list[Narrow]:
    """Give one axis of a rewrite the rows of another unit."""
    part = next(part for part in one.parts if part.axes == narrow.axes)
    rows = part.rows(set(range(one.size)) - {other})
    axis = draw.choice(narrow.axes)
    rest = tuple(kept for kept in narrow.axes if kept != axis)
    wrong = narrow.model_copy(update={"axes": (axis,), "kept": rows} | ({"config": {}} if rest else {}))
    return [narrow.model_copy(update={"axes": rest}), wrong] if rest else [wrong]


def _dead(kind: Kind, subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """Units whose columns of the product that reads them are zero."""
    found = channels(subject, kind)
    for number in range(4 if found else 0):
        gone = {layer: draw.randrange(one.size) for layer, one in enumerate(found)}
        folder = subject.checkpoint.root.parent / f"dead-{kind}-{number}"
        dead = make_subject(subject.kind, folder, draw.randrange(1 << 30), partial(_kill, subject, found, gone))
        rewrites = without(dead, kind, gone)
        if rewrites:
            yield Planted(dead, dead.plan(*rewrites), rewrites[0].site)


def _kill(subject: Subject, found: list[Channels], gone: Units, model: PreTrainedModel, draw: random.Random) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for layer, one in enumerate(found):
        for part in one.parts:
            for axis in part.axes:
                name = str(subject.program.model_name(axis.tensor))
                if _is_input(subject, name, axis.dim):
                    parameters[name].index_fill_(axis.dim, torch.tensor(list(part.rows([gone[layer]]))), 0.0)


def _is_input(subject: Subject, name: str, dim: int) -> bool:
    """Whether a dimension of a weight counts what it reads: 1, or 0 where weights are stored transposed."""
    transposed = subject.kind == "gpt2"
    return len(subject.program.shapes[name]) == 2 and dim == (0 if transposed else 1)


def experts(subject: Subject) -> list[Experts]:
    """Return the experts of every layer."""
    found = [one for block in blocks(subject) for one in experts_of(subject.program, subject.checkpoint, block)]
    return [one for one in found if isinstance(one, Experts)]


def _without_expert(subject: Subject, gone: Units) -> tuple[Rewrite, ...]:
    found = experts(subject)
    kept = [(one, set(range(one.size)) - {gone[layer]}) for layer, one in enumerate(found)]
    if not kept:
        return ()
    rewrites = drop_experts(kept, subject.program, subject.checkpoint, subject.config, EVIDENCE, "planted")
    return () if isinstance(rewrites, Skipped) or not _traceable(subject, rewrites) else rewrites


def live_expert(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """A live expert goes from every layer, with its row of the router."""
    for _ in range(3):
        rewrites = _without_expert(subject, {n: draw.randrange(one.size) for n, one in enumerate(experts(subject))})
        if rewrites:
            yield Planted(subject, subject.plan(*rewrites), rewrites[0].site)


def dead_expert(subject: Subject, draw: random.Random) -> Iterator[Planted]:
    """An expert that no token is sent to: one channel of the stream is a constant, and its router row is far below."""
    for number in range(3 if experts(subject) else 0):
        gone = {layer: draw.randrange(one.size) for layer, one in enumerate(experts(subject))}
        folder = subject.checkpoint.root.parent / f"dead-expert-{number}"
        dead = make_subject(
            subject.kind, folder, draw.randrange(1 << 30), partial(_avoid, experts(subject), gone, subject)
        )
        rewrites = _without_expert(dead, gone)
        if rewrites:
            yield Planted(dead, dead.plan(*rewrites), rewrites[0].site)


def _avoid(found: list[Experts], gone: Units, subject: Subject, model: PreTrainedModel, draw: random.Random) -> None:
    model.get_input_embeddings().weight[:, 0] = 4.0
    stacked = {name for one in found for name in one.stacked}
    for name, parameter in model.named_parameters():
        if name.startswith(f"{subject.layers.site}.") and ("o_proj" in name or "down_proj" in name):
            (parameter[:, 0] if name in stacked else parameter[0]).zero_()
        if name.startswith(f"{subject.layers.site}.") and "norm" in name and parameter.ndim == 1:
            parameter.abs_()
    parameters = dict(model.named_parameters())
    for layer, one in enumerate(found):
        for axis in one.router:
            row = parameters[str(subject.program.model_name(axis.tensor))][gone[layer]]
            row.zero_()
            row[0] = -1e4


CHANNEL_FAULTS: dict[str, Callable[[Subject, random.Random], Iterator[Planted]]] = {
    "live heads": partial(_live, "kv-groups"),
    "rows of other heads": partial(_mismatched, "kv-groups"),
    "live neurons": partial(_live, "neurons"),
    "rows of other neurons": partial(_mismatched, "neurons"),
    "live experts": live_expert,
}
CHANNEL_REMOVALS: dict[str, Callable[[Subject, random.Random], Iterator[Planted]]] = {
    "dead experts": dead_expert,
    "dead neurons": partial(_dead, "neurons"),
    "dead heads": partial(_dead, "kv-groups"),
}
