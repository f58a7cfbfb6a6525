"""`influence`: what each site of a model does to its logits on a domain, for the command line and for Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collapse.analysis.influence_store import Store, opened
from collapse.analysis.site_influence import Influence, Settings, batches_of, influence_of
from collapse.analysis.sites import places_of
from collapse.canonical import digest
from collapse.corpus import sample_tokens
from collapse.errors import SchemaError
from collapse.manifest import versions
from collapse.options import DEFAULTS, Options
from collapse.passes import Context
from collapse.pipeline import prepare
from collapse.progress import Stopwatch
from collapse.schema import InputSchema, load_schema
from collapse.sequences import cut, encoder, sequence_length
from collapse.sources import cache_directory

WINDOW = 128  # tokens, as the layers pass has it
TOKENS = 4096
MEASUREMENT = 1  # raised whenever the same settings would give other figures
USUAL = Settings()


def influence(
    model: str | Path,
    schema: str | Path | dict[str, object] | InputSchema = "log",
    options: Options = DEFAULTS,
    *,
    settings: Settings = USUAL,
    tokens: int = TOKENS,
    generic: bool = False,
    cache: Path | None = None,
    watch: Stopwatch | None = None,
) -> Influence:
    """Estimate and measure what short-circuiting the sites of `model` costs its logits on the schema's text.

    Args:
        model: a directory, a `.gguf` file or a hub id.
        schema: of the domain; its calibration text is used, of `options.corpus` or the built-in sample.
        options: `corpus`, `text_field` and `seed` count here; the seed is of the split and of the drawn labels.
        settings: which sites, and how many of them are measured.
        tokens: how much text, in windows of 128 tokens or what schema and model allow.
        generic: use the built-in prose instead of the domain's text.
        cache: where figures are kept, so that a killed run goes on; by default `influence` in `cache_directory()`.
        watch: shows progress.

    Raises `CollapseError` for a model, schema or corpus that cannot be used, and for a cache that is damaged.
    """
    watch = watch or Stopwatch(quiet=True)
    context = _prepared(model, load_schema(schema), options, generic, watch)
    settings = replace(settings, seed=options.seed)
    with watch.stage("influence"):
        windows = _windows(context, tokens, options.seed)
        batches = batches_of(windows, context.config.get_text_config().vocab_size)
        places = places_of(context.program, context.checkpoint, context.schema.workload.prompt)
        with _store(context, batches, settings, cache) as store:
            return influence_of(lambda: context.loaded[0], places, batches, settings, store, watch.advance)


def _prepared(model: str | Path, schema: InputSchema, options: Options, generic: bool, watch: Stopwatch) -> Context:
    if not generic:
        return prepare(model, schema, options, watch)
    if options.corpus:
        raise SchemaError("is the domain's text, and generic text was asked for", where="corpus", fix="leave one out")
    return prepare(model, load_schema("text"), options, watch)


def _windows(context: Context, tokens: int, seed: int) -> Tensor:
    """Return calibration text, [windows, tokens of each], at least one window."""
    length = min(WINDOW, sequence_length(context.checkpoint, context.schema))
    count = max(1, tokens // length)
    if context.texts.calibration:
        found = list(cut(context.texts.calibration, count, encoder(context.checkpoint), length))
    else:
        found = [tuple(ids) for ids in sample_tokens(context.schema, seed, count, length)]
    whole = [ids for ids in found if len(ids) == length]
    if not whole:
        raise SchemaError(f"there is no text of {length} tokens", where="corpus", fix="give more text")
    return torch.tensor(whole, dtype=torch.long)


@contextmanager
def _store(context: Context, batches: Sequence[Tensor], settings: Settings, cache: Path | None) -> Iterator[Store]:
    """Open the figures of just this model, text and way of measuring."""
    made_for: dict[str, Any] = {
        "measurement": MEASUREMENT,
        "source": context.checkpoint.digest,
        "schema": context.schema.digest,
        "calibration": digest([ids.tolist() for ids in batches]),
        "ranges": settings.ranges,
        "seed": settings.seed,
        "created_by": versions(),
    }
    with opened(cache or cache_directory() / "influence", made_for) as store:
        yield store
