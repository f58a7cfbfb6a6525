"""Derive a schema from the user's own files, and say what was seen."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from collapse import textfile
from collapse.domain import CHARSETS
from collapse.errors import SchemaError
from collapse.plan import Record
from collapse.schema import InputSchema, TextType

SOURCE_SUFFIXES = frozenset(
    f".{name}"
    for name in re.findall(r"\w+", "c cc cpp cs go h hpp java js jsx kt lua php pl py pyi rb rs sh sql swift ts")
)
LOG_SHARE = 0.4
CODE_SHARE = 0.25
_LOOKED_AT = 20_000

_STAMP = re.compile(
    r"\d{4}[-/.]\d\d[-/.]\d\d"  # 2024-05-01
    r"|\d\d[-/.]\d\d[-/.]\d\d(?:\d\d)?[ T]\d\d"  # 17/06/09 20
    r"|\d\d?[/ ][A-Z][a-z]{2}[/ ]\d{4}"  # 01/May/2024
    r"|\b\d\d:\d\d:\d\d\b"  # 12:30:00
    r"|\[ *\d+\.\d{3,}\]"  # [    0.123456], the kernel's
    r"|\b\d{10}\b"  # seconds since 1970
)
_LEVEL = re.compile(
    r"\b(?:TRACE|DEBUG\d?|INFO|NOTICE|WARN|WARNING|ERROR|FATAL|CRITICAL|PASSED|FAILED)\b"
    r"|\[(?:debug|info|notice|warn|error)\]"
    r"|^(?:debug\d|error|warning|trace|info): "
)
_CODE = re.compile(
    r"[;{}]\s*$"
    r"|^\s*[\])}]"
    r"|^\s*(?:def|class|return|import|from \S+ import|elif|raise|func|fn|const|var|public|private|static)\b"
    r"|^\s*(?:if|for|while|else|try|except)\b.*[:{]$"
    r"|^\s*(?:@\w|#include|#define|#if|//|/\*)"
    r"|^\s*[\w.\[\]]+(?:, *[\w.]+)* [-+|]?= \S"
    r"|^\s*[\w.]+\(.*\)?,?$"
)


class Observed(Record):
    """What `infer_schema` saw. Lengths are in characters, `bytes` after expansion of `.gz`."""

    reason: str
    files: tuple[str, ...]
    bytes: int
    characters: int
    lines: int
    max_line_length: int
    distinct_characters: int
    charset: str | None
    line_ends: dict[str, int]

    def describe(self) -> str:
        """Return the figures as lines of text for a person."""
        names = ", ".join(self.files[:8]) + (", ..." if len(self.files) > 8 else "")
        ends = ", ".join(f"{count} {name}" for name, count in self.line_ends.items() if count) or "none"
        rows = {
            "files": f"{len(self.files)}: {names}",
            "size": f"{self.bytes} bytes, {self.characters} characters, {self.lines} lines",
            "type": self.reason,
            "longest line": f"{self.max_line_length} characters",
            "characters": f"{self.distinct_characters} different; smallest named charset: {self.charset}",
            "line ends": ends,
        }
        return "\n".join(f"{name:<14}{value}" for name, value in rows.items())


def infer_schema(files: Iterable[str | Path]) -> tuple[InputSchema, Observed]:
    """Derive the schema that exactly covers `files`, and what was seen.

    The type comes from the text: JSON if every file parses as JSON (or JSON lines), log if at least 40 % of
    the lines have a time stamp or a level near their beginning, code if the suffixes or 25 % of the lines
    say so, else text. `max_line_length` is that of the longest line, `charset` the smallest named one with
    all the characters, or none. Raises `SchemaError` as `read_corpus` does.
    """
    named = [textfile.split_field(name) for name in files]
    paths = [path for path, _ in named]
    names = textfile.short_names(paths)
    texts = [
        "\n".join(text for _, text in textfile.field_texts(textfile.read_text(path), field, name))
        if field
        else textfile.read_text(path)
        for (path, field), name in zip(named, names, strict=True)
    ]
    if not any(map(str.strip, texts)):
        raise SchemaError("there is no text in it", where="corpus", fix="name files with text")
    kind, reason = _type_of(paths, texts)
    observed = _observe(names, texts, f"{kind}: {reason}")
    schema = InputSchema(type=kind, max_line_length=observed.max_line_length, charset=observed.charset)
    return schema, observed


def _observe(names: Sequence[str], texts: Sequence[str], reason: str) -> Observed:
    characters = set().union(*map(set, texts))
    named = sorted(CHARSETS, key=lambda name: len(CHARSETS[name]))
    pairs = sum(text.count("\r\n") for text in texts)
    feeds = sum(text.count("\n") for text in texts) - pairs
    returns = sum(text.count("\r") for text in texts) - pairs
    split = [line for text in texts for line in re.split(r"\r\n|\n|\r", text)]
    return Observed(
        reason=reason,
        files=tuple(names),
        bytes=sum(len(text.encode()) for text in texts),
        characters=sum(map(len, texts)),
        lines=pairs + feeds + returns + sum(text[-1:] not in {"", "\n", "\r"} for text in texts),
        max_line_length=max(map(len, split)),
        distinct_characters=len(characters),
        charset=next((name for name in named if characters <= CHARSETS[name]), None),
        line_ends={"LF": feeds, "CR LF": pairs, "CR": returns},
    )


def _type_of(paths: Sequence[Path], texts: Sequence[str]) -> tuple[TextType, str]:
    if all(map(_is_json, texts)):
        return "json", "every file is JSON or JSON lines"
    suffixes = {textfile.suffix(path) for path in paths}
    if suffixes <= SOURCE_SUFFIXES:
        return "code", f"every suffix is one of source code ({', '.join(sorted(suffixes))})"
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    lines = lines[:: 1 + len(lines) // _LOOKED_AT]
    logged = sum(_is_logged(line[:100]) for line in lines) / len(lines)
    coded = sum(_CODE.search(line) is not None for line in lines) / len(lines)
    figures = f"{logged:.0%} of the lines have a time stamp or level, {coded:.0%} look like code"
    if suffixes == {".log"} or logged >= max(LOG_SHARE, coded):
        return "log", figures + (", every suffix is .log" if suffixes == {".log"} else "")
    return ("code" if coded >= CODE_SHARE else "text"), figures


def _is_logged(start: str) -> bool:
    return _STAMP.search(start) is not None or _LEVEL.search(start) is not None


def _is_json(text: str) -> bool:
    """Whether `text` is one JSON object or list, or each of its lines is one."""
    if text.lstrip("\ufeff \t\r\n")[:1] not in {"{", "["}:
        return False
    try:
        json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        return all(_is_json_line(line) for line in textfile.lines(text) if line.strip())
    return True


def _is_json_line(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict | list)
    except (ValueError, RecursionError):
        return False
