"""Text under a schema: read it, cut it into documents, split it into calibration and held-out, sample it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from collapse import textfile
from collapse.canonical import digest
from collapse.errors import SchemaError
from collapse.infer import Observed, infer_schema
from collapse.schema import BUILTIN, InputSchema, Violation

__all__ = [
    "Corpus",
    "Observed",
    "Split",
    "builtin_corpus",
    "infer_schema",
    "read_corpus",
    "related",
    "sample_texts",
    "sample_tokens",
    "split",
]

BLOCKS = 2400
SMALLEST_BLOCK = 400
RUN = 4  # lines: a document of the sample that shares so many in a row with a user's text is known there


@dataclass(frozen=True)
class Corpus:
    """Documents of text, in the order of their files.

    Attributes:
        documents: the texts, every line end as in the file.
        sources: the name of each document's file, as short as it is unambiguous.
        dropped: how many documents of a built-in sample were left out since they break the schema.
        separator: what goes between two documents in one text where the first has no line end.
    """

    documents: tuple[str, ...]
    sources: tuple[str, ...]
    dropped: int = 0
    separator: str = "\n"

    @property
    def characters(self) -> int:
        """Total length in characters."""
        return sum(map(len, self.documents))

    @property
    def digest(self) -> str:
        """SHA-256 of the documents in order; the names of the files do not count."""
        return digest(list(self.documents))


@dataclass(frozen=True)
class Split:
    """Two disjoint parts of a corpus, as texts of blocks in corpus order.

    Attributes:
        calibration: what analyses and passes may look at.
        held_out: what chose nothing; bounds are computed on it.
        digests: SHA-256 of each part, under `calibration` and `held_out`.
        seed: of the assignment.
    """

    calibration: tuple[str, ...]
    held_out: tuple[str, ...]
    digests: dict[str, str]
    seed: int


def read_corpus(files: Iterable[str | Path], schema: InputSchema, field: str | None = None) -> Corpus:
    """Read `files` as text under `schema`.

    A document is a line (with its line end) of a `.jsonl` file, of a `.log` file and of any file under a log
    schema; the whole of a `.json` file; otherwise paragraphs together 1 to 2 kB long. Each kind may be `.gz`.
    Of a `.jsonl` file a field is taken with `field` or as `path.jsonl:field`.

    Raises `SchemaError`, naming file, line and clause, if a file cannot be read, is not UTF-8 text, breaks
    the schema or its own format, or if there is no text at all.
    """
    named = [textfile.split_field(name) for name in files]
    if field is not None and not any(textfile.suffix(path) == ".jsonl" for path, _ in named):
        raise SchemaError(f"field {field!r} needs a .jsonl file", where="corpus", fix="name one")
    documents: list[str] = []
    sources: list[str] = []
    for (path, own), name in zip(named, textfile.short_names([path for path, _ in named]), strict=True):
        found = list(_documents_of(path, name, schema, own or field, strict=True))
        documents += found
        sources += [name] * len(found)
    if not any(map(str.strip, documents)):
        raise SchemaError("there is no text in it", where="corpus", fix="name files with text")
    return Corpus(tuple(documents), tuple(sources), separator=_separator(schema))


def builtin_corpus(schema: InputSchema) -> Corpus:
    """Return the built-in sample of the schema's type, without the documents that break the schema.

    Raises `SchemaError` if nothing is left.
    """
    files = sorted((BUILTIN / schema.type).iterdir())
    read = [(path.name, text) for path in files for text in _documents_of(path, path.name, schema, None, strict=False)]
    kept = [(name, text) for name, text in read if schema.violation(text) is None]
    if not kept:
        what = f"no document of the built-in {schema.type} sample obeys it"
        raise SchemaError(what, where="schema", fix="relax it, or give your own text with --corpus")
    return Corpus(
        tuple(text for _, text in kept),
        tuple(name for name, _ in kept),
        dropped=len(read) - len(kept),
        separator=_separator(schema),
    )


def related(schema: InputSchema, own: Corpus) -> tuple[str, ...]:
    """Return blocks of the built-in sample of the schema's type without the documents that are in `own` text too.

    Lines of the user's may be held out, however their files are cut into documents: a document counts as there where
    four of its lines in a row are, or all if it has fewer; blanks around a line do not count. None where no document of
    the sample obeys the schema, or blank ones alone.
    """
    try:
        sample = builtin_corpus(schema)
    except SchemaError:
        return ()
    runs = {run for text in _texts_by_source(own) for run in _runs(text)}
    lines = {line for text in own.documents for line in _lines(text)}

    def is_known(text: str) -> bool:
        found = _runs(text)
        return not runs.isdisjoint(found) if found else bool(_lines(text)) and lines.issuperset(_lines(text))

    kept = [(name, text) for name, text in zip(sample.sources, sample.documents, strict=True) if not is_known(text)]
    rest = replace(sample, documents=tuple(text for _, text in kept), sources=tuple(name for name, _ in kept))
    return tuple(text for _, text in _blocks(rest) if text.strip())


def split(corpus: Corpus, seed: int = 0, held_out: float = 0.25) -> Split:
    """Split `corpus` into calibration and held-out text by contiguous blocks of documents.

    There are about 2,400 blocks, of at least 400 characters unless a whole file is shorter; a block is a run of
    documents of one file, or a part of a document longer than two blocks. Of each file with two or more
    distinct blocks `held_out` are held out, and both parts get some; files of one block are drawn together.
    Identical blocks are assigned together, wherever they are, so that no block text is in both parts (a file
    all of whose blocks are in earlier files may so be in one part only); single lines may well be in both.
    The same corpus, seed and share give the same split in every process.

    Raises `SchemaError` if the text is too short for two blocks or the share is not between 0 and 1.
    """
    if not 0 < held_out < 1:
        raise SchemaError(f"held_out = {held_out}: allowed is a share between 0 and 1", where="split")
    blocks = list(_blocks(corpus))
    chosen = _draw_held_out(blocks, random.Random(f"collapse split {seed}"), held_out)
    parts = (
        tuple(text for _, text in blocks if text not in chosen),
        tuple(text for _, text in blocks if text in chosen),
    )
    if not all(parts):
        what = f"{corpus.characters} characters make no two different blocks of {SMALLEST_BLOCK} or more"
        raise SchemaError(what, where="corpus", fix="give more text")
    digests = {"calibration": digest(list(parts[0])), "held_out": digest(list(parts[1]))}
    return Split(parts[0], parts[1], digests, seed)


def sample_texts(schema: InputSchema, source: Split | Corpus, seed: int, count: int, length_chars: int) -> list[str]:
    """Return `count` seeded samples of up to `length_chars` characters, each an input under `schema`.

    A sample starts at a random line of a random block (of the calibration part, for a split) or document and
    runs on into the following ones; it is shorter only where all the text is. Raises `SchemaError` if the
    text breaks the schema.
    """
    texts = source.calibration if isinstance(source, Split) else source.documents
    draw = random.Random(f"collapse text sample {seed}")
    samples = [_run_of_text(texts, draw, length_chars, _separator(schema)) for _ in range(count)]
    for sample in samples:
        schema.check_text(sample)
    return samples


def sample_tokens(schema: InputSchema, seed: int, count: int, length: int) -> list[list[int]]:
    """Return `count` seeded sequences of `length` ids, each drawn uniformly from the schema's `tokens`.

    Raises `SchemaError` if the schema lists no tokens or allows no such length.
    """
    if schema.tokens is None:
        raise SchemaError("it lists no token ids to draw from", where="field tokens", fix="list them")
    if schema.max_tokens is not None and length > schema.max_tokens:
        raise SchemaError(f"length {length} is more than {schema.max_tokens}", where="field max_tokens")
    draw = random.Random(f"collapse token sample {seed}")
    return [draw.choices(schema.tokens, k=length) for _ in range(count)]


def _documents_of(path: Path, name: str, schema: InputSchema, field: str | None, *, strict: bool) -> Iterator[str]:
    """Yield the documents of one file; `strict` refuses text that breaks the schema."""
    text = textfile.read_text(path)
    suffix = textfile.suffix(path)
    if suffix == ".jsonl":
        for number, document in textfile.field_texts(text, field, name):
            if strict:
                _refuse(schema.violation(document), name, number)
            yield document
        return
    if suffix == ".json" and text.strip():
        textfile.parsed(text, name)
    if strict:
        _refuse(schema.violation(text), name, 1)
    if suffix == ".json":
        yield from [text] if text.strip() else []
    elif suffix == ".log" or schema.type == "log":
        yield from textfile.lines(text)
    else:
        yield from textfile.pieces(text)


def _texts_by_source(corpus: Corpus) -> Iterator[str]:
    for _, documents in _by_source(corpus):
        yield "\n".join(documents)


def _runs(text: str) -> list[tuple[str, ...]]:
    """Return every `RUN` lines in a row, of those that have a letter or a digit: brackets alone are in any text."""
    lines = [line for line in _lines(text) if any(map(str.isalnum, line))]
    return [tuple(lines[start : start + RUN]) for start in range(len(lines) - RUN + 1)]


def _lines(text: str) -> list[str]:
    """Return the lines without blank ones and the blanks around each."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def _refuse(found: Violation | None, name: str, first_line: int) -> None:
    if found is not None:
        found = found._replace(line=found.line + first_line - 1)
        raise found.error(f"{name}: ")


