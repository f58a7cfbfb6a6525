"""What a file from elsewhere may hold, checked before any library sees it: JSON of bounded size, configs without traps.

transformers builds whatever a config.json asks for: a list of as many labels, a module for each of as many layers,
an attention kernel fetched from a hub. Here such a config is one clear error instead.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from collapse.errors import CheckpointError, UnsupportedError

MAX_JSON = 1 << 24  # bytes of a config; the largest public ones have a tenth
MAX_TOKENIZER = 1 << 28  # bytes of a tokenizer.json; the largest public ones have an eighth
MAX_DEPTH = 64
MAX_INT = 1 << 63
MAX_MODULES = 1 << 17  # layers times experts: each may be a module of its own
LAYERS = re.compile(r"(layers?|blocks|stages|depths?)$")
EXPERTS = re.compile(r"(^|_)experts$")
TAKEN = re.compile(r"(^|_)(experts_per_tok(en)?|moe_top_?k|router_top_?k)$")
# What a number may be at most by the ending of its field's name; the deepest public models have 160 layers.
LIMITS = (
    (LAYERS, 1000),
    (EXPERTS, 1 << 14),
    (re.compile(r"(heads|groups|codebooks|levels)$"), 1 << 16),
    (re.compile(r"labels$"), MAX_MODULES),
    (re.compile(r"(size|dims?|embd|model|positions?|embeddings|length|width|channels|rank|window|ctx)$"), 1 << 31),
)
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
KERNELS = re.compile(r"(attn|attention|experts)_implementation$")


def read_json(path: Path, limit: int = MAX_JSON) -> dict[str, Any]:
    """Read a JSON object; raises `CheckpointError` with the line where it breaks, and above `limit` bytes."""
    try:
        raw = read_bounded(path, limit)
        value = loads(raw, unique=True)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not valid JSON ({error})", where=str(path), fix="fetch the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError("not a JSON object", where=str(path), fix="fetch the file again")
    _require_shallow(value, path)
    return value


def read_bounded(path: Path, limit: int = MAX_JSON) -> bytes:
    """Return the bytes of a file that has at most `limit`; raises `CheckpointError`."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", where=str(path)) from None
    if len(raw) > limit:
        raise CheckpointError(f"has more than {limit} bytes", where=str(path), fix="fetch the file again")
    return raw


def loads(raw: bytes, *, unique: bool = False) -> Any:
    """Return the value of JSON in UTF-8; `unique` refuses objects with a name twice, of which readers differ.

    Raises `ValueError`, also for text with half a surrogate pair, which cannot be written again, and `RecursionError`.
    """
    value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique if unique else None)
    if SURROGATE.search(raw):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands twice")
    return result


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Raise `CheckpointError` for numbers that no model has, `UnsupportedError` for code from elsewhere."""
    for path, key, value in _fields(config, ""):
        if key == "auto_map":
            wanted = f"config.json asks for remote code ({path})"
            raise UnsupportedError(wanted, where=where, fix="collapse never runs it")
        if KERNELS.search(key) and "/" in json.dumps(value):
            raise UnsupportedError(
                f"config.json asks for a kernel from elsewhere ({path})", where=where, fix="remove it"
            )
        if isinstance(value, float) and math.isnan(value):
            raise CheckpointError(f"{path} is no number (NaN)", where=where, fix="fetch the config again")
        if type(value) is int and abs(value) > (limit := _limit(key)):
            fix = "fetch the config again"
            raise CheckpointError(f"{path} = {_shown(value)}: allowed are up to {limit}", where=where, fix=fix)
    _check_modules(config, where)


def too_few_experts(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return experts and experts a token, of the config or a part of it, where there are fewer than a token takes."""
    for part in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        numbers = {key: value for key, value in part.items() if type(value) is int and value > 0}
        counts = [value for key, value in numbers.items() if EXPERTS.search(key) and "shared" not in key]
        taken = max((value for key, value in numbers.items() if TAKEN.search(key)), default=0)
        if counts and min(counts) < taken:
            return min(counts), taken
    return None


def _fields(value: Any, path: str, key: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield dotted path, nearest name and value of everything in a config; an element has the name of its list."""
    if path:
        yield path, key, value
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _fields(inner, f"{path}.{name}" if path else name, name)
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from _fields(inner, f"{path}[{at}]", key)


def _limit(key: str) -> int:
    return next((limit for pattern, limit in LIMITS if pattern.search(key)), MAX_INT - 1)


def _check_modules(config: Mapping[str, Any], where: str) -> None:
    """Refuse more modules than any model has, though each of two numbers alone would do."""
    for part in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        numbers = {key: value for key, value in part.items() if type(value) is int and value > 0}
        layers, experts = (
            max((value for key, value in numbers.items() if pattern.search(key)), default=1)
            for pattern in (LAYERS, EXPERTS)
        )
        if layers * experts > MAX_MODULES:
            raise CheckpointError(f"{layers} layers of {experts} experts are more than any model has", where=where)


def _require_shallow(value: Any, path: Path) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise CheckpointError(f"nested more than {MAX_DEPTH} deep", where=str(path), fix="fetch the file again")


def _shown(value: int) -> str:
    return str(value) if abs(value) < 10**20 else f"about 2^{value.bit_length()}"
