"""SLEB (Song et al., 2024): drop the block whose absence costs least perplexity, then look again."""

from __future__ import annotations

from collections.abc import Collection

import torch
from transformers import PreTrainedModel

from benchmarks.peers.blocks import batches, logits_of, next_token_loss, replaced, residual_stream, skipped
from benchmarks.peers.calibration import Calibration
from benchmarks.peers.cut import Removal
from benchmarks.peers.structure import Structure


@torch.no_grad()
def losses_without(
    model: PreTrainedModel, structure: Structure, ids: torch.Tensor, gone: Collection[int]
) -> dict[int, float]:
    """Return by block the summed next-token loss over rows [n, length] without it and without those `gone`.

    What comes before the block is computed once for all candidates.
    """
    blocks = structure.blocks(model)
    losses = dict.fromkeys((number for number in range(structure.size) if number not in gone), 0.0)
    for batch in batches(ids, model.get_input_embeddings().weight.shape[0]):
        with replaced(skipped(blocks[number] for number in gone)):
            inputs = residual_stream(model, blocks, batch)[0]
        for number in losses:
            earlier = skipped(blocks[n] for n in {*gone, *range(number)})
            with replaced(earlier | {blocks[number]: lambda _, hidden=inputs[number]: hidden}):
                losses[number] += float(next_token_loss(logits_of(model, batch), batch))
    return losses


def sleb(calibration: Calibration, share: float) -> Removal:
    """Drop one block after the other; perplexity grows with the loss, so the loss is what is compared."""
    count, dropped = calibration.blocks_for(share), calibration.dropped
    while len(dropped) < count:
        losses = losses_without(calibration.model, calibration.structure, calibration.search, dropped)
        dropped.append(min(losses, key=lambda number: (losses[number], number)))
    return Removal("sleb", gone=tuple(sorted(dropped[:count])))