def _blocks(corpus: Corpus) -> Iterator[tuple[str, str]]:
    """Yield the source and the text of each block; a short rest of a file joins the block before it."""
    target = max(SMALLEST_BLOCK, corpus.characters // BLOCKS)
    for source, documents in _by_source(corpus):
        blocks = [""]
        for part in (part for document in documents for part in _parts(document, target)):
            if len(blocks[-1]) >= target:
                blocks.append("")
            blocks[-1] = _joined(blocks[-1], part, corpus.separator)
        if len(blocks) > 1 and len(blocks[-1]) < max(SMALLEST_BLOCK, target // 2):
            rest = blocks.pop()
            blocks[-1] = _joined(blocks[-1], rest, corpus.separator)
        yield from ((source, block) for block in blocks if block)


def _separator(schema: InputSchema) -> str:
    allowed = schema.input.characters
    return "\n" if allowed is None or "\n" in allowed else ""


def _joined(before: str, after: str, separator: str) -> str:
    return before + separator + after if before and not before.endswith("\n") else before + after


def _by_source(corpus: Corpus) -> Iterator[tuple[str, list[str]]]:
    grouped: dict[str, list[str]] = {}
    for source, document in zip(corpus.sources, corpus.documents, strict=True):
        grouped.setdefault(source, []).append(document)
    yield from grouped.items()


def _parts(document: str, target: int) -> Iterator[str]:
    """Yield `document`, in parts of about `target` characters if it is longer than two blocks."""
    start = 0
    while len(document) - start > 2 * target:
        # A part without a line end leaves more than a block, so that nothing is put between it and the next.
        line_end = document.find("\n", start + target - 1, start + 2 * target)
        stop = line_end + 1 if line_end >= 0 else start + target
        yield document[start:stop]
        start = stop
    yield document[start:]


def _draw_held_out(blocks: Sequence[tuple[str, str]], draw: random.Random, share: float) -> set[str]:
    """Return the texts that are held out, drawn file by file from the blocks that no file before it had."""
    grouped: dict[str, dict[str, None]] = {}
    for source, text in blocks:
        grouped.setdefault(source, {})[text] = None
    single = {text: None for texts in grouped.values() if len(texts) == 1 for text in texts}
    strata = [list(texts) for texts in grouped.values() if len(texts) > 1] + [list(single)]
    held: set[str] = set()
    seen: set[str] = set()
    for texts in strata:
        open_texts = [text for text in texts if text not in seen]
        wanted = round(len(texts) * share)
        if len(texts) > 1:
            wanted = min(max(wanted, 1), len(texts) - 1)
        missing = max(0, wanted - sum(text in held for text in texts))
        held.update(draw.sample(open_texts, min(missing, len(open_texts))))
        seen.update(texts)
    return held


def _run_of_text(texts: Sequence[str], draw: random.Random, length: int, separator: str) -> str:
    first = draw.randrange(len(texts))
    starts = [0, *(index + 1 for index, character in enumerate(texts[first][:-1]) if character == "\n")]
    run = texts[first][draw.choice(starts) :]
    for step in range(1, len(texts)):
        if len(run) >= length:
            break
        run = _joined(run, texts[(first + step) % len(texts)], separator)
    return run[:length]
