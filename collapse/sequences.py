"""In-schema token sequences: what the model is run on, to choose and to check."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from collapse.canonical import digest
from collapse.checkpoint import Checkpoint
from collapse.corpus import Split, sample_tokens
from collapse.errors import CheckpointError, UnsupportedError
from collapse.schema import InputSchema

CALIBRATION, HELD_OUT = 12, 64
WINDOW_FIELD = re.compile(r"(^|_)(sliding|local|attention|attn)_(window|chunk)(_size)?$|^window_size$")
PAST_WINDOW = 12  # tokens beyond a window; the last ones are then decoded one by one
LONGEST = 8192  # tokens of the longest sequence that is run for a window's sake
CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Sequences:
    """Source token ids. Calibration sequences choose; held-out ones only judge what was chosen.

    `long` holds a held-out sequence that reaches past every attention window, where the others do not and the schema
    allows such lengths.
    """

    calibration: tuple[Ids, ...]
    held_out: tuple[Ids, ...]
    long: tuple[Ids, ...] = ()

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of either side."""
        return {"calibration": digest(self.calibration), "held_out": digest(self.held_out)}


def context_length(config: dict[str, Any]) -> int | None:
    """Return how many tokens the model takes by its config.json, or None where it does not say."""
    text = config.get("text_config") or config
    lengths = [text[name] for name in CONTEXT_FIELDS if isinstance(text.get(name), int)]
    return min((length for length in lengths if length > 0), default=None)


def attention_windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the lengths from which on some layer of the model sees only a part of the past, by its config.json."""
    text = config.get("text_config") or config
    sizes = {value for field, value in text.items() if WINDOW_FIELD.search(field) and type(value) is int and value > 0}
    return tuple(sorted(sizes))


def longest_allowed(config: Mapping[str, Any], schema: InputSchema) -> int | None:
    """Return the longest sequence that schema and model allow; None where neither bounds it."""
    bounds = [bound for bound in (schema.max_tokens, context_length(dict(config))) if bound is not None]
    return min(bounds, default=None)


def _past_windows(checkpoint: Checkpoint, schema: InputSchema) -> int | None:
    """Return a length past every window that a request can pass, or None where the usual length is enough."""
    allowed = longest_allowed(checkpoint.config, schema)
    lengths = [window + PAST_WINDOW for window in attention_windows(checkpoint.config)]
    reachable = [length for length in lengths if length <= min(allowed or LONGEST, LONGEST)]
    longest = max(reachable, default=0)
    return longest if longest > sequence_length(checkpoint, schema) else None


def sequence_length(checkpoint: Checkpoint, schema: InputSchema) -> int:
    """Return the length of the sequences to run: the longest request of the schema that the model takes.

    Modules can be dead in short contexts and alive in long ones, so short sequences would say too much.
    """
    request = schema.workload.prompt + (schema.workload.new if schema.task == "generate" else 0)
    bounds = [schema.max_tokens or request, context_length(dict(checkpoint.config))]
    return min(bound for bound in bounds if bound is not None)


def encoder(checkpoint: Checkpoint) -> Callable[[str], Ids]:
    """Return the tokenizer as a function, special tokens added as its post-processor has it."""
    path = checkpoint.root / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedError(
            "the model has no tokenizer.json, so text cannot be turned into tokens",
            where=checkpoint.label,
            fix='name the ids, as in --schema \'{"type": "text", "tokens": [0, 1]}\'',
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain exceptions for a file that it cannot read
        raise CheckpointError(f"cannot be read ({error})", where=path.name, fix="fetch it again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: tuple(tokenizer.encode(text).ids)


def text_bytes(checkpoint: Checkpoint) -> Callable[[Sequence[int]], int]:
    """Return the function that says how many UTF-8 bytes of text some tokens stand for."""
    tokenizer = Tokenizer.from_file(str(checkpoint.root / "tokenizer.json"))
    return lambda ids: len(tokenizer.decode(list(ids), skip_special_tokens=False).encode())


def sequences(checkpoint: Checkpoint, schema: InputSchema, split: Split | None, seed: int = 0) -> Sequences:
    """Return sequences of the corpus split, or of the schema's own ids where there is no corpus.

    A sequence starts at a block, goes on through the following blocks of the same side, and is cut at
    `sequence_length`; the starts are spread evenly.
    """
    length, further = sequence_length(checkpoint, schema), _past_windows(checkpoint, schema)
    if split is None:
        drawn = sample_tokens(schema, seed, CALIBRATION + HELD_OUT, length)
        ids = [tuple(sequence) for sequence in drawn]
        long = sample_tokens(schema, seed, 1, further) if further else ()
        return Sequences(tuple(ids[:CALIBRATION]), tuple(ids[CALIBRATION:]), tuple(map(tuple, long)))
    encode = encoder(checkpoint)
    return Sequences(
        tuple(cut(split.calibration, CALIBRATION, encode, length)),
        tuple(cut(split.held_out, HELD_OUT, encode, length)),
        tuple(cut(split.held_out, 1, encode, further)) if further else (),
    )


def apart(blocks: Sequence[str], count: int, encode: Callable[[str], Ids], length: int) -> list[Ids]:
    """Return at most `count` sequences of `length` tokens, evenly spread, no two of them with a block in common."""
    found: list[Ids] = []
    start = 0
    while start < len(blocks):
        stop, ids = _from(blocks, start, encode, length)
        if len(ids) >= length:
            found.append(ids[:length])
        start = stop
    count = min(count, len(found))
    return [found[number * len(found) // count] for number in range(count)]


def cut(blocks: Sequence[str], count: int, encode: Callable[[str], Ids], length: int) -> Iterator[Ids]:
    """Yield at most `count` sequences of `length` tokens, or of as many as the blocks from a start on have."""
    count = min(count, len(blocks))
    for number in range(count):
        _, ids = _from(blocks, number * len(blocks) // count, encode, length)
        if ids:
            yield ids[:length]


def _from(blocks: Sequence[str], start: int, encode: Callable[[str], Ids], length: int) -> tuple[int, Ids]:
    """Return the ids of as many blocks from `start` on as give `length` tokens, and the number of the next block."""
    stop, ids = start + 1, encode(blocks[start])
    while len(ids) < length and stop < len(blocks):
        stop += 1
        ids = encode("".join(blocks[start:stop]))
    return stop, ids
