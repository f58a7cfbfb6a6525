"""What a pass is: it looks at a context and proposes rewrites, or says why it leaves a site alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from collapse.analysis.token_use import Samples
from transformers import PreTrainedConfig, PreTrainedModel

from collapse.analysis.reachability import Reachability, reachability
from collapse.checkpoint import Checkpoint
from collapse.plan import Rewrite, Skipped, Stage
from collapse.schema import InputSchema
from collapse.sequences import Sequences
from collapse.trace import Program

Progress = Callable[[str, int, int], None]  # what, how many done, of how many


def no_progress(what: str, done: int, total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Context:
    """What passes may look at. Costly facts are computed when first asked for, once."""

    checkpoint: Checkpoint
    config: PreTrainedConfig
    schema: InputSchema
    program: Program
    texts: Samples
    output_texts: Samples
    sequences: Sequences
    load_model: Callable[[], tuple[PreTrainedModel, frozenset[str]]]
    stage: Stage = "erase"
    placeholder: bool = False
    progress: Progress = no_progress

    @cached_property
    def reachability(self) -> Reachability:
        """Which tensors the program reads."""
        return reachability(self.program)

    @cached_property
    def loaded(self) -> tuple[PreTrainedModel, frozenset[str]]:
        """The source model in fp32, and the names in its files that no module claims."""
        return self.load_model()


@dataclass(frozen=True)
class Proposal:
    """What a pass would do, and what it looked at and left."""

    rewrites: tuple[Rewrite, ...] = ()
    skipped: tuple[Skipped, ...] = ()


class Pass(Protocol):
    """A frozen dataclass with a kebab-case `name` whose fields are its options."""

    @property
    def name(self) -> str:
        """Name in plans and on the command line."""

    def propose(self, context: Context) -> Proposal:
        """Decide; nothing is changed here."""
