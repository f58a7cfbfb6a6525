"""What a pass is: it looks at a context and proposes rewrites, or says why it leaves a site alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from collapse.analysis.reachability import Reachability, reachability
from collapse.analysis.tables import token_tables
from collapse.analysis.ties import duplicates
from collapse.analysis.token_use import Samples
from collapse.budget import Budget
from collapse.checkpoint import Checkpoint
from collapse.memory import release_memory
from collapse.plan import Layout, Rewrite, Skipped, Stage
from collapse.program import Program
from collapse.schema import InputSchema
from collapse.search_path import SearchPath
from collapse.sequences import Sequences

Progress = Callable[[str, int, int], None]  # what, how many done, of how many


def no_progress(what: str, done: int, total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Context:
    """What passes may look at. Costly facts are computed when first asked for, once.

    `related` is the built-in sample of the schema's type where `texts` are the user's own: text of the same domain,
    which is neither held out nor decides what may occur.
    """

    checkpoint: Checkpoint
    config: PreTrainedConfig
    schema: InputSchema
    program: Program
    texts: Samples
    output_texts: Samples
    sequences: Sequences
    load_model: Callable[[], tuple[PreTrainedModel, frozenset[str]]]
    load_contrast: Callable[[], tuple[tuple[int, ...], ...]] = tuple
    threshold: float | None = None
    stage: Stage = "erase"
    placeholder: bool = False
    layout: Layout = "native"
    budgets: tuple[Budget, ...] = ()
    protected: tuple[str, ...] = ()
    related: tuple[str, ...] = ()
    cache: Path | None = None
    progress: Progress = no_progress

    @cached_property
    def reachability(self) -> Reachability:
        """Which tensors the program reads."""
        return reachability(self.program)

    @cached_property
    def loaded(self) -> tuple[PreTrainedModel, frozenset[str]]:
        """The source model in fp32, and the names in its files that no module claims."""
        return self.load_model()

    def release(self) -> None:
        """Let go of the source model; it is loaded again when asked for."""
        self.__dict__.pop("loaded", None)
        release_memory()

    @cached_property
    def tied_copies(self) -> dict[str, str]:
        """Tensor of the files -> the tensor it is tied to and whose bytes it repeats; never a quantised one."""
        copies = duplicates(self.checkpoint)
        return {name: first for name, first in copies.items() if self.checkpoint.group(name) is None}

    @cached_property
    def token_tables(self) -> tuple[str, ...]:
        """Tensors of the files whose rows are token ids, without repeated copies of tied ones."""
        rows = {alias for name in token_tables(self.program) for alias in self.program.aliases(name)}
        names = (name for name in self.checkpoint.tensors if self.program.model_name(name) in rows)
        return tuple(sorted(name for name in names if name not in self.tied_copies and self.checkpoint.is_weight(name)))

    def file_names(self, name: str) -> tuple[str, ...]:
        """Return the tensors of the files that hold the model's tensor `name`; files may call it otherwise."""
        aliases = self.program.aliases(name)
        found = (tensor for tensor in self.checkpoint.tensors if self.program.model_name(tensor) in aliases)
        return tuple(tensor for tensor in found if self.checkpoint.is_weight(tensor))

    @property
    def token_rows(self) -> int:
        """Number of rows of the token tables; 0 where there are none."""
        return next((self.rows_of(name) for name in self.token_tables), 0)

    def rows_of(self, name: str) -> int:
        """Number of rows of a tensor of the files, or of the quantised weight that it is part of."""
        group = self.checkpoint.group(name)
        shape = self.checkpoint.tensors[name].shape if group is None else group.shape
        return (shape or self.program.shapes[self.program.model_name(name) or name])[0]


@dataclass(frozen=True)
class Proposal:
    """What a pass would do, and what it looked at and left.

    `values` has the computed data of every tensor that a `Replace` among the rewrites names, by the source's name, in
    the source's dtype and the output's shape, and of every tensor that a `StandIn` or `AddBias` adds, by its prefix and
    part; `collapse.fingerprint.data_digest` gives the digests of the plan. `path` is what a search went through.
    """

    rewrites: tuple[Rewrite, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    path: SearchPath | None = None


class Pass(Protocol):
    """A frozen dataclass with a kebab-case `name` whose fields are its options."""

    @property
    def name(self) -> str:
        """Name in plans and on the command line."""

    def propose(self, context: Context) -> Proposal:
        """Decide; nothing is changed here."""
