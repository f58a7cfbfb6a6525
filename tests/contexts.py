"""Contexts for passes, on tiny models and without a corpus."""

from __future__ import annotations

from pathlib import Path

import collapse.models  # noqa: F401
from collapse.analysis.token_use import Samples
from collapse.checkpoint import Checkpoint
from collapse.passes import Context
from collapse.program import Program
from collapse.progress import Stopwatch
from collapse.schema import InputSchema
from collapse.sequences import Sequences, sequences
from collapse.source_model import load_source
from collapse.trace import load_config, trace


def context_of(
    root: Path,
    schema: InputSchema | None = None,
    *,
    drawn: Sequences | None = None,
    program: Program | None = None,
    **options,
) -> Context:
    """A context of the checkpoint at `root`, under a schema that lists all 48 ids unless given."""
    checkpoint = Checkpoint.open(root)
    schema = schema or InputSchema(type="text", tokens=tuple(range(48)), max_tokens=16)
    config = load_config(checkpoint)
    watch = Stopwatch(quiet=True)
    return Context(
        checkpoint=checkpoint,
        config=config,
        schema=schema,
        program=program or trace(config),
        texts=Samples(),
        output_texts=Samples(),
        sequences=drawn or sequences(checkpoint, schema, None),
        load_model=lambda: load_source(checkpoint, watch),
        **options,
    )
