"""In-schema token sequences: what the model is run on, to choose and to check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from collapse.canonical import digest
from collapse.checkpoint import Checkpoint
from collapse.corpus import Split, sample_tokens
from collapse.errors import CheckpointError, UnsupportedError
from collapse.schema import InputSchema

CALIBRATION, HELD_OUT = 12, 64
CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Sequences:
    """Source token ids. Calibration sequences choose; held-out ones only judge what was chosen."""

    calibration: tuple[Ids, ...]
    held_out: tuple[Ids, ...]

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of either side."""
        return {"calibration": digest(self.calibration), "held_out": digest(self.held_out)}


def context_length(config: dict[str, Any]) -> int | None:
    """Return how many tokens the model takes by its config.json, or None where it does not say."""
    text = config.get("text_config") or config
    lengths = [text[name] for name in CONTEXT_FIELDS if isinstance(text.get(name), int)]
    return min((length for length in lengths if length > 0), default=None)


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


def sequences(checkpoint: Checkpoint, schema: InputSchema, split: Split | None, seed: int = 0) -> Sequences:
    """Return sequences of the corpus split, or of the schema's own ids where there is no corpus.

    A sequence starts at a block, goes on through the following blocks of the same side, and is cut at
    `sequence_length`; the starts are spread evenly.
    """
    length = sequence_length(checkpoint, schema)
    if split is None:
        drawn = sample_tokens(schema, seed, CALIBRATION + HELD_OUT, length)
        ids = [tuple(sequence) for sequence in drawn]
        return Sequences(tuple(ids[:CALIBRATION]), tuple(ids[CALIBRATION:]))
    encode = encoder(checkpoint)
    return Sequences(
        tuple(cut(split.calibration, CALIBRATION, encode, length)),
        tuple(cut(split.held_out, HELD_OUT, encode, length)),
    )


def cut(blocks: Sequence[str], count: int, encode: Callable[[str], Ids], length: int) -> Iterator[Ids]:
    """Yield at most `count` sequences of `length` tokens, or of as many as the blocks from a start on have."""
    count = min(count, len(blocks))
    for number in range(count):
        start = number * len(blocks) // count
        stop = start + 1
        ids = encode(blocks[start])
        while len(ids) < length and stop < len(blocks):
            stop += 1
            ids = encode("".join(blocks[start:stop]))
        if ids:
            yield ids[:length]
