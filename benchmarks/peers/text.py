"""The benchmark's text, with whole sources held out: log systems, JSON files, Python modules.

The rule is fixed and looks at names alone: of the sources sorted by name every third is for evaluation, of the few JSON
sources every second. Logs, JSON and prose lie beside the checkout in ../shared/data; code is Python's own library.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import Encoding, Tokenizer

from benchmarks.results import ROOT
from collapse.canonical import digest
from collapse.errors import CollapseError
from collapse.schema import BUILTIN

DATA = ROOT.parent / "shared" / "data"
FOLDERS = {"log": "logs", "json": "json", "text": "prose"}
SUFFIXES = {"log": (".log",), "json": (".json", ".jsonl"), "text": (".txt",), "code": (".py",)}
LENGTH = 256  # tokens of a row
SPAN = 4096  # characters that a row is cut from; more where these are too few tokens


@dataclass(frozen=True)
class Source:
    """One system, file or module."""

    name: str
    text: str


@dataclass(frozen=True)
class Split:
    """Sources to calibrate on, and others to evaluate on; of prose all may calibrate."""

    kind: str
    calibration: tuple[Source, ...]
    evaluation: tuple[Source, ...]

    @property
    def record(self) -> dict[str, dict[str, object]]:
        """Names and SHA-256 of either side."""
        sides = {"calibration": self.calibration, "evaluation": self.evaluation}
        return {
            side: {"sources": [source.name for source in held], "digest": digest([source.text for source in held])}
            for side, held in sides.items()
        }


@dataclass(frozen=True)
class Rows:
    """Token ids [n, length], and how many bytes of text the tokens after each row's first stand for."""

    ids: torch.Tensor
    byte_count: int


def split_of(kind: str, data: Path = DATA) -> Split:
    """Return the sources of `kind` (log, json, code or text); raises `CollapseError` where its folder is not there."""
    folder = Path(sysconfig.get_path("stdlib")) if kind == "code" else data / FOLDERS[kind]
    if not folder.is_dir():
        raise CollapseError(f"the folder with {kind} text is not there", where=str(folder), fix="give --data")
    sources = _sources(folder, SUFFIXES[kind])
    if not sources:
        raise CollapseError("no text in it", where=str(folder), fix="give --data")
    if kind == "text":
        return Split(kind, sources, ())
    step = 2 if kind == "json" else 3
    held_out = sources[step - 1 :: step]
    return Split(kind, (*(source for source in sources if source not in held_out), *_samples(kind)), held_out)


def _samples(kind: str) -> tuple[Source, ...]:
    """Return the built-in samples of a kind; those of code are modules of Python's library, which may be held out."""
    if kind == "code":
        return ()
    found = _sources(BUILTIN / kind, SUFFIXES[kind])
    return tuple(Source(f"built-in {source.name}", source.text) for source in found)


def _sources(folder: Path, suffixes: tuple[str, ...]) -> tuple[Source, ...]:
    """Read the files right in `folder`; those of one family, such as two forms of one answer, are one source.

    Modules with a leading underscore are left out: one of them says how Python was built on this machine.
    """
    families: dict[str, list[str]] = {}
    for path in sorted(path for path in folder.iterdir() if path.suffix in suffixes and path.name[0] != "_"):
        family = path.stem if path.suffix == ".py" else re.split(r"[._-]", path.name)[0]
        families.setdefault(family, []).append(path.read_text(encoding="utf-8", errors="replace"))
    return tuple(Source(name, "\n".join(texts)) for name, texts in families.items())


def draw(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    tokens: int,
    *,
    length: int = LENGTH,
    seed: int = 0,
    at_lines: bool = True,
) -> Rows:
    """Return rows of `length` tokens, `tokens` together, from all sources alike.

    Of more sources than rows some are drawn. Rows start at lines, or else anywhere, spread over the source: one in each
    of as many equal parts as the source has rows. Where they start does not depend on the tokenizer. Special tokens are
    added as the tokenizer does. Raises `CollapseError` where the sources are too short.
    """
    count, random = max(1, tokens // length), Random(f"peers {seed}")
    long = [source for source in sources if len(source.text) >= 2 * SPAN]
    if not long:
        raise CollapseError(f"no source has {2 * SPAN} characters", where="text", fix="give longer text")
    chosen = [long[place] for place in sorted(random.sample(range(len(long)), min(count, len(long))))]
    rows: list[Sequence[int]] = []
    byte_count = 0
    for number, source in enumerate(chosen):
        for start in _starts(source.text, len(range(number, count, len(chosen))), random, at_lines):
            ids, size = _row(source, start, tokenizer, length)
            rows.append(ids)
            byte_count += size
    return Rows(torch.tensor(rows), byte_count)


def _starts(text: str, count: int, random: Random, at_lines: bool) -> Iterable[int]:
    part = (len(text) - SPAN) / count
    for number in range(count):
        place = int(part * (number + random.random()))
        line = text.rfind("\n", 0, place) + 1
        yield line if at_lines and place - line < SPAN else place


def _row(source: Source, start: int, tokenizer: Tokenizer, length: int) -> tuple[Sequence[int], int]:
    span = SPAN
    while True:
        text = source.text[start : start + span]
        encoded: Encoding = tokenizer.encode(text)
        if len(encoded.ids) > length:  # one more, since the last may be a special token without text
            break
        if start + span >= len(source.text):
            start = max(0, start - span)
        span *= 2
        if span > 2 * len(source.text):
            raise CollapseError(f"less than {length} tokens", where=source.name, fix="give longer text")
    first, last = encoded.offsets[0][1], encoded.offsets[length - 1][1]
    return encoded.ids[:length], len(text[first:last].encode())
