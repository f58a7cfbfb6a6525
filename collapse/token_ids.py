"""Where JSON side files name token ids and token strings: one walk, used to collect and to renumber them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from collapse.errors import UnsupportedError

ID_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "processor_config.json",
            "preprocessor_config.json")  # fmt: skip
NAME_FILES = ("tokenizer_config.json", "special_tokens_map.json")
ID_FIELD = re.compile(
    r"(^|_)token_(ids?|index|indices)$|^(bos|eos|pad|unk|sep|cls|mask|boi|eoi|boa|eoa|eot|stop)_ids?$"
)
ID_LISTS = frozenset(
    (
        "suppress_tokens",
        "begin_suppress_tokens",
        "bad_words_ids",
        "force_words_ids",
        "lang_to_id",
        "task_to_id",
    )
)
PAIRED = {"forced_decoder_ids": 1, "sequence_bias": 0}  # lists of pairs; the number says which half holds ids

Replace = Callable[[int, str], int]


def map_ids(config: Any, size: int, replace: Replace, path: str = "") -> Any:
    """Return `config` with `replace(id, dotted field)` in place of every token id.

    Walks nested configs, except one whose own `vocab_size` differs from `size`: that one speaks another
    vocabulary. Negative ids mean "none" and stay.
    """
    if isinstance(config, list):
        return [map_ids(item, size, replace, f"{path}[{at}]") for at, item in enumerate(config)]
    if not isinstance(config, Mapping) or (path and config.get("vocab_size", size) != size):
        return config
    return {key: _map_field(key, value, size, replace, f"{path}.{key}" if path else key)
            for key, value in config.items()}  # fmt: skip


def _map_field(key: str, value: Any, size: int, replace: Replace, path: str) -> Any:
    if key in PAIRED and isinstance(value, list):
        return [_map_pair(pair, PAIRED[key], replace, path) for pair in value]
    if ID_FIELD.search(key) or key in ID_LISTS:
        return _map_leaves(value, replace, path)
    return map_ids(value, size, replace, path)


def _map_pair(pair: Any, half: int, replace: Replace, path: str) -> Any:
    if not isinstance(pair, list) or len(pair) != 2:
        return pair
    mapped = _map_leaves(pair[half], replace, path)
    return [mapped, pair[1]] if half == 0 else [pair[0], mapped]


def _map_leaves(value: Any, replace: Replace, path: str) -> Any:
    if isinstance(value, list):
        return [_map_leaves(item, replace, path) for item in value]
    if isinstance(value, Mapping):
        return {key: _map_leaves(item, replace, f"{path}.{key}") for key, item in value.items()}
    return replace(value, path) if type(value) is int and value >= 0 else value


def ids_in(config: Any, size: int) -> tuple[tuple[str, int], ...]:
    """Return every (dotted field, token id) of a side file."""
    found: list[tuple[str, int]] = []

    def note(number: int, path: str) -> int:
        found.append((path, number))
        return number

    map_ids(config, size, note)
    return tuple(found)


def names_in(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield every (field, token string) that a tokenizer_config.json or special_tokens_map.json names."""
    for key, value in config.items():
        if key.endswith("_token"):
            yield from _strings(key, value)
        elif key in {"additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"}:
            inner = value.values() if isinstance(value, Mapping) else value
            for item in inner if isinstance(value, list | Mapping) else ():
                yield from _strings(key, item)


def _strings(key: str, value: Any) -> Iterator[tuple[str, str]]:
    content = value.get("content") if isinstance(value, Mapping) else value
    if isinstance(content, str) and content:
        yield key, content


def size_fields(config: Mapping[str, Any], size: int | None = None) -> tuple[tuple[str, int], ...]:
    """Return (dotted field, rows) of `vocab_size`, top level and text config, where equal to `size`.

    Given a size, so are the fields of further token tables, such as `vocab_size_per_layer_input`.
    """
    found = []
    for prefix, part in (("", config), ("text_config.", config.get("text_config"))):
        for name, rows in part.items() if isinstance(part, Mapping) else ():
            wanted = name == "vocab_size" if size is None else name.startswith("vocab_size") and rows == size
            if wanted and type(rows) is int:
                found.append((f"{prefix}{name}", rows))
    return tuple(found)


def vocab_size(config: Mapping[str, Any]) -> int:
    """Return the rows of the token table by config.json; the text config goes before the top level."""
    fields = size_fields(config)
    if not fields:
        raise UnsupportedError("no vocab_size", where="config.json", fix="the vocabulary stays as it is")
    return fields[-1][1]
