"""Calls of every kind on two programs, to be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from collapse.program import Program

Weights = Mapping[str, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]


def prompts(batch: int = 3, length: int = 13, padding: int = 0) -> Pair:
    ids = torch.randint(3, 48, (batch, length), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return ids, mask


def both(
    first: tuple[Program, Weights], second: tuple[Program, Weights], *, padding: int = 0, cuts: tuple[int, ...] = (13,)
) -> Iterator[tuple[Pair, list[Pair]]]:
    """Feed the same chunks to both; yield the logits, and the caches, of each."""
    ids, mask = prompts(padding=padding)
    caches: list[tuple[torch.Tensor, ...] | None] = [None, None]
    start = 0
    for stop in cuts:
        logits = []
        for number, (program, weights) in enumerate((first, second)):
            found, caches[number] = program.run(weights, ids[:, start:stop], mask[:, :stop], caches[number])
            logits.append(found)
        yield (logits[0], logits[1]), list(zip(caches[0] or (), caches[1] or (), strict=True))
        start = stop
