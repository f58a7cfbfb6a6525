"""How a checkpoint is quantised, by the `quantization_config` of its config.json.

A scheme that is not known here is refused by name: what one cannot read one must not cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from collapse.errors import UnsupportedError

FIELD = "quantization_config"
PACKED, PLAIN = "pack-quantized", frozenset({"int-quantized", "float-quantized", "naive-quantized"})
_RANGES = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")
_ZEROS = ("weight_zero_point", "weight_g_idx", *_RANGES)


@dataclass(frozen=True)
class Form:
    """The names of one quantised weight within its module.

    Attributes:
        main: the tensor with the quantised values.
        logical: what the model that is not quantised calls the weight.
        required, optional: the companions.
    """

    main: str
    logical: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()

    @property
    def companions(self) -> tuple[str, ...]:
        """All companions that there can be."""
        return self.required + self.optional


def _fp8(name: str, activation: str) -> Form:
    return Form(name, name, (f"{name}_scale_inv",), (activation,))


def _bnb(kind: str) -> Form:
    state = ("weight.absmax", "weight.quant_map", f"weight.quant_state.bitsandbytes__{kind}")
    return Form("weight", "weight", state, ("weight.nested_absmax", "weight.nested_quant_map"))


_EXPERTS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")  # merged ones are parameters, not modules
FORMS: Mapping[str, tuple[Form, ...]] = {
    "fp8": (
        _fp8("weight", "activation_scale"),
        *(_fp8(name, f"{name}_activation_scale") for name in _EXPERTS),
    ),
    "gptq": (Form("qweight", "weight", ("qzeros", "scales"), ("g_idx",)),),
    "awq": (Form("qweight", "weight", ("qzeros", "scales")),),
    "bitsandbytes-4bit": (_bnb("nf4"), _bnb("fp4")),
    "bitsandbytes-8bit": (Form("weight", "weight", ("SCB",), ("weight_format",)),),
    "compressed-tensors": (
        Form("weight_packed", "weight", ("weight_scale", "weight_shape"), _ZEROS),
        Form("weight", "weight", ("weight_scale",), _ZEROS),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Scheme:
    """One way of quantising.

    Attributes:
        method: `quant_method`; of bitsandbytes with its width, which decides the names.
        place: dotted path of the part of config.json that says so.
        values: that part.
        bits: width of a packed value; 0 where values are not packed.
        group: input channels that share a scale; 0 where that is not what the scales are for, -1 for all of them.
        block: rows and columns that share a scale, where scales form a grid.
    """

    method: str
    place: str
    values: Mapping[str, Any] = field(default_factory=dict, repr=False)
    bits: int = 0
    group: int = 0
    block: tuple[int, int] | None = None

    @property
    def forms(self) -> tuple[Form, ...]:
        """The names that the scheme's weights have in files."""
        return FORMS[self.method]


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of a config.json, None for one that is not quantised.

    Raises `UnsupportedError` naming a `quant_method`, format or layout that is not known.
    """
    for path, values in _places(config):
        try:
            method = _method(path, values)
            return _READERS[method](method, path, values)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:  # a value of another kind
            raise UnsupportedError(f"{path} is not understood ({error})", where="config.json", fix=_FIX) from None
    return None


def _places(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    text = config.get("text_config")
    for prefix, part in (("", config), ("text_config.", text if isinstance(text, Mapping) else {})):
        for name in (FIELD, "compression_config"):
            if part.get(name):
                if not isinstance(part[name], Mapping) or name != FIELD:
                    raise UnsupportedError(f"{prefix}{name} is not understood", where="config.json", fix=_FIX)
                yield f"{prefix}{name}", part[name]


_FIX = "known are fp8, gptq, awq, bitsandbytes and compressed-tensors; else give the checkpoint before quantisation"


def _method(path: str, values: Mapping[str, Any]) -> str:
    method = values.get("quant_method")
    four, eight = (values.get(f"load_in_{n}bit") or values.get(f"_load_in_{n}bit") for n in (4, 8))
    if method == "bitsandbytes" or (method is None and (four or eight)):
        method = "bitsandbytes-8bit" if eight and not four else "bitsandbytes-4bit"
    if method not in _READERS:
        raise UnsupportedError(f"quant_method {method!r} of {path} is not known", where="config.json", fix=_FIX)
    return str(method)


def _unknown(path: str, name: str, value: object) -> UnsupportedError:
    return UnsupportedError(f"{path}: {name} {value!r} is not known", where="config.json", fix=_FIX)


def _read_fp8(method: str, path: str, values: Mapping[str, Any]) -> Scheme:
    block = values.get("weight_block_size")
    if block is not None and not (isinstance(block, list | tuple) and len(block) == 2):
        raise _unknown(path, "weight_block_size", block)
    return Scheme(method, path, values, block=(int(block[0]), int(block[1])) if block else None)


def _read_gptq(method: str, path: str, values: Mapping[str, Any]) -> Scheme:
    bits, group = values.get("bits"), values.get("group_size", 128)
    if bits not in {2, 4, 8}:
        raise _unknown(path, "bits", bits)
    style = values.get("checkpoint_format", values.get("format", "gptq"))
    if style not in {"gptq", "gptq_v2"}:
        raise _unknown(path, "checkpoint_format", style)
    if values.get("pack_dtype", "int32") != "int32":
        raise _unknown(path, "pack_dtype", values["pack_dtype"])
    for key, changes in (values.get("dynamic") or {}).items():
        if isinstance(changes, Mapping) and changes.keys() & {"bits", "group_size", "sym"}:
            raise _unknown(path, "dynamic", key)
    return Scheme(method, path, values, bits=bits, group=group)


def _read_awq(method: str, path: str, values: Mapping[str, Any]) -> Scheme:
    bits, version = values.get("bits", values.get("w_bit")), values.get("version") or values.get("format", "gemm")
    if bits != 4:
        raise _unknown(path, "bits", bits)
    if str(version).lower() != "gemm":
        raise _unknown(path, "version", version)
    return Scheme(method, path, values, bits=4, group=values.get("group_size", values.get("q_group_size", 128)))


def _read_bnb(method: str, path: str, values: Mapping[str, Any]) -> Scheme:
    return Scheme(method, path, values, bits=4 if method == "bitsandbytes-4bit" else 0)


def _read_compressed(method: str, path: str, values: Mapping[str, Any]) -> Scheme:
    status = values.get("quantization_status", "compressed")
    if status not in {"compressed", "frozen"}:  # early files that are compressed say frozen
        raise _unknown(path, "quantization_status", status)
    sparse = (values.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise _unknown(path, "sparsity_config.format", sparse)
    groups = [group for group in (values.get("config_groups") or {}).values() if group.get("weights")]
    formats = {group.get("format") or values.get("format") for group in groups}
    for found in sorted(map(str, formats)):
        if found != PACKED and found not in PLAIN:
            raise _unknown(path, "format", found)
    packed = [group["weights"] for group in groups if (group.get("format") or values.get("format")) == PACKED]
    bits, sizes = {weights.get("num_bits") for weights in packed}, {g["weights"].get("group_size") for g in groups}
    blocks = {tuple(g["weights"].get("block_structure") or ()) for g in groups}
    if len(bits) > 1 or len(sizes) > 1 or len(blocks) > 1:
        raise _unknown(path, "config_groups", "of several widths or group sizes")
    block, width = next(iter(blocks), ()), next(iter(bits), 0)
    if packed and width not in {2, 4, 8}:
        raise _unknown(path, "num_bits", width)
    grid = (int(block[0]), int(block[1])) if len(block) == 2 else None
    return Scheme(method, path, values, bits=width or 0, group=next(iter(sizes), 0) or 0, block=grid)


_READERS = {
    "fp8": _read_fp8, "gptq": _read_gptq, "awq": _read_awq, "bitsandbytes-4bit": _read_bnb,
    "bitsandbytes-8bit": _read_bnb, "compressed-tensors": _read_compressed,
}  # fmt: skip


def weight_of(scheme: Scheme, name: str) -> str:
    """Return what the model that is not quantised would call the weight that the file's tensor `name` is part of.

    A name that no form has is returned as it is.
    """
    for form in scheme.forms:
        for part in (form.main, *form.companions):
            stem = stem_of(name, part)
            if stem is not None:
                return stem + form.logical
    return name


def stem_of(name: str, part: str) -> str | None:
    """Return the module's path with its dot, if `name` is its tensor `part`."""
    stem = name.removesuffix(part)
    return stem if stem != name and (not stem or stem.endswith(".")) else None
