"""What is run on both models: which sequences, in which way, and which logits are looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Settings:
    """How much is compared.

    Attributes:
        prompts: sequences that are continued greedily.
        new_tokens: tokens of each continuation.
        cached: sequences that are also run through the cache.
        decode: tokens at their end that are then fed one by one.
        padded: rows of the left-padded batch.
        logit_bytes: bound on the fp32 logits that are kept of one model, all sequences together.
    """

    prompts: int = 8
    new_tokens: int = 16
    cached: int = 3
    decode: int = 4
    padded: int = 4
    logit_bytes: int = 128 << 20


@dataclass(frozen=True)
class Job:
    """The work for one model, in that model's token ids.

    Attributes:
        sequences: all samples; each is run whole (prefill).
        positions: for each sample, ascending, where its logits are looked at.
        cached: numbers of the samples that are run in two chunks and then token by token.
        padded: the rows of the left-padded batch: (sample, length of its prefix).
        prompts: batches of prompts of equal length, to be continued greedily.
        decode: tokens fed one by one at the end of a cached sample.
        new_tokens: tokens of each greedy continuation.
    """

    sequences: tuple[Ids, ...]
    positions: tuple[Ids, ...]
    cached: tuple[int, ...]
    padded: tuple[tuple[int, int], ...]
    prompts: tuple[tuple[Ids, ...], ...]
    decode: int
    new_tokens: int

    def renumbered(self, new_id: Mapping[int, int]) -> Job:
        """Return the same work in the ids of a model whose token ids were renumbered."""
        return replace(
            self,
            sequences=tuple(tuple(new_id[i] for i in ids) for ids in self.sequences),
            prompts=tuple(tuple(tuple(new_id[i] for i in ids) for ids in group) for group in self.prompts),
        )


def make_job(samples: Sequence[Sequence[int]], columns: int, context: int | None, settings: Settings) -> Job:
    """Plan the work for `samples` of source ids.

    Args:
        samples: token id sequences; those longer than `context` are cut.
        columns: number of logits that are kept of each position.
        context: the longest sequence that both models take; None where there is no bound.
        settings: how much is compared.
    """
    if context is not None:  # a prompt of one token leaves the most room for its continuation
        settings = replace(settings, new_tokens=min(settings.new_tokens, max(1, context - 1)))
    sequences = tuple(tuple(ids[:context]) for ids in samples if ids)
    longest = max(range(len(sequences)), key=lambda number: len(sequences[number]))
    cached = tuple(dict.fromkeys((longest, *range(len(sequences)))))[: settings.cached]
    padded = _padded_rows(sequences, settings.padded)
    share = max(1, settings.logit_bytes // (4 * columns * len(sequences)))
    needed: list[set[int]] = [set() for _ in sequences]
    for number in cached:
        needed[number] |= {cut - 1 for cut in cuts(len(sequences[number]), settings.decode)}
    for number, length in padded:
        needed[number].add(length - 1)
    positions = tuple(
        tuple(sorted(_spread(len(ids), share) | extra)) for ids, extra in zip(sequences, needed, strict=True)
    )
    prompts = _prompts(sequences, context, settings)
    return Job(sequences, positions, cached, padded, prompts, settings.decode, settings.new_tokens)


def cuts(length: int, decode: int) -> Ids:
    """Return where a sequence is cut for the cache: half of the prefill, all of it, then after each token."""
    prefill = max(1, length - decode)
    return tuple(cut for cut in (prefill // 2, *range(prefill, length + 1)) if cut > 0)


def _spread(length: int, count: int) -> set[int]:
    """Return up to `count` positions, evenly spaced, the last one included."""
    if length <= count:
        return set(range(length))
    return {(number + 1) * length // count - 1 for number in range(count)}


def _padded_rows(sequences: Sequence[Ids], rows: int) -> tuple[tuple[int, int], ...]:
    """Take prefixes of different length, so that all rows but the longest are padded; one sample can give several."""
    chosen = [number % len(sequences) for number in range(rows)]
    return tuple((number, max(1, len(sequences[number]) * (row + 1) // rows)) for row, number in enumerate(chosen))


def _prompts(sequences: Sequence[Ids], context: int | None, settings: Settings) -> tuple[tuple[Ids, ...], ...]:
    """Group prompts of about the same length in batches of 8, each cut to its shortest: no padding is needed."""
    room = None if context is None else max(1, context - settings.new_tokens)
    prompts = sorted((ids[:room] for ids in sequences[: settings.prompts]), key=len)
    groups = (prompts[start : start + 8] for start in range(0, len(prompts), 8))
    return tuple(tuple(ids[: len(group[0])] for ids in group) for group in groups)
