"""Which token ids can occur under a schema, and how sure that is.

The kept set is the input and output domain, closed so that the cut tokenizer agrees with the source's on all
text whose tokens are kept (proof in `collapse.bpe`), plus what must never go: byte tokens, special tokens,
ids that a side file names, and the text that a chat template adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from collapse.analysis.spelling import spellable
from collapse.analysis.text_source import TextSource, open_text
from collapse.bpe import closure
from collapse.certify.bounds import clopper_pearson, hoeffding_bentkus
from collapse.checkpoint import Checkpoint
from collapse.errors import SchemaError, UnsupportedError
from collapse.plan import Evidence, Grade, IndexSet
from collapse.schema import Domain, InputSchema
from collapse.token_ids import ID_FILES, NAME_FILES, ids_in, names_in, size_fields, vocab_size
from collapse.tokenizer import TOKENIZER, TokenizerFile, check_decoder

DELTA = 0.05
Figures = dict[str, float | int | str]
OUTPUT_CLAIM = "over the kept ids the argmax equals the source's wherever the source's argmax is kept"


@dataclass(frozen=True)
class Samples:
    """Texts of one domain: `calibration` chooses the kept set, `held_out` only judges it.

    Each text is one block of whole lines; blocks are the independent units of the bound.
    """

    calibration: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenUse:
    """The ids that stay, of a token table with `size` rows.

    `counts` says how many ids each reason added, in the order in which reasons were asked; they sum to the
    size of `kept`. `size_fields` are the dotted config.json fields that hold `size`.
    """

    kept: IndexSet
    size: int
    counts: Mapping[str, int]
    grade: Grade
    claim: str
    method: str
    figures: Figures
    size_fields: tuple[str, ...]

    @property
    def evidence(self) -> Evidence:
        """The evidence of a rewrite that keeps exactly these ids."""
        kept: Figures = {f"kept_{reason}": count for reason, count in self.counts.items()}
        figures = {"kept": len(self.kept), "rows": self.size, **kept, **self.figures}
        return Evidence(grade=self.grade, claim=self.claim, method=self.method, figures=figures)


@dataclass(frozen=True)
class Declined:
    """Why the token table stays as it is."""

    reason: str
    figures: Figures = field(default_factory=dict)


def token_use(
    checkpoint: Checkpoint, schema: InputSchema, samples: Samples, output: Samples | None = None
) -> TokenUse | Declined:
    """Return the ids that can occur under `schema`; `output` has the texts of `schema.output.corpus`.

    Explicit characters and ids give grade *proved*; a corpus gives *certified*, or *measured* where nothing
    was held out. Declines where the tokenizer cannot be cut. Raises `SchemaError` for an id that the model
    does not have, and for a domain by corpus without any text.
    """
    try:
        return _token_use(checkpoint, schema, samples, output or Samples())
    except UnsupportedError as error:
        return Declined(str(error))


def _token_use(checkpoint: Checkpoint, schema: InputSchema, samples: Samples, output: Samples) -> TokenUse:
    size, text = vocab_size(checkpoint.config), open_text(checkpoint)
    sources = _domains(schema, samples, output)
    reasons: list[tuple[str, Iterable[int]]] = [
        (label, _domain_ids(label, domain, texts, text, size)) for label, domain, texts in sources
    ]
    reasons.append(("named", _named(checkpoint, text, size)))
    figures = _fit(text, size)
    if text is not None:
        chats = text.template_samples()
        figures["chat_samples"] = len(chats)
        reasons += [
            ("special", (token.id for token in text.file.added if token.special or token.single_word)),
            ("bytes", (text.file.vocab[token] for token in (*text.file.byte_tokens, *text.file.markers))),
            ("chat template", text.ids(chats)),
        ]
    kept, counts = _first_reason(reasons, size)
    if text is not None:
        counts["merge ancestors"] = _close(kept, text.file)
    bounded = [(label, texts.held_out) for label, domain, texts in sources if not domain.is_explicit]
    for label, held_out in bounded:
        figures |= _judge(label, held_out, kept, text)
    grade = _grade(held_out for _, held_out in bounded)
    where = tuple(name for name, _ in size_fields(checkpoint.config, size))
    claim, method = _claim(sources, kept), _method(text, bounded)
    return TokenUse(IndexSet.of(kept), size, counts, grade, claim, method, figures, where)


def _domains(schema: InputSchema, samples: Samples, output: Samples) -> tuple[tuple[str, Domain, Samples], ...]:
    given = ("input", schema.input, samples)
    if not schema.output.is_explicit and schema.output.corpus is None:
        return (given,)
    return (given, ("output", schema.output, output))


def _domain_ids(label: str, domain: Domain, texts: Samples, text: TextSource | None, size: int) -> Iterable[int]:
    if domain.tokens is not None:
        if domain.tokens[-1] >= size:
            raise SchemaError(
                f"token id {domain.tokens[-1]} is not below the model's {size} rows", where=f"{label} tokens"
            )
        return domain.tokens
    if text is None:
        raise UnsupportedError("the model has no tokenizer", where=label, fix="give the domain as token ids (tokens)")
    if domain.characters is not None:
        return (text.file.ids[token] for token in spellable(text.file, domain.characters))
    if not any(texts.calibration):
        raise SchemaError("no text to see which tokens occur", where=f"{label} corpus", fix="add text files")
    return text.ids(text.contexts(texts.calibration))


def _named(checkpoint: Checkpoint, text: TextSource | None, size: int) -> set[int]:
    """Ids that a side file names: as a number, as a token string, or in the post-processor."""
    found: set[int] = set()
    for name in ID_FILES:
        for where, number in ids_in(checkpoint.read_json(name) or {}, size):
            if number >= size:
                raise UnsupportedError(
                    f"{where} names token {number}, the model has {size} rows", where=name, fix="correct it"
                )
            found.add(number)
    if text is None:
        return found
    for name in NAME_FILES:
        settings = checkpoint.read_json(name) or {}
        check_decoder(text.file, name, settings)
        for where, content in names_in(settings):
            if content not in text.file.ids:
                raise UnsupportedError(
                    f"{where} names {content!r}, which {TOKENIZER} lacks", where=name, fix="save it again"
                )
            found.add(text.file.ids[content])
    return found | set(text.file.named_ids())


def _first_reason(reasons: Iterable[tuple[str, Iterable[int]]], size: int) -> tuple[set[int], dict[str, int]]:
    """Join the ids of all reasons; a token without a row cannot be used, whatever names it."""
    kept: set[int] = set()
    counts: dict[str, int] = {}
    for reason, ids in reasons:
        before = len(kept)
        kept.update(number for number in ids if number < size)
        counts[reason] = len(kept) - before
    return kept, counts


def _fit(text: TextSource | None, size: int) -> Figures:
    """Rows that no token has (padding), tokens that have no row, bytes that the tokenizer loses."""
    if text is None:
        return {}
    rows = sum(number < size for number in text.file.strings)
    lost = len(text.file.missing_bytes)
    without = len(text.file.strings) - rows
    return {"padded_rows": size - rows, "tokens_without_row": without, "bytes_without_token": lost}


def _close(kept: set[int], file: TokenizerFile) -> int:
    """Add the merge ancestors of `kept` to it; return how many were missing."""
    before = len(kept)
    strings = (file.strings[number] for number in sorted(kept) if number in file.strings)
    kept.update(file.vocab[token] for token in closure(strings, file.ranks) if token in file.vocab)
    return len(kept) - before


def _judge(label: str, held_out: tuple[str, ...], kept: set[int], text: TextSource | None) -> Figures:
    """Shares of held-out blocks, tokens and lines with an id outside `kept`, each with its upper bound."""
    if text is None or not held_out:
        return {f"{label}_held_out_blocks": 0}
    outside = np.ones(max(text.file.strings) + 1, dtype=bool)
    outside[[number for number in kept if number < len(outside)]] = False
    tokens = np.array([outside[row].mean() if row else 0.0 for row in text.encode(held_out)])
    lines = np.array([_lines_hit(block, outside, text) for block in held_out])
    units, hits = len(held_out), int((tokens > 0).sum())
    figures: Figures = {"held_out_blocks": units, "delta": DELTA}
    figures |= {"blocks_affected": hits, "blocks_affected_share": hits / units}
    figures["blocks_affected_bound"] = clopper_pearson(hits, units, DELTA)
    for name, shares in (("tokens", tokens), ("lines", lines)):
        mean = float(shares.mean())
        figures |= {f"{name}_affected_mean_share": mean}
        figures[f"{name}_affected_bound"] = hoeffding_bentkus(mean, units, DELTA)
    return {f"{label}_{name}": value for name, value in figures.items()}


def _lines_hit(block: str, outside: np.ndarray[Any, np.dtype[np.bool_]], text: TextSource) -> float:
    rows = [row for row in text.encode(block.splitlines()) if row]
    return sum(bool(outside[row].any()) for row in rows) / len(rows) if rows else 0.0


def _grade(held_out: Iterable[tuple[str, ...]]) -> Grade:
    counts = [len(texts) for texts in held_out]
    if not counts:
        return "proved"
    return "certified" if all(counts) else "measured"


def _claim(sources: tuple[tuple[str, Domain, Samples], ...], kept: set[int]) -> str:
    parts = []
    for label, domain, _ in sources:
        if domain.tokens is not None:
            parts.append(f"all {len(domain.tokens)} stated {label} ids are kept")
        elif domain.characters is not None:
            parts.append(f"every id that {label} text over the charset can encode to is kept")
        else:
            parts.append(f"{label} text leaves the kept ids no more often than the stated bounds")
    same = "text whose source ids are all kept is encoded as before"
    return f"of {len(kept)} kept ids: {'; '.join(parts)}; {same}; {OUTPUT_CLAIM}"


def _method(text: TextSource | None, bounded: list[tuple[str, tuple[str, ...]]]) -> str:
    closed = "closed under the derivations of BPE merges, with every byte token" if text else "ids as stated"
    if not bounded:
        return closed
    contexts = "ids seen in calibration blocks and at the edges of their lines: alone, ended, spaced, in a chat"
    if not all(held_out for _, held_out in bounded):
        return f"{contexts}; {closed}; no held-out text, so no bound"
    bounds = "Clopper-Pearson for the share of blocks, Hoeffding-Bentkus for the mean per-block share"
    return (
        f"{contexts}; {closed}; judged on held-out blocks, whole and line by line, assumed exchangeable with "
        f"those to come; one-sided bounds, each at delta: {bounds}"
    )
