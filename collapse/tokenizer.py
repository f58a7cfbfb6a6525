"""`tokenizer.json` as data: which model it is, its vocabulary and merges, and how it spells bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from collapse.bpe import Pair, byte_alphabet, fallback_alphabet, ranks_of
from collapse.errors import CheckpointError, UnsupportedError
from collapse.untrusted import MAX_TOKENIZER, loads, read_bounded

TOKENIZER = "tokenizer.json"
LEGACY = (
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
DAMAGE = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)  # what bad JSON values lead to
Flavour = Literal["byte-level", "byte-fallback"]


@dataclass(frozen=True)
class AddedToken:
    """A token that is cut out of the text before the model sees it."""

    id: int
    content: str
    special: bool
    single_word: bool


@dataclass(frozen=True)
class TokenizerFile:
    """A BPE tokenizer that spells unknown text byte by byte.

    Attributes:
        data: the file as JSON values; not to be changed.
        vocab: token string -> id, of the model alone.
        merges: pairs in the order of their rank.
        added: the added tokens in file order; some are in `vocab` too.
        flavour: how a byte is spelt: `byte-level` (one character a byte) or `byte-fallback` (`<0xNN>`).
        raw: the file's bytes.
    """

    data: Mapping[str, Any]
    vocab: Mapping[str, int]
    merges: tuple[Pair, ...]
    added: tuple[AddedToken, ...]
    flavour: Flavour
    raw: bytes = field(repr=False)

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """Token string -> id, added tokens included."""
        return {**self.vocab, **{token.content: token.id for token in self.added}}

    @cached_property
    def strings(self) -> Mapping[int, str]:
        """Id -> token string, added tokens included."""
        return {number: token for token, number in self.ids.items()}

    @cached_property
    def ranks(self) -> Mapping[Pair, int]:
        """Merge -> rank; lower goes first."""
        return ranks_of(self.merges)

    @property
    def alphabet(self) -> tuple[str, ...]:
        """The 256 strings that stand for single bytes, in the order of the bytes."""
        return byte_alphabet() if self.flavour == "byte-level" else fallback_alphabet()

    @property
    def byte_tokens(self) -> tuple[str, ...]:
        """The tokens of the alphabet, which no cut may lose."""
        return tuple(token for token in self.alphabet if token in self.vocab)

    @property
    def missing_bytes(self) -> tuple[int, ...]:
        """Bytes without a token: the source itself loses them, and so does whatever is cut from it."""
        return tuple(byte for byte, token in enumerate(self.alphabet) if token not in self.vocab)

    @property
    def markers(self) -> tuple[str, ...]:
        """Characters that stand for a space, as `▁`; none with byte level.

        The decoder turns the character back before it joins bytes, so spelt in bytes it would stay a marker.
        """
        steps = (*self.normalizers, *self.pre_tokenizers, *_unfold(self.data.get("decoder"), "decoders"))
        texts = (step.get(name) for step in steps for name in ("content", "prepend", "replacement", "pattern"))
        strings = (text.get("String", "") if isinstance(text, dict) else text or "" for text in texts)
        found = {char for text in strings for char in text if char in self.vocab}
        return tuple(sorted(found)) if self.flavour == "byte-fallback" else ()

    @property
    def normalizers(self) -> tuple[Mapping[str, Any], ...]:
        """The normalizers in order, sequences unfolded."""
        return tuple(_unfold(self.data.get("normalizer"), "normalizers"))

    @property
    def pre_tokenizers(self) -> tuple[Mapping[str, Any], ...]:
        """The pre-tokenizers in order, sequences unfolded."""
        return tuple(_unfold(self.data.get("pre_tokenizer"), "pretokenizers"))

    @property
    def post_processors(self) -> tuple[Mapping[str, Any], ...]:
        """The post-processors in order, sequences unfolded."""
        return tuple(_unfold(self.data.get("post_processor"), "processors"))

    def named_ids(self) -> Iterator[int]:
        """Yield the ids that the unknown token, the post-processors and the padding name."""
        unknown = self.data["model"].get("unk_token")
        if unknown in self.ids:  # a name without a token is never used: with all bytes nothing is unknown
            yield self.ids[unknown]
        for step in self.post_processors:
            for entry in (step.get("special_tokens") or {}).values():
                yield from entry["ids"]
            yield from (step[role][1] for role in ("sep", "cls") if role in step)
        if padding := self.data.get("padding"):
            yield padding["pad_id"]

    def encoder(self) -> Tokenizer:
        """Return the tokenizer ready to encode, without the file's own padding and truncation."""
        encoder = Tokenizer.from_buffer(self.raw)
        encoder.no_padding()
        encoder.no_truncation()
        return encoder

    @classmethod
    def read(cls, root: Path) -> TokenizerFile:
        """Read `tokenizer.json` in `root`; raises `UnsupportedError` where there is none that we can cut."""
        path = root / TOKENIZER
        if not path.is_file():
            others = [name for name in LEGACY if (root / name).is_file()]
            what = f"no {TOKENIZER}" + (f", only {', '.join(others)}" if others else "")
            raise UnsupportedError(what, where=root.name, fix="save the tokenizer with save_pretrained first")
        return cls.from_bytes(read_bounded(path, MAX_TOKENIZER))

    @classmethod
    def from_bytes(cls, raw: bytes) -> TokenizerFile:
        """Read and check the bytes of a tokenizer.json.

        Raises `CheckpointError` if the file is damaged, `UnsupportedError` for a model other than BPE, for
        dropout, for prefixes or suffixes of subwords, and for byte fallback without all 256 bytes.
        """
        try:
            file = _parsed(raw)
            _check_ids(file)
            _check_merges(file)
            for number in file.named_ids():  # so that later readers may rely on the form of every part
                _require_id(number)
            _ = file.markers
        except DAMAGE as error:
            raise CheckpointError(
                f"damaged ({type(error).__name__}: {error})", where=TOKENIZER, fix="fetch it again"
            ) from None
        _check_bytes(file)
        return file


