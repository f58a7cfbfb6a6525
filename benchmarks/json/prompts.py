"""Records of held-out JSON, cut inside: what the models are to complete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from tokenizers import Tokenizer

from benchmarks.json.grammar import CLOSERS
from benchmarks.peers.text import Source
from collapse.errors import CollapseError

LEAST = 8  # tokens that are left to write, at least


@dataclass(frozen=True)
class Prompt:
    """An object or array as the text of a source has it, and its beginning, which a model is given."""

    source: str
    record: str
    prompt: str


def containers(text: str) -> Iterator[str]:
    """Yield every object and array of some valid documents, inner ones before those around them."""
    starts: list[int] = []
    string = escaped = False
    for place, character in enumerate(text):
        if string:
            string = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            string = True
        elif character in CLOSERS:
            starts.append(place)
        elif character in "}]":
            yield text[starts.pop() : place + 1]


def prompts(
    sources: Sequence[Source], tokenizer: Tokenizer, count: int, *, lengths: Sequence[int], new: int
) -> list[Prompt]:
    """Return `count` prompts of one of `lengths` tokens each, from all sources alike as far as they have records.

    A record has at most half of the `new` tokens left, so that a model has twice the room that the text took. It is cut
    once, where the source's tokenizer ends a token, so inside of strings and numbers too; no two prompts are equal.
    Raises `CollapseError` where there are fewer.
    """
    random = Random("json prompts")
    queues = [_shuffled(_fitting(one, tokenizer, lengths, new, random), random) for one in sources]
    chosen: list[Prompt] = []
    while len(chosen) < count and any(queues):
        chosen += [queue.pop() for queue in queues if queue][: count - len(chosen)]
    if len(chosen) < count:
        reason = f"there are {len(chosen)} prompts in the records, not {count}"
        raise CollapseError(reason, where="json", fix="give a smaller --count, or other --prompt and --new")
    return chosen


def _shuffled(found: list[Prompt], random: Random) -> list[Prompt]:
    return random.sample(found, len(found))


def _fitting(source: Source, tokenizer: Tokenizer, lengths: Sequence[int], new: int, random: Random) -> list[Prompt]:
    """Return a prompt for each record that fits some length, none twice."""
    longest = max(lengths) + new // 2
    texts = [text for text in dict.fromkeys(containers(source.text)) if min(lengths) <= len(text) <= 32 * longest]
    found: dict[str, Prompt] = {}
    for text, encoded in zip(texts, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
        size = len(encoded.ids)
        for length in random.sample(lengths, len(lengths)):
            start = text[: encoded.offsets[length - 1][1]] if LEAST <= size - length <= new // 2 else ""
            if start and start not in found and _begins(encoded.ids, start, length, tokenizer):
                found[start] = Prompt(source.name, text, start)
                break
    return list(found.values())


def _begins(ids: Sequence[int], start: str, length: int, tokenizer: Tokenizer) -> bool:
    """Whether the beginning of a text alone is encoded as it is within the text."""
    return list(tokenizer.encode(start, add_special_tokens=False).ids) == list(ids[:length])
