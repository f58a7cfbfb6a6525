"""The in-schema sequences that verification runs: held-out text, as token ids of the source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from collapse.checkpoint import Checkpoint
from collapse.corpus import Split, builtin_corpus, read_corpus, split
from collapse.plan import Plan
from collapse.rewrite.tensors import token_narrow
from collapse.schema import InputSchema
from collapse.sequences import Sequences, sequences

SAMPLES, SAMPLE_LENGTH = 8, 128  # held-out sequences that are run, and their longest part


def draw_samples(
    source: Checkpoint,
    plan: Plan,
    *,
    corpus: Sequence[Path] = (),
    text_field: str | None = None,
    seed: int = 0,
    count: int = SAMPLES,
) -> list[list[int]]:
    """Return `count` samples under the plan's schema, for verifying without the run that made the output.

    They come from the schema's token ids where it lists them, else from the held-out part of `corpus` (of `.jsonl`
    records the field `text_field`), or of the schema's built-in sample. Raises `SchemaError` where the text breaks the
    schema, `UnsupportedError` where the source has no tokenizer.
    """
    schema = InputSchema.model_validate(plan.input_schema)
    parts: Split | None = None
    if corpus or schema.tokens is None:
        parts = split(read_corpus(corpus, schema, text_field) if corpus else builtin_corpus(schema), seed)
    return inside(sequences(source, schema, parts, seed), plan, max(SAMPLES, count))


def inside(drawn: Sequences, plan: Plan, count: int) -> list[list[int]]:
    """Return `count` stretches of held-out sequences whose tokens the plan keeps: the longest, one of them whole.

    One more is there where a sequence past the attention windows was drawn. The others are cut to `SAMPLE_LENGTH`.
    Where the kept ids are proved to suffice, nothing is left out: a token that is not among them refutes the proof.
    """
    narrow = token_narrow(plan)
    kept = None if narrow is None or narrow.evidence.grade == "proved" else frozenset(narrow.kept)
    stretches = sorted((longest_run(ids, kept) for ids in drawn.held_out), key=len, reverse=True)[:count]
    long = [run for ids in drawn.long if (run := longest_run(ids, kept))]
    return long + [run if number == 0 else run[:SAMPLE_LENGTH] for number, run in enumerate(stretches) if run]


def longest_run(ids: Sequence[int], kept: frozenset[int] | None) -> list[int]:
    """Return the longest contiguous part of `ids` within `kept`; all of it where `kept` is None."""
    best: list[int] = []
    current: list[int] = []
    for token in ids:
        current = [*current, token] if kept is None or token in kept else []
        best = max(best, current, key=len)
    return best