def _parsed(raw: bytes) -> TokenizerFile:
    data = loads(raw)
    model = data["model"]
    _refuse_other_models(model)
    vocab, merges = _vocab(model["vocab"]), tuple(_pair(merge) for merge in model["merges"])
    added = tuple(_added(entry) for entry in data.get("added_tokens") or ())
    return TokenizerFile(data, vocab, merges, added, _flavour(data), raw)


def _require_id(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 31:
        raise ValueError(f"{number!r} is no token id")
    return number


def _vocab(given: Mapping[str, Any]) -> Mapping[str, int]:
    for number in given.values():
        _require_id(number)
    return given


def check_decoder(file: TokenizerFile, name: str, settings: Mapping[str, Any]) -> None:
    """Raise `UnsupportedError` where `added_tokens_decoder` in file `name` disagrees with tokenizer.json.

    Raises `CheckpointError` where it is no map of ids to tokens.
    """
    decoder = settings.get("added_tokens_decoder") or {}
    try:
        stated = [(int(number), str(entry["content"])) for number, entry in decoder.items()]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError("added_tokens_decoder is damaged", where=name, fix="fetch it again") from None
    for number, content in stated:
        if file.ids.get(content) != number:
            raise UnsupportedError(
                f"added_tokens_decoder has {content!r} as {number}, {TOKENIZER} does not",
                where=name,
                fix="save the tokenizer again with save_pretrained",
            )


def _unfold(part: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    if part and part.get("type") == "Sequence":
        for one in part[inner]:
            yield from _unfold(one, inner)
    elif part:
        yield part


def _pair(merge: str | list[str]) -> Pair:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    if not (isinstance(left, str) and isinstance(right, str)):
        raise TypeError(f"{merge!r} is no pair of tokens")
    return left, right


def _added(entry: Mapping[str, Any]) -> AddedToken:
    special, single = bool(entry.get("special")), bool(entry.get("single_word"))
    return AddedToken(_require_id(entry["id"]), str(entry["content"]), special, single)


def _refuse(what: str, fix: str = "the vocabulary stays as it is") -> UnsupportedError:
    return UnsupportedError(what, where=TOKENIZER, fix=fix)


def _refuse_other_models(model: Mapping[str, Any]) -> None:
    kind = model.get("type") or ("BPE" if "merges" in model else "unnamed")
    if kind != "BPE":
        raise _refuse(f"the tokenizer model is {kind}, only BPE can be cut")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise _refuse(f"BPE with {option} = {model[option]!r} cannot be cut exactly")


def _flavour(data: Mapping[str, Any]) -> Flavour:
    steps = (
        *_unfold(data.get("pre_tokenizer"), "pretokenizers"),
        *_unfold(data.get("normalizer"), "normalizers"),
    )
    if any(step.get("type") == "ByteLevel" for step in steps):
        return "byte-level"
    if data["model"].get("byte_fallback"):
        return "byte-fallback"
    raise _refuse("BPE without byte level and without byte fallback cannot encode every text")


def _check_ids(file: TokenizerFile) -> None:
    """The library numbers added tokens itself; a file that says otherwise would be read with other ids."""
    highest = -1
    for token in file.added:
        fresh = highest + 1 if highest >= len(file.vocab) else len(file.vocab)
        given = file.vocab.get(token.content, fresh)
        if given != token.id:
            raise _refuse(f"added token {token.content!r} says id {token.id} but is read as {given}")
        highest = max(highest, given)
    if len(file.strings) != len(file.ids):
        raise _refuse("two tokens share one id")


def _check_merges(file: TokenizerFile) -> None:
    used = {token for left, right in file.merges for token in (left, right, left + right)}
    if unknown := used - file.vocab.keys():
        raise CheckpointError(f"a merge uses {min(unknown)!r}, which is no token", where=TOKENIZER)
    if file.flavour == "byte-fallback" and (spelt := used.intersection(file.alphabet)):
        raise _refuse(f"a merge uses the byte token {min(spelt)}")


def _check_bytes(file: TokenizerFile) -> None:
    """With byte fallback a trimmed character falls back to its bytes, so all must be there.

    With byte level every byte token that exists is kept, so a missing one is lost before and after alike
    (SmolLM2 has no token for 21 bytes, control characters and bytes that UTF-8 hardly uses).
    """
    missing = file.missing_bytes
    if missing and file.flavour == "byte-fallback":
        raise _refuse(f"{len(missing)} of the 256 byte tokens are missing, first {file.alphabet[missing[0]]}")
