"""What a search has measured, kept in a file, so that a search that was interrupted goes on, and another one need not.

Figures are kept under what they are of, models are not: one that is taken is fitted once more. They depend on the
source, the text, the code and the machine's kernels, not on the budget, which only says how far a search goes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import filelock
import torch
from pydantic import Field

from collapse.analysis import store
from collapse.analysis.layer_search import Step
from collapse.canonical import digest, file_digest
from collapse.certify.losses import SequenceLoss
from collapse.search.units import Units

CODE = ("analysis", "certify", "models", "search", "passes", "rewrite")  # where a change may give other figures


Token = Annotated[int, Field(ge=0, strict=True)]


class Content(store.Content):
    """The file; keys are what was measured, as JSON."""

    format: Literal["collapse-search/1"] = "collapse-search/1"
    kl: dict[str, list[float]] = Field(default_factory=dict, description="divergences on text that chose, nats a token")
    steps: list[Step] = Field(default_factory=list, description="blocks in the order in which they are missed least")
    losses: dict[str, list[SequenceLoss]] = Field(default_factory=dict, description="by held-out sequence")
    shares: dict[str, dict[str, float]] = Field(default_factory=dict, description="of sizes, counted in a graph")
    written: list[list[Token]] = Field(default_factory=list, description="ids that the source wrote, to fit to")


def _is_text(found: list[list[int]], shape: tuple[int, int], ids: int) -> bool:
    return len(found) == shape[0] and all(len(one) == shape[1] and max(one) < ids for one in found)


class Memory:
    """Measures what it does not know yet, and keeps it at once. A figure that is not finite is not kept."""

    def __init__(self, kept: store.Store[Content]) -> None:
        self._store, self._content = kept, kept.content

    @classmethod
    def empty(cls) -> Memory:
        """Return one that keeps nothing beyond its own time."""
        return cls(store.Store(Content, {}))

    def kl(self, of: object, measure: Callable[[], Iterable[float]]) -> tuple[float, ...]:
        """Return the divergences of what `of` describes."""
        key = key_of(of)
        if key not in self._content.kl:
            found = list(measure())
            if not all(map(math.isfinite, found)):
                return tuple(found)
            self._content.kl[key] = found
            self._save()
        return tuple(self._content.kl[key])

    def steps(self, further: Callable[[tuple[Step, ...]], Iterator[Step]]) -> Iterator[Step]:
        """Yield the steps that are known, then those that `further` gives after them."""
        known = tuple(self._content.steps)
        yield from known
        kept = True
        for step in further(known):
            kept = kept and math.isfinite(step.kl)  # nor are those after it
            if kept:
                self._content.steps.append(step)
                self._save()
            yield step

    def losses(self, of: object, measure: Callable[[], Iterable[SequenceLoss]]) -> list[SequenceLoss]:
        """Return what each held-out sequence loses in the model that `of` describes."""
        key = key_of(of)
        if key not in self._content.losses:
            found = list(measure())
            if not all(math.isfinite(one.nll) and math.isfinite(one.kl) for one in found):
                return found
            self._content.losses[key] = found
            self._save()
        return list(self._content.losses[key])

    def shares(self, of: object, count: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """Return the sizes of the model that `of` describes."""
        key = key_of(of)
        if key not in self._content.shares:
            self._content.shares[key] = dict(count())
            self._save()
        return dict(self._content.shares[key])

    def written(
        self, shape: tuple[int, int], ids: int, write: Callable[[], Iterable[Iterable[int]]]
    ) -> list[list[int]]:
        """Return the sequences that the source, of so many `ids`, writes: so many of so many tokens.

        Raises `CollapseError` where those that are kept are not.
        """
        kept = self._content.written
        if not kept:
            found = [list(one) for one in write()]
            assert _is_text(found, shape, ids)
            kept.extend(found)
            self._save()
        elif not _is_text(kept, shape, ids):
            raise self._store.refused("its written text is of another shape, or not of the model's ids")
        return kept

    def _save(self) -> None:
        with suppress(OSError):  # a full disk ends no search: what is not kept is measured again
            self._store.save()


@contextmanager
def remembering(folder: Path | None, made_for: Mapping[str, Any]) -> Iterator[Memory]:
    """Open what is kept in `folder` of a search that depends on `made_for`; None keeps nothing.

    Where another search of the same has it open, or the folder cannot be written, nothing is kept either. Raises
    `CollapseError` for a file that is damaged or another's.
    """
    with _locked(folder, made_for) as path:
        yield Memory(store.Store(Content, made_for, path))


@contextmanager
def _locked(folder: Path | None, made_for: Mapping[str, Any]) -> Iterator[Path | None]:
    if folder is None:
        yield None
        return
    path = store.place_of(folder, made_for)
    lock = store.lock_of(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (filelock.Timeout, OSError):
        yield None
        return
    try:
        yield path
    finally:
        lock.release()


def key_of(value: object) -> str:
    """Return what a value consists of as JSON, units by kind, block, size and reader.

    Raises `TypeError` for what has none.
    """
    return json.dumps(_plain(value), separators=(",", ":"))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Units):
        return [value.kind, value.block, value.size, value.reader]
    if isinstance(value, Mapping):
        return sorted(([_plain(name), _plain(one)] for name, one in value.items()), key=json.dumps)
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, *(_plain(getattr(value, field.name)) for field in fields(value))]
    raise TypeError(f"{type(value).__name__} cannot be a key")


def surroundings() -> dict[str, Any]:
    """Return what decides the last bits of figures beside the model and the text: the code, kernels and threads."""
    root = Path(__file__).parent.parent
    files = sorted(path for name in CODE for path in (root / name).rglob("*.py"))
    libraries = ("safetensors", "tokenizers", "torch", "transformers")
    return {
        "libraries": {name: metadata.version(name) for name in libraries},
        "code": digest({path.relative_to(root).as_posix(): file_digest(path) for path in files}),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
