"""Which tokens can arise from text over a character set: never too few, so that a claim can be proved."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import product
from typing import Any

from collapse.errors import UnsupportedError
from collapse.tokenizer import TokenizerFile

SPLITTERS = frozenset(
    (
        "Split",
        "Digits",
        "Punctuation",
        "Whitespace",
        "WhitespaceSplit",
        "UnicodeScripts",
        "CharDelimiterSplit",
    )
)
PAIRS_LIMIT = 1024  # characters of which all pairs are still looked at


def spellable(file: TokenizerFile, characters: frozenset[str]) -> frozenset[str]:
    """Return every token that encoding some text over `characters` can give, and perhaps some others.

    A token of the result is a piece of such a text after normalization, so pieces are what is looked for:
    character by character with byte fallback, and as a run of UTF-8 bytes with byte level, where a token may
    begin or end inside a character. Raises `UnsupportedError` where a normalizer or pre-tokenizer may bring
    in characters that cannot be told from the file.
    """
    reached = reachable_characters(file, characters)
    if file.flavour == "byte-fallback":
        found = {token for token in file.vocab if reached.issuperset(token)}
    else:
        _refuse_torn(file, reached)
        speller, values = Utf8Pieces(reached), {char: byte for byte, char in enumerate(file.alphabet)}
        found = {token for token in file.vocab if _spelt(token, values, speller)}
    both = reached | characters
    found.update(token.content for token in file.added if both.issuperset(token.content))
    return frozenset(found)


def _refuse_torn(file: TokenizerFile, characters: frozenset[str]) -> None:
    """A byte without a token vanishes; inside a character of several bytes that leaves a torn one."""
    lost = set(file.missing_bytes)
    torn = sorted(char for char in characters if not char.isascii() and lost.intersection(char.encode()))
    if torn:
        raise UnsupportedError(
            f"a byte of {torn[0]!r} has no token", where="tokenizer.json", fix="take it out of the charset"
        )


def _spelt(token: str, values: Mapping[str, int], speller: Utf8Pieces) -> bool:
    return all(char in values for char in token) and speller.spells(bytes(values[char] for char in token))


def reachable_characters(file: TokenizerFile, characters: frozenset[str]) -> frozenset[str]:
    """Return a set that holds every character of every normalized text over `characters`.

    A lone surrogate has no UTF-8 form, so no text holds it.
    """
    characters = frozenset(char for char in characters if not "\ud800" <= char <= "\udfff")
    for step in file.normalizers:
        characters = NORMALIZERS.get(step["type"], _unknown)(step, characters)
    for step in file.pre_tokenizers:
        characters = _pre_tokenized(step, characters)
    return characters


def _unknown(step: Mapping[str, Any], _: frozenset[str]) -> frozenset[str]:
    raise UnsupportedError(
        f"the step {step['type']} may bring in characters outside the charset",
        where="tokenizer.json",
        fix="describe the domain by a corpus",
    )


def _pre_tokenized(step: Mapping[str, Any], characters: frozenset[str]) -> frozenset[str]:
    if step["type"] == "ByteLevel":
        return characters | ({" "} if step.get("add_prefix_space") else set())
    if step["type"] == "Metaspace":
        return characters | {step.get("replacement", "▁")}
    return characters if step["type"] in SPLITTERS else _unknown(step, characters)


def _adding(field: str) -> Callable[[Mapping[str, Any], frozenset[str]], frozenset[str]]:
    return lambda step, characters: characters | frozenset(step[field])


def _unchanged(step: Mapping[str, Any], characters: frozenset[str]) -> frozenset[str]:
    return characters


def _lower(step: Mapping[str, Any], characters: frozenset[str]) -> frozenset[str]:
    if not all(char.isascii() for char in characters):
        return _unknown(step, characters)
    return frozenset(char.lower() for char in characters)


def _composed(step: Mapping[str, Any], characters: frozenset[str]) -> frozenset[str]:
    """Normal forms leave a text alone if they leave each pair of its characters alone and none combines."""
    if all(char.isascii() for char in characters):
        return characters
    if len(characters) > PAIRS_LIMIT or any(map(unicodedata.combining, characters)):
        return _unknown(step, characters)
    pairs = product(sorted(characters), repeat=2)
    stable = all(unicodedata.is_normalized(step["type"], left + right) for left, right in pairs)
    return characters if stable else _unknown(step, characters)


NORMALIZERS: Mapping[str, Callable[[Mapping[str, Any], frozenset[str]], frozenset[str]]] = {
    "Replace": _adding("content"),
    "Prepend": _adding("prepend"),
    "Strip": _unchanged,
    "ByteLevel": _unchanged,
    "Lowercase": _lower,
    "NFC": _composed,
    "NFD": _composed,
    "NFKC": _composed,
    "NFKD": _composed,
}


class Utf8Pieces:
    """Decides whether a byte string is a piece of the UTF-8 form of some text over a character set."""

    def __init__(self, characters: Iterable[str]) -> None:
        self.whole = frozenset(char.encode() for char in characters)

    @cached_property
    def heads(self) -> frozenset[bytes]:
        """Proper beginnings of a character, the empty one included."""
        return frozenset(code[:at] for code in self.whole for at in range(len(code)))

    @cached_property
    def tails(self) -> frozenset[bytes]:
        """Proper endings of a character, the empty one included."""
        return frozenset(code[at:] for code in self.whole for at in range(1, len(code) + 1))

    @cached_property
    def inner(self) -> frozenset[bytes]:
        """Pieces of a single character that hold neither its first nor its last byte."""
        return frozenset(
            code[start:stop] for code in self.whole for start in range(1, len(code)) for stop in range(start, len(code))
        )

    def spells(self, piece: bytes) -> bool:
        """Whether `piece` occurs in some text: an ending, whole characters, and a beginning."""
        lead = next((at for at, byte in enumerate(piece) if byte & 0xC0 != 0x80), len(piece))
        if lead == len(piece) and piece in self.inner:
            return True
        return piece[:lead] in self.tails and self._spells_from_lead(piece[lead:])

    def _spells_from_lead(self, piece: bytes) -> bool:
        while piece:
            length = _code_length(piece[0])
            if len(piece) < length:
                return piece in self.heads
            if piece[:length] not in self.whole:
                return False
            piece = piece[length:]
        return True


def _code_length(lead: int) -> int:
    return 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
