"""The lists of modules in a `quantization_config`: which are left as they are, which are quantised and how.

Loaders build a module quantised or plain by these lists, so they follow when layers are renumbered or a part of the
model becomes the whole. An entry is a path, the beginning or end of one, or an expression.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

LISTS = ("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules", "modules_to_convert", "ignore")
PATHS = ("block_name_to_quantize", "module_name_preceding_first_block")  # which name modules of the model itself
KEYED = ("dynamic",)  # its keys are expressions, after a sign and a colon
_SPECIAL = re.compile(r"[\\*+?\[\](){}|^$]")
Rename = Callable[[str], str | None]


def module_lists(values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the entries of every list, by its dotted path in the `quantization_config`."""
    return {path: tuple(entries) for path, entries in _lists(values)}


def _lists(values: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    for name in LISTS:
        if isinstance(values.get(name), list):
            yield name, values[name]
    for name in KEYED:
        if isinstance(values.get(name), Mapping):
            yield name, list(values[name])
    for name, group in sorted((values.get("config_groups") or {}).items()):
        if isinstance(group.get("targets"), list):
            yield f"config_groups.{name}.targets", group["targets"]


def renamed(values: Mapping[str, Any], rename: Rename) -> dict[str, Any]:
    """Return the `quantization_config` with every path in its lists renamed; None takes an entry out.

    Expressions stay: whether they still speak of the same modules is for `Selector` to tell.
    """
    result = dict(values)
    for path, entries in _lists(values):
        if path in LISTS:
            result[path] = _renamed(entries, rename)
        elif path not in KEYED:
            name = path.removeprefix("config_groups.").removesuffix(".targets")
            groups = dict(result["config_groups"])
            groups[name] = {**groups[name], "targets": _renamed(entries, rename)}
            result["config_groups"] = groups
    for name in PATHS:
        if isinstance(values.get(name), str):
            result[name] = rename(values[name]) or values[name]
        elif isinstance(values.get(name), list):
            result[name] = _renamed(values[name], rename)
    return result


def _renamed(entries: Iterable[str], rename: Rename) -> list[str]:
    found = (entry if is_expression(entry) else rename(entry) for entry in entries)
    return list(dict.fromkeys(entry for entry in found if entry is not None))


def is_expression(entry: str) -> bool:
    """Whether the entry is a regular expression."""
    return entry.startswith(("re:", "+:", "-:")) or bool(_SPECIAL.search(entry))


class Selector:
    """Says which modules the entries of one list speak of."""

    def __init__(self, entries: Iterable[str]) -> None:
        listed = list(entries)
        self._paths = frozenset(entry for entry in listed if not is_expression(entry))
        self._expressions = [re.compile(re.sub(r"^(re|\+|-):", "", e)) for e in listed if is_expression(e)]

    def __call__(self, module: str) -> bool:
        """Whether some entry is the module, leads to it, is the end of its path or matches it."""
        parts = module.split(".")
        leads = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        ends = (".".join(parts[start:]) for start in range(1, len(parts)))
        if any(path in self._paths for path in (*leads, *ends)):
            return True
        return any(expression.match(module) for expression in self._expressions)
