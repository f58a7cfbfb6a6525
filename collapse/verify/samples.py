"""Draws in-schema samples as token ids of the source, for verifying without the run that made the output."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from collapse.checkpoint import Checkpoint
from collapse.corpus import Corpus, builtin_corpus, read_corpus, sample_texts, sample_tokens, split
from collapse.errors import SchemaError
from collapse.plan import Plan
from collapse.schema import InputSchema

CHARACTERS_PER_TOKEN = 2  # fewer than any of the supported tokenizers has on text, so that samples rarely end early


def draw_samples(
    source: Checkpoint, plan: Plan, *, corpus: Sequence[Path] = (), seed: int = 0, count: int = 8, length: int = 128
) -> list[list[int]]:
    """Return `count` samples of up to `length` ids of the source's tokenizer, under the plan's schema.

    They are drawn uniformly from the schema's token ids where it lists them, else cut from the held-out part of
    `corpus`, or of the schema's built-in sample. Raises `SchemaError` where there is no text or no tokenizer.
    """
    schema = InputSchema.model_validate(plan.input_schema)
    length = min(length, schema.max_tokens or length)
    if schema.tokens is not None:
        return sample_tokens(schema, seed, count, length)
    parts = split(read_corpus(corpus, schema) if corpus else builtin_corpus(schema), seed)
    from transformers import AutoTokenizer

    from collapse.trace import quiet

    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(str(source.root), local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a missing or damaged tokenizer
        message = f"the source has no tokenizer that transformers can load ({type(error).__name__})"
        raise SchemaError(message, where=source.label, fix="list token ids in the schema: tokens") from None
    held_out = Corpus(parts.held_out, ("held out",) * len(parts.held_out))
    texts = sample_texts(schema, held_out, seed, count, CHARACTERS_PER_TOKEN * length)
    return [tokenizer(text)["input_ids"][:length] for text in texts]
