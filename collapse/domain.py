"""Which text or token ids may occur: a named or listed character set, token ids, or what a corpus uses."""

from __future__ import annotations

import string

from pydantic import StrictInt, field_validator, model_validator

from collapse.plan import Record

CHARSETS: dict[str, frozenset[str]] = {
    "ascii": frozenset(map(chr, range(128))),
    "printable-ascii": frozenset(string.printable),
    "latin-1": frozenset(map(chr, range(256))),
}


def _canonical_charset(charset: str | None) -> str | None:
    """Return `charset` with the characters of the `chars:` form sorted and unique, or `ValueError`."""
    if charset is None or charset in CHARSETS:
        return charset
    characters = charset.removeprefix("chars:")
    if characters == charset or not characters:
        raise ValueError(f"allowed are {', '.join(CHARSETS)}, or chars: followed by the characters")
    if any("\ud800" <= character <= "\udfff" for character in characters):
        raise ValueError("a lone surrogate is not a character")
    return "chars:" + "".join(sorted(set(characters)))


def _canonical_tokens(tokens: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the token ids sorted and unique; `ValueError` if there are none or one is negative."""
    if tokens is None:
        return None
    if not tokens or min(tokens) < 0:
        raise ValueError("allowed is a non-empty list of token ids, each 0 or more")
    return tuple(sorted(set(tokens)))


class StatedDomain(Record):
    """A stated domain: a character set or token ids, never both, in one canonical form."""

    charset: str | None = None
    tokens: tuple[StrictInt, ...] | None = None

    _charset = field_validator("charset")(_canonical_charset)
    _tokens = field_validator("tokens")(_canonical_tokens)

    @model_validator(mode="after")
    def _one_way(self) -> StatedDomain:
        if self.charset is not None and self.tokens is not None:
            raise ValueError("fields charset and tokens exclude each other: allowed is one of them, or neither")
        return self


class Domain(StatedDomain):
    """Which text or token ids may occur: an explicit character set, explicit ids, or whatever a corpus uses.

    `charset` is one of `CHARSETS` or `chars:` followed by the allowed characters. `tokens` are ids of the
    source tokenizer, for models without a tokenizer too. Both absent: the domain is that of the corpus.
    """

    @property
    def characters(self) -> frozenset[str] | None:
        """The allowed characters, or None where the domain is not given by characters."""
        if self.charset is None:
            return None
        return CHARSETS.get(self.charset) or frozenset(self.charset.removeprefix("chars:"))

    @property
    def is_explicit(self) -> bool:
        """Whether the domain is stated rather than taken from a corpus; only then can a claim be proved."""
        return self.charset is not None or self.tokens is not None


class OutputDomain(Domain):
    """What the model may write; `corpus` lists files with such text. All absent: as the input."""

    corpus: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _corpus_alone(self) -> OutputDomain:
        if self.corpus is not None and self.is_explicit:
            raise ValueError("fields charset, tokens and corpus exclude each other: allowed is one of them")
        if self.corpus is not None and not all(self.corpus):
            raise ValueError("field corpus holds an empty name: allowed is a list of file names")
        if self.corpus == ():
            raise ValueError("field corpus = []: allowed is one file or more")
        return self
