"""Random checkpoints and random plans for the audit, each made from a seed."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import torch

from collapse.checkpoint import DTYPE_BITS, Checkpoint
from collapse.plan import Axis, DropLayers, IndexSet, Narrow, Plan, ShortCircuit
from tests.tiny import PROVED, erase, plan_for, tiny_gpt2, tiny_llama

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def awkward_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors in which a careless search finds what is not there: equal, constant, tiny and long rows."""
    made = torch.Generator().manual_seed(seed)
    drawn = torch.randn(6, 40, generator=made)
    return {
        "awkward.equal_rows": drawn[[0, 1, 0, 2, 0, 1]],
        "awkward.zeros": torch.zeros(8, 64),
        "awkward.constant": torch.full((5, 32), 0.02),
        "awkward.ternary": torch.randint(-1, 2, (6, 200), generator=made).to(torch.bfloat16),
        "awkward.positions": torch.arange(300),
        "awkward.flags": torch.rand(70, generator=made) > 0.5,
        "awkward.bytes": torch.randint(0, 256, (9, 7), generator=made).to(torch.uint8),
        "awkward.three": torch.tensor([1.0, 2.0, 3.0]),
        "awkward.scalar": torch.tensor(0.7),
        "awkward.long": torch.randn(2, 3000, generator=made),
        "awkward.cube": torch.randn(3, 4, 10, generator=made).half(),
        "awkward.empty": torch.empty(0, 4),
    }


def random_source(folder: Path, seed: int) -> Checkpoint:
    """Write a checkpoint of one of two architectures, of one to four files."""
    drawn = random.Random(seed)
    extra = awkward_tensors(seed)
    if drawn.random() < 0.3:
        return tiny_gpt2(folder, extra=extra)
    return tiny_llama(folder, tied=drawn.random() < 0.5, dtype=drawn.choice(DTYPES), extra=extra)


def random_plan(source: Checkpoint, seed: int) -> Plan:
    """Return a plan that erases, leaves placeholders, narrows along any dimensions, and may drop a layer."""
    drawn = random.Random(seed)
    names = sorted(source.tensors)
    drawn.shuffle(names)
    rewrites: list[Any] = []
    if "model.layers.0.mlp.up_proj.weight" in source.tensors and drawn.random() < 0.3:
        rewrites.append(dropped(source, drawn.randrange(2)))
        names = [name for name in names if name not in rewrites[0].tensors]
    gone, shorted, rest = names[: drawn.randrange(6)], names[6 : 6 + drawn.randrange(3)], names[9:]
    if gone:
        rewrites.append(erase(*gone))
    if shorted:
        rewrites.append(_shorted(shorted, placeholder=drawn.random() < 0.5))
    chosen = {_without_number(name) for name in rest[: drawn.randrange(1, 8)]}
    left = [name for name in names if name not in {*gone, *shorted}]
    alike = {one: [name for name in left if _without_number(name) == one] for one in sorted(chosen)}
    for group in alike.values():  # like layers are cut alike: no config could say otherwise
        rewrites += _narrowed(source, group, drawn)
    return plan_for(source, *rewrites)


def _without_number(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def dropped(source: Checkpoint, layer: int) -> DropLayers:
    """Return the removal of one of the two layers of a tiny Llama."""
    prefix = "model.layers."
    return DropLayers(
        **{"pass": "layers"}, site="model.layers", evidence=PROVED, prefix=prefix, size=2,
        kept=IndexSet.of([1 - layer]),
        tensors=tuple(name for name in source.tensors if name.startswith(f"{prefix}{layer}.")),
        config={"num_hidden_layers": 1},
    )  # fmt: skip


def _shorted(names: list[str], *, placeholder: bool) -> ShortCircuit:
    whole = {"pass": "dead-module", "site": names[0], "evidence": PROVED, "by": "zero", "tensors": tuple(names)}
    return ShortCircuit(**(whole | {"placeholder": placeholder}))


def _narrowed(source: Checkpoint, names: list[str], drawn: random.Random) -> list[Narrow]:
    info = source.tensors[names[0]]
    if DTYPE_BITS[info.dtype] % 8:
        return []
    found = []
    for dim, size in enumerate(info.shape):
        if size > 1 and drawn.random() < 0.7:
            kept = IndexSet.of(drawn.sample(range(size), drawn.randrange(1, size)))
            whole = {"pass": "narrow", "site": names[0], "evidence": PROVED, "size": size, "kept": kept}
            axes = tuple(Axis(tensor=name, dim=dim) for name in names)
            found.append(Narrow(**whole, axes=axes, relabels="channels"))
    return found
