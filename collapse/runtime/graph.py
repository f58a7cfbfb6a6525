"""Run a collapsed model as a graph, with the edits that no checkpoint can say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from collapse.analysis.ties import config_as_loaded
from collapse.checkpoint import Checkpoint
from collapse.errors import SchemaError
from collapse.manifest import load_manifest
from collapse.plan import Plan
from collapse.program import Program
from collapse.progress import Stopwatch
from collapse.rewrite.graph import rewrite_program, rewrite_weights
from collapse.rewrite.specialise import Specialised, specialise
from collapse.rewrite.values import plan_digests, require_digests, values_of
from collapse.source_model import source_weights
from collapse.trace import trace


@dataclass(frozen=True)
class State:
    """Where a run stands.

    Attributes:
        logits: `[batch, 1, vocabulary]` fp32, of the last position; of every new one where the plan keeps all.
        mask: attention mask `[batch, past]` of everything that was fed.
        cache: the grown cache, as `Program.run` returns it.
    """

    logits: torch.Tensor
    mask: torch.Tensor
    cache: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class LoadedGraph:
    """A graph with its weights in fp32, ready to run; nothing in it changes.

    `max_tokens` bounds the whole sequence, past included; None where the schema gives no bound.
    """

    specialised: Specialised
    weights: Mapping[str, torch.Tensor]
    max_tokens: int | None = None

    def prefill(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> State:
        """Feed prompts.

        Args:
            ids: `[batch, prompt]`, int64; shorter prompts are padded on the left.
            mask: `[batch, prompt]`, int64, 0 marks padding; None stands for ones.

        Raises `SchemaError` for a prompt that is longer, or a mask that is other, than what the graph was made for.
        """
        if ids.dim() != 2 or not ids.numel():
            raise SchemaError(
                f"the ids have the shape {list(ids.shape)}", fix="give [batch, prompt], of a token or more"
            )
        given = torch.ones_like(ids) if mask is None else mask
        if given.shape != ids.shape:
            raise SchemaError(f"the mask has the shape {list(given.shape)}, the ids have {list(ids.shape)}")
        if bool((given[:, :-1] > given[:, 1:]).any()):  # the last position would be one of padding
            raise SchemaError("the mask has zeros after a token", fix="pad on the left")
        return self._run(ids, given, None)

    def decode(self, state: State, ids: torch.Tensor) -> State:
        """Feed the next tokens `[batch, new]` after `state`; raises `SchemaError` beyond the longest sequence."""
        mask = torch.cat([state.mask, torch.ones_like(ids)], dim=1)
        return self._run(ids, mask, state.cache)

    def generate(self, ids: torch.Tensor, max_new_tokens: int, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Continue `ids` greedily; return `[batch, prompt + max_new_tokens]`. No token ends the sequence early."""
        state = self.prefill(ids, mask)
        for step in range(max_new_tokens):
            chosen = state.logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, chosen], dim=1)
            if step + 1 < max_new_tokens:
                state = self.decode(state, chosen) if state.cache else self._whole(state, ids)
        return ids

    def _whole(self, state: State, ids: torch.Tensor) -> State:
        """Feed everything again to a model that keeps no cache."""
        return self._run(ids, torch.cat([state.mask, torch.ones_like(ids[:, -1:])], dim=1), None)

    def _run(self, ids: torch.Tensor, mask: torch.Tensor, cache: tuple[torch.Tensor, ...] | None) -> State:
        if self.max_tokens is not None and mask.shape[1] > self.max_tokens:
            raise SchemaError(f"{mask.shape[1]} tokens break max_tokens {self.max_tokens}", fix="shorten the input")
        if self.specialised.unpadded and not bool(mask.all()):
            raise SchemaError("the graph was made for inputs without padding", fix="give one length at a time")
        logits, grown = self.specialised.program.run(self.weights, ids, mask, cache)
        return State(logits, mask, grown)


def load_graph(directory: str | Path, source: str | Path | None = None) -> LoadedGraph:
    """Return the collapsed model in `directory` as a graph, specialised as its plan says.

    It is traced from the directory's own config. Its logits are those of the transformers model up to the order of
    sums: products of one row may run in another kernel.

    Args:
        directory: what `collapse export` wrote.
        source: the checkpoint that was collapsed; the graph and weights are then made from it, by the plan. Weights
            that the plan replaces are in no source: they are read from the directory, and must have their digests.

    Raises:
        CheckpointError: the directory is not a collapsed model, or cannot be loaded.
        PlanError: a replaced tensor of the directory has not the data that the plan has the digest of.
        UnsupportedError: the model cannot be traced.
    """
    root = Path(directory)
    plan = load_manifest(root).plan
    checkpoint = Checkpoint.open(Path(source) if source is not None else root)
    program, weights = trace(config_as_loaded(checkpoint)), source_weights(checkpoint, Stopwatch(quiet=True))
    if source is not None:
        values = values_of(root, Checkpoint.open(root).tensors.values(), plan)
        require_digests(values, plan_digests(plan))
        weights = rewrite_weights(program, weights, plan, checkpoint.config, values=values)
        program = rewrite_program(program, plan, checkpoint.config)
    return graph_of(program, weights, plan)


def graph_of(program: Program, weights: Mapping[str, torch.Tensor], plan: Plan) -> LoadedGraph:
    """Return a collapsed program with its weights, specialised as `plan` says."""
    specialised = specialise(program, plan)
    stated = plan.input_schema.get("max_tokens")
    bounds = [bound for bound in (specialised.max_tokens, stated) if isinstance(bound, int)]
    return LoadedGraph(specialised, specialised.weights(weights), min(bounds, default=None))
