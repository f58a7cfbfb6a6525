"""Reads quantised weights back as numbers: an exact reference for each scheme, in fp32 on the CPU.

This is what verification runs on where a scheme's own kernels need a GPU or a library of their own. Each function
follows what the scheme's library documents of its layout; speed does not matter here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors import safe_open

from collapse.checkpoint import Checkpoint
from collapse.errors import UnsupportedError
from collapse.quantised import Group, Scheme

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word the 4-bit values 0 to 7 of a row lie
Parts = Mapping[str, torch.Tensor]


def plain_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor as the model without quantisation has it, floating ones in fp32; one weight for each group.

    Of a group come the name of the weight and `[out, in]` values; ranges for activations are left out.
    """
    quantised = checkpoint.quantisation
    for name in checkpoint.tensors:
        group = checkpoint.group(name)
        if group is None:
            tensor = _read(checkpoint, name)
            yield name, tensor.float() if tensor.is_floating_point() else tensor
        elif quantised is not None and name == group.main:
            parts = {member.removeprefix(group.stem): _read(checkpoint, member) for member in group.members}
            yield group.weight, dequantised(quantised.scheme, group, parts)


def dequantised(scheme: Scheme, group: Group, parts: Parts) -> torch.Tensor:
    """Return the weight in fp32; `parts` are the group's tensors by their names within the module."""
    if scheme.method == "gptq":
        return _gptq(scheme, parts)
    if scheme.method == "awq":
        return _awq(parts)
    if scheme.method == "bitsandbytes-4bit":
        return _bnb4(group, parts)
    if scheme.method == "bitsandbytes-8bit":
        return _bnb8(group, parts)
    if group.form.main == "weight_packed":
        return _packed(scheme, parts)
    return _scaled(scheme, group, parts)


def _read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    with safe_open(checkpoint.root / checkpoint.tensors[name].file, framework="pt") as stream:
        tensor: torch.Tensor = stream.get_tensor(name)
    return tensor


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values in int32 words, `[..., n]` to `[..., n * 32 / bits]`, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return values.flatten(-2)


def _gptq(scheme: Scheme, parts: Parts) -> torch.Tensor:
    """Values are packed along the input, zero points along the output; `g_idx` gives each input channel its group.

    The first format stores zero points less one.
    """
    values = _unpacked(parts["qweight"].T.contiguous(), scheme.bits)  # [out, in]
    zeros = _unpacked(parts["qzeros"], scheme.bits)  # [groups, out]
    zeros = zeros + (0 if scheme.values.get("checkpoint_format") == "gptq_v2" else 1)
    scales, count = parts["scales"].float(), values.shape[1]
    groups = parts["g_idx"].long() if "g_idx" in parts else _group_numbers(count, len(scales))
    return (values - zeros[groups].T).float() * scales[groups].T


def _awq(parts: Parts) -> torch.Tensor:
    """Values and zero points are packed along the output, interleaved within each word."""
    order = torch.tensor(AWQ_ORDER)
    values, zeros = (
        _unpacked(words, 4).view(*words.shape, 8)[..., order].flatten(-2)
        for words in (parts["qweight"], parts["qzeros"])
    )
    scales = parts["scales"].float()
    groups = _group_numbers(len(values), len(scales))
    weight = (values - zeros[groups]).float() * scales[groups]  # [in, out]
    return weight.T.contiguous()


def _group_numbers(channels: int, groups: int) -> torch.Tensor:
    return torch.arange(channels) // -(-channels // groups)


def _bnb4(group: Group, parts: Parts) -> torch.Tensor:
    """Two values a byte, the high half first, each an index into `quant_map`; a largest value for each flat block."""
    state = _state(parts)
    raw = parts["weight"].contiguous().view(torch.uint8).flatten()
    codes = torch.stack([raw >> 4, raw & 15], dim=1).flatten().long()
    values, shape = parts["weight.quant_map"].float()[codes], torch.Size(state["shape"])
    largest = parts["weight.absmax"]
    if "weight.nested_absmax" in parts:
        numbers = torch.arange(largest.numel()) // state["nested_blocksize"]
        table, outer = parts["weight.nested_quant_map"].float(), parts["weight.nested_absmax"].float()
        largest = table[largest.long().flatten()] * outer[numbers] + state["nested_offset"]
    values = values[: shape.numel()]
    blocks = torch.arange(len(values)) // state["blocksize"]
    return (values * largest.float()[blocks]).reshape(shape)


def _state(parts: Parts) -> dict[str, Any]:
    """Return what bitsandbytes writes as JSON in a tensor of bytes."""
    (packed,) = (tensor for name, tensor in parts.items() if name.startswith("weight.quant_state."))
    state: dict[str, Any] = json.loads(bytes(packed.tolist()))
    return state


def _bnb8(group: Group, parts: Parts) -> torch.Tensor:
    """One largest value for each row; other than row-major layouts belong to old GPUs."""
    layout = parts.get("weight_format")
    if layout is not None and bool((layout != 0).any()):
        raise UnsupportedError("its weight_format is not row-major", where=group.main, fix="save the checkpoint again")
    return parts["weight"].float() * (parts["SCB"].float()[:, None] / 127)


def _packed(scheme: Scheme, parts: Parts) -> torch.Tensor:
    """Values are packed along the input, zero points along the output, both offset to be unsigned."""
    rows, columns = (int(size) for size in parts["weight_shape"])
    values = _unpacked(parts["weight_packed"], scheme.bits)[:, :columns] - (1 << (scheme.bits - 1))
    scales = parts["weight_scale"].float()
    zeros = parts.get("weight_zero_point")
    if zeros is not None:
        zeros = _unpacked(zeros.T.contiguous(), scheme.bits).T[:rows] - (1 << (scheme.bits - 1))
    groups = _columns_of(parts, columns, scales.shape[-1])
    shifted = values if zeros is None else values - zeros[:, groups]
    return shifted.float() * scales[:, groups]


def _columns_of(parts: Parts, columns: int, groups: int) -> torch.Tensor:
    return parts["weight_g_idx"].long() if "weight_g_idx" in parts else _group_numbers(columns, groups)


def _scaled(scheme: Scheme, group: Group, parts: Parts) -> torch.Tensor:
    """Values in the weight's own shape, times scales that stand for single rows, groups, blocks or all of them."""
    weight = parts[group.form.main].float()
    zeros = parts.get("weight_zero_point")
    if zeros is not None:
        weight = weight - _spread(scheme, zeros.float(), weight.shape, parts)
    scales = parts[group.form.required[0]]
    numbers = (scales.float() - 127).exp2() if scales.dtype is torch.uint8 else scales.float()  # bytes are exponents
    return weight * _spread(scheme, numbers, weight.shape, parts)


def _spread(scheme: Scheme, scales: torch.Tensor, shape: torch.Size, parts: Parts) -> torch.Tensor:
    """Give every element of the weight its scale."""
    if scales.numel() == 1:
        return scales.reshape(())
    if scales.ndim < len(shape):  # one for each row
        return scales.reshape(*scales.shape, *(1,) * (len(shape) - scales.ndim))
    for dim, size in enumerate(shape):
        if scales.shape[dim] == size or scales.shape[dim] == 1:
            continue
        last = dim == len(shape) - 1
        block = scheme.block[dim - len(shape)] if scheme.block else scheme.group if last else 0
        numbers = torch.arange(size) // block if block > 0 else _group_numbers(size, scales.shape[dim])
        scales = scales.index_select(dim, parts["weight_g_idx"].long() if last and "weight_g_idx" in parts else numbers)
    return scales
