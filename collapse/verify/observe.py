"""Runs a job on one model and keeps what is compared; the model is gone before the next one is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from collapse.program import Program
from collapse.progress import GRAPH_FORWARD, Stopwatch
from collapse.trace import CACHE_ARGUMENTS, cache_argument
from collapse.verify.job import Ids, Job, cuts


@dataclass(frozen=True)
class Continuation:
    """Greedy tokens of one prompt, and by how much the first choice led the second at each step.

    Choices are made among the columns that are looked at; `leaves` says whether the first choice among all was
    another one at some step.
    """

    prompt: Ids
    tokens: Ids
    margins: tuple[float, ...]
    leaves: bool = False


@dataclass(frozen=True)
class Observation:
    """What one model said on a job; logits are fp32, `[positions, columns]`.

    `cached` is empty for a model without a cache, `padded` is None where no batch was run.
    """

    full: tuple[torch.Tensor, ...]
    cached: tuple[torch.Tensor, ...]
    padded: torch.Tensor | None
    greedy: tuple[Continuation, ...]


class Runner(Protocol):
    """One model, or one graph with its weights."""

    has_cache: bool

    def __call__(
        self, ids: torch.Tensor, mask: torch.Tensor, cache: Any, positions: Sequence[int]
    ) -> tuple[torch.Tensor, Any]:
        """Return logits `[batch, len(positions), vocabulary]` at `positions` of `ids`, and the grown cache."""
        ...


class ModelRunner:
    """Runs a transformers model."""

    def __init__(self, model: PreTrainedModel, watch: Stopwatch | None = None) -> None:
        self._model = model
        (watch or Stopwatch(quiet=True)).measure_forward(model)
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self._cache = cache_argument(model)
        self.has_cache = self._cache is not None

    def __call__(
        self, ids: torch.Tensor, mask: torch.Tensor, cache: Any, positions: Sequence[int]
    ) -> tuple[torch.Tensor, Any]:
        """See `Runner`; rows with padding get the positions that `generate` gives them."""
        wanted = torch.tensor(positions)
        extra: dict[str, Any] = {}
        if cache is not None:
            extra[str(self._cache)] = cache
        if "position_ids" in self._takes:
            extra["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        if "logits_to_keep" in self._takes:
            extra["logits_to_keep"] = wanted
        if self.has_cache:
            extra["use_cache"] = True
        if cache is not None and not _keeps_tokens(cache):
            mask = mask[:, -ids.shape[1] :]
        output = self._model(input_ids=ids, attention_mask=mask, **extra)
        logits = output.logits if "logits_to_keep" in self._takes else output.logits[:, wanted]
        grown = next((found for name in CACHE_ARGUMENTS if (found := getattr(output, name, None)) is not None), None)
        return logits, grown


def _keeps_tokens(cache: Any) -> bool:
    """Whether a cache keeps something of every token, which a mask must then cover; a state of fixed size does not."""
    try:
        cache.get_seq_length()
    except ValueError:  # transformers' answer for a cache without attention layers
        return False
    return True


class ProgramRunner:
    """Runs a traced program on weights in memory."""

    def __init__(self, program: Program, weights: Mapping[str, torch.Tensor], watch: Stopwatch | None = None) -> None:
        self._program, self._weights = program, weights
        self._watch = watch or Stopwatch(quiet=True)
        self.has_cache = bool(program.cache)

    def __call__(
        self, ids: torch.Tensor, mask: torch.Tensor, cache: Any, positions: Sequence[int]
    ) -> tuple[torch.Tensor, Any]:
        """See `Runner`."""
        with self._watch.stage(GRAPH_FORWARD):
            logits, grown = self._program.run(self._weights, ids, mask, cache)
        return logits[:, list(positions)], grown


def observe(run: Runner, job: Job, columns: torch.Tensor | None = None) -> Observation:
    """Run `job`; of the logits only `columns` are kept (None: all), and greedy choices are made among them."""
    with torch.no_grad():
        full = tuple(
            _picked(_prefill(run, ids, positions), columns)
            for ids, positions in zip(job.sequences, job.positions, strict=True)
        )
        through = job.cached if run.has_cache else ()
        cached = tuple(_picked(_through_cache(run, job.sequences[n], job.decode), columns) for n in through)
        padded = _picked(_padded(run, job), columns) if job.padded else None
        greedy = tuple(c for group in job.prompts for c in _continued(run, group, job.new_tokens, columns))
    return Observation(full, cached, padded, greedy)


def _picked(logits: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    return (logits if columns is None else logits[:, columns]).to(torch.float32).clone()


def _prefill(run: Runner, ids: Ids, positions: Sequence[int]) -> torch.Tensor:
    row = torch.tensor([ids])
    return run(row, torch.ones_like(row), None, positions)[0][0]


def _through_cache(run: Runner, ids: Ids, decode: int) -> torch.Tensor:
    """Return the logits at the end of every chunk."""
    row, cache, start, found = torch.tensor([ids]), None, 0, []
    for stop in cuts(len(ids), decode):
        mask = torch.ones(1, stop, dtype=torch.long)
        logits, cache = run(row[:, start:stop], mask, cache, [stop - start - 1])
        found.append(logits[0])
        start = stop
    return torch.cat(found)


def _padded(run: Runner, job: Job) -> torch.Tensor:
    """Return the last logits of every row of the left-padded batch; the padding repeats the row's first token."""
    rows = [job.sequences[number][:length] for number, length in job.padded]
    width = max(map(len, rows))
    ids = torch.tensor([(row[0],) * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return run(ids, mask, None, [width - 1])[0][:, 0]


def _continued(
    run: Runner, prompts: Sequence[Ids], count: int, columns: torch.Tensor | None = None
) -> list[Continuation]:
    """Continue prompts of equal length greedily; the end-of-sequence token is a token like any other."""
    ids, cache = torch.tensor(prompts), None
    fed = ids
    tokens: list[torch.Tensor] = []
    margins: list[torch.Tensor] = []
    left = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(count):
        mask = torch.ones_like(ids)
        logits, cache = run(fed, mask, cache, [fed.shape[1] - 1])
        among = _picked(logits[:, 0], columns)
        best = among.topk(min(2, among.shape[-1]), dim=-1)
        tokens.append(among.argmax(-1) if columns is None else columns[among.argmax(-1)])
        left |= logits[:, 0].argmax(-1) != tokens[-1]
        margins.append(best.values[:, 0] - best.values[:, -1])
        ids = torch.cat([ids, tokens[-1][:, None]], dim=1)
        fed = tokens[-1][:, None] if run.has_cache else ids
    chosen, leads = torch.stack(tokens, 1).tolist(), torch.stack(margins, 1).tolist()
    return [
        Continuation(prompt, tuple(token), tuple(lead), leaves)
        for prompt, token, lead, leaves in zip(prompts, chosen, leads, left.tolist(), strict=True)
    ]
