"""The contract about a model's inputs: what kind of text, how long, which characters, and what comes out.

Whatever collapse concludes is true only under this contract; its digest is part of every plan.
"""

from __future__ import annotations

import string
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from collapse.canonical import digest
from collapse.plan import Record

TextType = Literal["log", "json", "code", "text"]

CHARSETS: dict[str, frozenset[str]] = {
    "ascii": frozenset(map(chr, range(128))),
    "printable-ascii": frozenset(string.printable),
    "latin-1": frozenset(map(chr, range(256))),
}


class Domain(Record):
    """Which text or token ids may occur: an explicit character set, explicit ids, or whatever a corpus uses.

    `charset` is one of `CHARSETS` or `chars:` followed by the allowed characters. `tokens` are ids of the
    source tokenizer, for models without a tokenizer too. Both absent: the domain is that of the corpus.
    """

    charset: str | None = None
    tokens: tuple[int, ...] | None = None

    @field_validator("charset")
    @classmethod
    def _known_charset(cls, charset: str | None) -> str | None:
        if charset is not None and charset not in CHARSETS and not charset.startswith("chars:"):
            raise ValueError(f"allowed are {', '.join(CHARSETS)} or chars:<the characters>")
        return charset

    @field_validator("tokens")
    @classmethod
    def _sorted_ids(cls, tokens: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if tokens is not None and (not tokens or min(tokens) < 0):
            raise ValueError("allowed is a non-empty list of token ids, each 0 or more")
        return None if tokens is None else tuple(sorted(set(tokens)))

    @model_validator(mode="after")
    def _one_way(self) -> Domain:
        if self.charset is not None and self.tokens is not None:
            raise ValueError("charset and tokens exclude each other")
        return self

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


class Workload(Record):
    """The shape of one request: prompt tokens, new tokens, and sequences at a time."""

    prompt: int = Field(default=512, ge=1)
    new: int = Field(default=128, ge=1)
    batch: int = Field(default=1, ge=1)


class InputSchema(Record):
    """The contract. Lengths are counted in tokens of the source tokenizer and in characters of a line."""

    type: TextType
    max_tokens: int | None = Field(default=None, ge=1)
    max_line_length: int | None = Field(default=None, ge=1)
    charset: str | None = None
    tokens: tuple[int, ...] | None = None
    padding: Literal["none", "left"] = "left"
    modality: Literal["text"] = "text"
    task: Literal["generate", "score"] = "generate"
    workload: Workload = Workload()
    output: OutputDomain = OutputDomain()

    @property
    def input(self) -> Domain:
        """The domain of the inputs."""
        return Domain(charset=self.charset, tokens=self.tokens)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON of the schema."""
        return digest(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the schema as plain JSON values, defaults included."""
        return self.model_dump(mode="json")
