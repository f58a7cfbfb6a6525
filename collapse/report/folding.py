"""Fold what equal consecutive layers have in common, so that thirty of them take one line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
LAYER = re.compile(r"^(?P<list>.*?)\.(?P<index>\d+)(?P<rest>\..*)?$")
FOLDED = re.compile(r"\.\{(\d+)-(\d+)\}")


@dataclass(frozen=True)
class Folded(Generic[T]):
    """`count` modules of equal value. `path` is a module path, or one such as `model.layers.{0-29}.mlp`."""

    path: str
    count: int
    value: T


def fold(values: Mapping[str, T]) -> tuple[Folded[T], ...]:
    """Join consecutive layers whose modules all have equal values; the order of the rest is kept."""
    layers: dict[str, dict[int, dict[str, T]]] = {}
    for path, value in values.items():
        if match := LAYER.match(path):
            inside = layers.setdefault(match["list"], {}).setdefault(int(match["index"]), {})
            inside[match["rest"] or ""] = value
    done: set[str] = set()
    result: list[Folded[T]] = []
    for path, value in values.items():
        match = LAYER.match(path)
        if match is None:
            result.append(Folded(path, 1, value))
        elif match["list"] not in done:
            done.add(match["list"])
            result.extend(_fold_list(match["list"], layers[match["list"]]))
    return tuple(result)


def _fold_list(name: str, layers: Mapping[int, Mapping[str, T]]) -> list[Folded[T]]:
    runs: list[list[int]] = []
    for index in sorted(layers):
        follows = bool(runs) and runs[-1][1] == index - 1 and dict(layers[runs[-1][0]]) == dict(layers[index])
        if follows:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return [
        Folded(f"{name}.{first if first == last else f'{{{first}-{last}}}'}{rest}", last - first + 1, value)
        for first, last in runs
        for rest, value in layers[first].items()
    ]


def unfold(path: str) -> tuple[str, ...]:
    """Return the module paths that a folded path stands for."""
    match = FOLDED.search(path)
    if match is None:
        return (path,)
    before, after = path[: match.start()], path[match.end() :]
    return tuple(f"{before}.{index}{after}" for index in range(int(match[1]), int(match[2]) + 1))
