"""Models that are finished: a source, and directories that were made of it, collapsed or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from collapse.analysis.flops import cost
from collapse.analysis.ties import config_as_loaded
from collapse.analysis.traffic import element_bytes
from collapse.checkpoint import Checkpoint
from collapse.errors import CheckpointError, CollapseError
from collapse.manifest import MANIFEST, Manifest, load_manifest
from collapse.report.data import Figures, Report
from collapse.rewrite.tensors import token_narrow
from collapse.runtime.load import load
from collapse.source_model import load_plain
from collapse.sources import resolve
from collapse.trace import quiet, trace

PROMPT = 512  # of what is counted here, as in a schema's default workload; sizes do not depend on it
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Finished:
    """One model by its name in a record; `manifest` is there where collapse wrote the directory."""

    name: str
    checkpoint: Checkpoint
    manifest: Manifest | None

    @cached_property
    def kept(self) -> torch.Tensor | None:
        """The source's id of every id, [ids]; None where all ids are as in the source."""
        narrow = token_narrow(self.manifest.plan) if self.manifest else None
        return torch.tensor(list(narrow.kept)) if narrow else None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The directory's own tokenizer, without padding and truncation."""
        path = self.checkpoint.root / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError("has no tokenizer.json", where=self.name, fix="give a model with its tokenizer")
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    def load(self, dtype: torch.dtype | str = torch.float32) -> PreTrainedModel:
        """Load the model on the CPU, a collapsed one as `collapse.load` does, without its guard."""
        if self.manifest is not None:
            return load(self.checkpoint.root, dtype=dtype, guard="off")
        with quiet():
            return load_plain(self.checkpoint, dtype).model

    @cached_property
    def figures(self) -> Figures:
        """What its report says of the result; of a model without one, what is counted on its graph."""
        report = self.checkpoint.root / "report.json"
        if self.manifest is not None and report.is_file():
            return Report.load(report).after
        program = trace(config_as_loaded(self.checkpoint))
        return Figures.of(cost(program, prompt=PROMPT, element_bytes=element_bytes(self.checkpoint, program)))

    def source_ids(self, ids: Sequence[int]) -> Ids:
        """Return the source's ids of some of this model's."""
        return tuple(ids) if self.kept is None else tuple(self.kept[list(ids)].tolist())


def open_all(source: str, outputs: Sequence[str]) -> tuple[Finished, ...]:
    """Return the source and the `[NAME=]DIR` of `outputs`; raises `CollapseError` for one that was made of another."""
    checkpoint = resolve(source)
    first = Finished("source", checkpoint, None)
    found = (first, *(_output(text, checkpoint) for text in outputs))
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise CollapseError(f"two models are called {name}", fix="give NAME=DIR")
    return found


def _output(text: str, source: Checkpoint) -> Finished:
    name, _, folder = text.rpartition("=")
    root = Path(folder)
    label = name or root.resolve().name
    if not (root / MANIFEST).is_file():
        return Finished(label, Checkpoint.open(root), None)
    manifest = load_manifest(root)
    if manifest.source.digest != source.digest:
        raise CollapseError("was collapsed from another source", where=label, fix=f"give {manifest.source.label}")
    return Finished(label, Checkpoint.open(root), manifest)
