"""How much the residual stream turns between blocks, which ShortGPT, UIDL and ReplaceMe choose by."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from benchmarks.peers.blocks import batches, residual_stream
from benchmarks.peers.structure import Structure


@dataclass(frozen=True)
class Turns:
    """Entry [l, m] relates the inputs of blocks l and m; number `size` is the output of the last block.

    `cosine` is the mean cosine over all tokens. `angle` is the angular distance, arccos / pi, of the rows' last tokens,
    as a mean over rows.
    """

    cosine: torch.Tensor
    angle: torch.Tensor


@torch.no_grad()
def turns(model: PreTrainedModel, structure: Structure, ids: torch.Tensor) -> Turns:
    """Run the model on rows [n, length] of calibration tokens, and compare the stream at all pairs of places."""
    places = structure.size + 1
    cosine, angle = torch.zeros(2, places, places, dtype=torch.double)
    blocks = structure.blocks(model)
    for batch in batches(ids, model.get_input_embeddings().weight.shape[0]):
        stream = torch.stack(residual_stream(model, blocks, batch)[0])  # [places, n, length, width]
        unit = torch.nn.functional.normalize(stream.double(), dim=-1)
        cosine += torch.einsum("lntd,mntd->lm", unit, unit)
        last = torch.einsum("lnd,mnd->nlm", unit[:, :, -1], unit[:, :, -1])
        angle += last.clamp(-1, 1).arccos().sum(0) / math.pi
    return Turns(cosine / ids.numel(), angle / len(ids))


def least_run(distance: torch.Tensor, length: int, first: int = 0) -> int:
    """Return the start l >= `first` of the run of `length` blocks with the least distance [l, l + length]."""
    ends = torch.diagonal(distance, offset=length)[first:]
    return first + int(ends.argmin())
