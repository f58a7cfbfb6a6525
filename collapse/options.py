"""What a user can choose about a run, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from collapse.budget import Budget
from collapse.erase import MAX_SHARD_SIZE
from collapse.errors import PlanError
from collapse.heal.settings import Settings
from collapse.passes import MOVES, PASSES, Pass, together
from collapse.plan import Layout, Stage
from collapse.search_path import SearchPath

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


@dataclass(frozen=True)
class Options:
    """What a user can choose about a run.

    Attributes:
        corpus: files of in-schema text; empty for the schema's built-in sample.
        text_field: which field of JSON Lines holds the text.
        stage: how far a dead module goes: `fuse`, `short-circuit` or `erase`.
        threshold: of the run-time detector of `fuse`, nats; by default fitted to the corpus.
        placeholder: leave a 16-byte zero tensor under the name of every erased one of a dead module.
        layout: `native`, which plain transformers loads, or `free`, in which blocks may have shapes of their own.
        passes: names of the passes to run; all by default.
        seed: of the split and of the samples.
        max_shard_size: bytes of the largest weight file.
        prompts, new_tokens: greedy continuations that verification compares.
        budgets: what may be lost, or is to be saved; without any, only what costs nothing goes.
        heal: how the collapsed model is distilled from its source; by default it is not.
        protect: files of text that healing must not make worse.
        cache: a folder in which a search keeps what it measured, so that one that was interrupted goes on; by default
            it keeps nothing.
        searched: the path of the search that led to a reviewed plan, as of `load_path`, to be written with it.
        sign: the key that the manifest is signed with, of `collapse.signing.load_private_key`; by default it is not.
    """

    corpus: tuple[Path, ...] = ()
    text_field: str | None = None
    stage: Stage = "erase"
    placeholder: bool = False
    layout: Layout = "native"
    threshold: float | None = None
    passes: tuple[str, ...] = field(default_factory=lambda: tuple(p.name for p in PASSES))
    seed: int = 0
    max_shard_size: int = MAX_SHARD_SIZE
    prompts: int = 8
    new_tokens: int = 16
    sign: Ed25519PrivateKey | None = None
    budgets: tuple[Budget, ...] = ()
    heal: Settings | None = None
    protect: tuple[Path, ...] = ()
    cache: Path | None = None
    searched: SearchPath | None = None


DEFAULTS = Options()


def make_options(**given: Any) -> Options:
    """Return options; those given as None keep their default. Raises `PlanError` for what is unknown or has no use."""
    options = Options(**{name: value for name, value in given.items() if value is not None})
    stages = get_args(Stage)
    if options.stage not in stages:
        raise PlanError(f"unknown stage {options.stage!r}", fix=f"choose among {', '.join(stages)}")
    layouts = get_args(Layout)
    if options.layout not in layouts:
        raise PlanError(f"unknown layout {options.layout!r}", fix=f"choose among {', '.join(layouts)}")
    chosen_passes(options.passes)
    if options.budgets and not set(MOVES) & set(options.passes):
        raise PlanError(
            f"a budget is for the passes {', '.join(MOVES)}, none of which is to run",
            where="--budget",
            fix=f"add --pass {MOVES[0]}",
        )
    if options.heal and not options.budgets:
        raise PlanError("healing is of what a budget takes, and there is none", where="--heal", fix="add --budget")
    if options.protect and not options.heal:
        raise PlanError("text is protected from healing, which is not asked for", where="--protect", fix="add --heal")
    return options


def chosen_passes(names: Sequence[str]) -> tuple[Pass, ...]:
    """Return the passes called `names`, in the registry's order; raises `PlanError` for an unknown one."""
    known = [one.name for one in PASSES]
    for name in names:
        if name not in known:
            raise PlanError(f"unknown pass {name!r}", fix=f"choose among {', '.join(known)}")
    return together(one for one in PASSES if one.name in names)
