"""How weights are laid out on disk: the safetensors header, shards and their index."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from collapse.checkpoint import DTYPE_BITS, SINGLE
from collapse.rewrite.tensors import OutputTensor


@dataclass(frozen=True)
class Shard:
    """One weight file: its name, and its tensors in the order of their data."""

    file: str
    tensors: tuple[OutputTensor, ...]


def header(tensors: Sequence[OutputTensor]) -> bytes:
    """Return the safetensors header (length prefix included) of tensors stored in the given order.

    The same bytes as the safetensors library writes: compact JSON, metadata first, padded with spaces to 8.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    body = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


def shards(tensors: Sequence[OutputTensor], limit: int) -> tuple[Shard, ...]:
    """Divide tensors, in their order, into files of at most `limit` data bytes; a larger tensor has its own file.

    File names are ours alone, never the source's.
    """
    groups: list[list[OutputTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        return (Shard(SINGLE, stored(groups[0])),)
    total = len(groups)
    return tuple(
        Shard(f"model-{number:05d}-of-{total:05d}.safetensors", stored(group))
        for number, group in enumerate(groups, start=1)
    )


def stored(tensors: Sequence[OutputTensor]) -> tuple[OutputTensor, ...]:
    """Return tensors in the order of their data: wide elements first, so that each is aligned, then by name."""
    return tuple(sorted(tensors, key=lambda tensor: (-DTYPE_BITS[tensor.dtype], tensor.name)))


def index(files: Sequence[Shard]) -> bytes:
    """Return `model.safetensors.index.json` for the given shards."""
    tensors = [tensor for shard in files for tensor in shard.tensors]
    totals = {"total_parameters": sum(t.numel for t in tensors), "total_size": sum(t.nbytes for t in tensors)}
    weight_map = {tensor.name: shard.file for shard in files for tensor in shard.tensors}
    return (json.dumps({"metadata": totals, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n").encode()
