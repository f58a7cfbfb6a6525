"""Tiny quantised checkpoints, written here format by format, with the plain weights that they stand for.

The values are drawn, not rounded from others: each writer knows the exact weight that its tensors mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from collapse.auto import auto_class
from collapse.checkpoint import Checkpoint
from tests.architectures import tiny_config, tiny_model

GROUP, BLOCK = 16, 16
SIZES = dict(hidden_size=32, intermediate_size=64, tie_word_embeddings=False)
EXCLUDED = "model.layers.1.mlp.down_proj"  # not quantised, and listed as such where the format has such a list
Tensors = dict[str, torch.Tensor]
Written = tuple[torch.Tensor, Tensors]


def packed(values: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Put the unsigned values of the last dimension into int32 words, the first one lowest."""
    grouped = values.long().reshape(*values.shape[:-1], -1, 32 // bits)
    words = (grouped << (torch.arange(32 // bits) * bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def drawn(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def scales(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.randint(1, 9, shape) / 64).to(dtype)  # exact in every dtype


def spread(values: torch.Tensor, rows: int = 1, columns: int = 1) -> torch.Tensor:
    return values.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def fp8(out: int, size: int) -> Written:
    weight = ((drawn(33, out, size) - 16) / 16).to(torch.float8_e4m3fn)
    scale = scales(torch.float32, out // BLOCK, size // BLOCK) * 8
    return weight.float() * spread(scale, BLOCK, BLOCK), {"weight": weight, "weight_scale_inv": scale}


def gptq(out: int, size: int) -> Written:
    values, zeros, scale = (
        drawn(16, out, size),
        drawn(15, size // GROUP, out) + 1,
        scales(torch.float16, size // GROUP, out),
    )
    weight = (values - spread(zeros.T, 1, GROUP)) * spread(scale.T, 1, GROUP)
    g_idx = (torch.arange(size) // GROUP).to(torch.int32)
    return weight, {
        "qweight": packed(values).T.contiguous(), "qzeros": packed(zeros - 1), "scales": scale, "g_idx": g_idx,
    }  # fmt: skip


def awq(out: int, size: int) -> Written:
    values, zeros, scale = (
        drawn(16, size, out),
        drawn(16, size // GROUP, out),
        scales(torch.float16, size // GROUP, out),
    )
    weight = (values - spread(zeros, GROUP)) * spread(scale, GROUP)
    woven = [each.reshape(len(each), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1) for each in (values, zeros)]
    return weight.T, {"qweight": packed(woven[0]), "qzeros": packed(woven[1]), "scales": scale}


def nf4(out: int, size: int) -> Written:
    codes, table = drawn(16, out * size), (torch.arange(16) - 8) / 8
    largest = scales(torch.float32, out * size // 64) * 8
    weight = (table[codes].reshape(-1, 64) * largest[:, None]).reshape(out, size)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [out, size]}
    return weight, {
        "weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None], "weight.absmax": largest,
        "weight.quant_map": table, "weight.quant_state.bitsandbytes__nf4": as_bytes(state),
    }  # fmt: skip


def double_nf4(out: int, size: int) -> Written:
    _, tensors = nf4(out, size)
    count, table, offset = out * size // 64, (torch.arange(256) - 128) / 256, 0.5
    levels, outer = drawn(256, count), scales(torch.float32, -(-count // 256))
    state = json.loads(bytes(tensors["weight.quant_state.bitsandbytes__nf4"].tolist()))
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    codes = torch.stack([tensors["weight"][:, 0] >> 4, tensors["weight"][:, 0] & 15], 1).flatten().long()
    largest = table[levels] * outer.repeat_interleave(256)[:count] + offset
    weight = (tensors["weight.quant_map"][codes].reshape(-1, 64) * largest[:, None]).reshape(out, size)
    return weight, tensors | {
        "weight.absmax": levels.to(torch.uint8), "weight.nested_absmax": outer, "weight.nested_quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": as_bytes(state),
    }  # fmt: skip


def as_bytes(state: Mapping[str, Any]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def int8(out: int, size: int) -> Written:
    weight, largest = (drawn(255, out, size) - 127).to(torch.int8), scales(torch.float32, out) * 8
    return weight.float() * (largest / 127)[:, None], {
        "weight": weight, "SCB": largest, "weight_format": torch.zeros((), dtype=torch.uint8),
    }  # fmt: skip


def compressed_int4(out: int, size: int) -> Written:
    values, zeros, scale = (
        drawn(16, out, size),
        drawn(16, out, size // GROUP),
        scales(torch.bfloat16, out, size // GROUP),
    )
    weight = (values - spread(zeros, 1, GROUP)) * spread(scale, 1, GROUP)
    return weight, {
        "weight_packed": packed(values), "weight_scale": scale, "weight_zero_point": packed(zeros.T).T.contiguous(),
        "weight_shape": torch.tensor([out, size]),
    }  # fmt: skip


def compressed_fp8(out: int, size: int) -> Written:
    weight, scale = ((drawn(33, out, size) - 16) / 16).to(torch.float8_e4m3fn), scales(torch.bfloat16, out, 1) * 8
    return weight.float() * scale.float(), {
        "weight": weight, "weight_scale": scale, "input_scale": torch.tensor([0.5], dtype=torch.bfloat16),
    }  # fmt: skip


def _groups(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "ignore": ["lm_head", EXCLUDED], "config_groups": {"group_0": group},
    }  # fmt: skip


WRITERS: dict[str, tuple[Callable[[int, int], Written], dict[str, Any]]] = {
    "fp8": (
        fp8,
        dict(quant_method="fp8", weight_block_size=[BLOCK, BLOCK], modules_to_not_convert=["lm_head", EXCLUDED]),
    ),
    "gptq": (gptq, dict(quant_method="gptq", bits=4, group_size=GROUP, desc_act=False, sym=False)),
    "awq": (
        awq,
        dict(quant_method="awq", bits=4, group_size=GROUP, version="gemm", modules_to_not_convert=[EXCLUDED]),
    ),
    "nf4": (nf4, dict(quant_method="bitsandbytes", load_in_4bit=True, llm_int8_skip_modules=["lm_head", EXCLUDED])),
    "double-nf4": (
        double_nf4,
        dict(quant_method="bitsandbytes", load_in_4bit=True, llm_int8_skip_modules=["lm_head", EXCLUDED]),
    ),
    "int8": (int8, dict(quant_method="bitsandbytes", load_in_8bit=True, llm_int8_skip_modules=["lm_head", EXCLUDED])),
    "compressed-int4": (
        compressed_int4,
        _groups("pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=GROUP),
    ),
    "compressed-fp8": (compressed_fp8, _groups("float-quantized", num_bits=8, type="float", strategy="channel")),
}
LISTED = tuple(name for name in WRITERS if name != "gptq")  # gptq has no list of modules that are left alone


def save_quantised(
    scheme: str,
    root: Path,
    *,
    idle: int | None = None,
    kind: str = "llama",
    head: bool = False,
    excluded: str = EXCLUDED,
    listed: tuple[str, ...] = (),
    extra: Callable[[Tensors], Tensors] = lambda written: {},
    **changes: Any,
) -> tuple[Checkpoint, Tensors]:
    """Write a tiny model with its projections quantised; return it and its plain weights, as the files name them.

    The layer `idle` adds nothing to what it is given. With `head` the output head is quantised too.
    """
    write, values = WRITERS[scheme]
    tiny_model(kind, **(changes if "text_config" in changes else {**SIZES, **changes})).save_pretrained(
        root
    )  # as transformers names tensors in files
    (file,) = root.glob("*.safetensors")
    plain = load_file(file)
    torch.manual_seed(1)
    written: Tensors = {}
    for name, tensor in plain.items():
        module = name.removesuffix(".weight")
        parts = {"weight": tensor}
        if _is_quantised(name, tensor, head) and not (module == excluded and scheme in LISTED):
            plain[name], parts = write(*tensor.shape)
        if _is_idle(name, idle):
            plain[name], parts = plain[name] * 0, {part: _silenced(part, value) for part, value in parts.items()}
        written |= (
            {name: tensor}
            if len(parts) == 1 and not _is_idle(name, idle)
            else {f"{module}.{part}": value for part, value in parts.items()}
        )
    save_file(written | extra(written), file, {"format": "pt"})
    config = json.loads((root / "config.json").read_text())
    lists = {"modules_to_not_convert": list(listed)} if listed else {}
    (root / "config.json").write_text(json.dumps(config | {"quantization_config": values | lists}))
    return Checkpoint.open(root), plain


def _is_quantised(name: str, tensor: torch.Tensor, head: bool) -> bool:
    if tensor.ndim != 2 or any(size % BLOCK for size in tensor.shape):
        return False
    return ("layers" in name and "gate.weight" not in name) or (head and name == "lm_head.weight")


def _is_idle(name: str, layer: int | None) -> bool:
    return (
        layer is not None
        and name.startswith(f"model.layers.{layer}.")
        and name.endswith(("o_proj.weight", "down_proj.weight"))
    )


def _silenced(part: str, value: torch.Tensor) -> torch.Tensor:
    """A scale of zero makes a weight of zeros."""
    is_scale = part in {"scales", "weight_scale", "weight_scale_inv", "SCB", "weight.quant_map"}
    return torch.zeros_like(value) if is_scale or (part == "weight" and value.dtype is torch.float32) else value


def plain_model(plain: Tensors, kept: list[int], kind: str = "llama", **changes: Any) -> Any:
    """The plain model of some of the layers."""
    sizes = {**SIZES, **changes, "num_hidden_layers": len(kept)}
    config = tiny_config(kind, **sizes)
    state: Tensors = {}
    for name, tensor in plain.items():
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            if int(parts[2]) not in kept:
                continue
            parts[2] = str(kept.index(int(parts[2])))
        state[".".join(parts)] = tensor.float()
    model, info = (
        auto_class(config)
        ._model_mapping[type(config)]
        .from_pretrained(None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True)
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model.eval()
