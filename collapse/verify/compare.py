"""Compares what two models said on one job. Like is compared with like: prefill with prefill, decode with decode."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from collapse.certify.bounds import clopper_pearson
from collapse.verdict import Check
from collapse.verify.job import Ids, Job, cuts
from collapse.verify.observe import Continuation, Observation

Counterexample = dict[str, Any]
Finding = tuple[Check, Counterexample | None]

DELTA = 0.05  # of the bound on the share of continuations that leave the kept tokens


@dataclass(frozen=True)
class Tolerance:
    """Two logits agree within `absolute + relative * |reference|`, and within `rounding` in any case."""

    absolute: float
    relative: float
    rounding: float = 0.0

    def bound(self, reference: torch.Tensor) -> torch.Tensor:
        """Return the largest allowed difference from each reference value; a finite one, so that infinity fails."""
        bound = self.absolute + self.relative * reference.abs().nan_to_num(nan=0.0, posinf=0.0)
        return bound.clamp(min=self.rounding)

    def widened(self, extra: float) -> Tolerance:
        """Return the tolerance for a claim that allows a difference of `extra`."""
        return replace(self, absolute=self.absolute + extra)

    def rounded(self, rounding: float) -> Tolerance:
        """Return the tolerance for two ways to compute one function, of which the source's differ by `rounding`."""
        return replace(self, rounding=rounding)


EQ = Tolerance(1e-5, 1.3e-6)  # the same fp32 arithmetic, sums perhaps in another order
OTHER_SHAPE = Tolerance(1e-4, 1e-5)  # one model run in other pieces: products of other shapes, other kernels


@dataclass(frozen=True)
class Block:
    """Logits `[positions, columns]` of one sequence; `ids` are the source's."""

    ids: Ids
    positions: Sequence[int]
    reference: torch.Tensor
    found: torch.Tensor


def compare_logits(name: str, blocks: Sequence[Block], tolerance: Tolerance, columns: Sequence[int]) -> Finding:
    """Check every logit; `columns` are the source ids of the columns.

    Where all logits agree, another argmax is a near tie by construction; those are counted. Logits that are not
    finite fail unless both sides are the same infinity.
    """
    worst: Counterexample | None = None
    for block in blocks:
        gap = _gap(block)
        if bool((gap > tolerance.bound(block.reference)).any()) and (worst is None or _larger(gap, worst)):
            worst = _counterexample(name, block, gap, columns)
    figures = figures_of(blocks)
    if worst is None:
        detail = f"{figures['logits']} logits at {figures['positions']} positions agree"
        return Check(name=name, passed=True, detail=detail, figures=figures), None
    where = f"token {worst['id']} at position {worst['position']} of a sample: {worst['expected']} and {worst['found']}"
    return Check(name=name, passed=False, detail=f"logits differ: {where}", figures=figures), worst


def compare_greedy(
    name: str,
    pairs: Sequence[tuple[Continuation, Continuation]],
    source_ids: Sequence[int],
    slack: float,
) -> Finding:
    """Check greedy tokens, reference against found; both choose among the kept ids.

    A pair is compared up to a near tie: a step where the reference's first choice leads by at most `slack`.
    Continuations in which the reference's first choice among all ids is another one are counted: they leave the
    kept tokens. `source_ids` translates the found tokens.
    """
    figures = {"prompts": len(pairs), "stayed": 0, "left": 0, "near_ties": 0, "tokens": 0}
    failure: Counterexample | None = None
    for reference, found in pairs:
        outcome, equal = _follow(reference, [source_ids[token] for token in found.tokens], slack)
        figures["tokens"] += equal
        if outcome == "differs":
            wrong = source_ids[found.tokens[equal]]
            failure = failure or {
                "check": name, "ids": [*reference.prompt, *reference.tokens[:equal]], "position": equal,
                "expected": reference.tokens[equal], "found": wrong, "margin": reference.margins[equal],
            }  # fmt: skip
        else:
            figures["near_ties"] += outcome == "near tie"
            figures["left" if reference.leaves else "stayed"] += 1
    if failure:
        detail = f"after {failure['position']} tokens: {failure['expected']} became {failure['found']}"
        return Check(name=name, passed=False, detail=detail, figures=dict(figures)), failure
    if not figures["tokens"]:
        detail = "no token could be compared: every continuation begins with a near tie"
        return Check(name=name, passed=None, detail=detail, figures=dict(figures)), None
    bound = clopper_pearson(figures["left"], len(pairs), DELTA)
    stays = f"{figures['stayed']} of {len(pairs)} continuations stay in the kept tokens, {figures['left']} leave them"
    stays += f" (of such prompts at most {bound:.1%} do, at {1 - DELTA:.0%} confidence)"
    detail = f"{figures['tokens']} tokens are equal; {stays}"
    return Check(name=name, passed=True, detail=detail, figures=dict(figures)), None


def compare_pieces(name: str, own: Sequence[Block], theirs: Sequence[Block]) -> Finding:
    """Check that a model says the same whole and in pieces: within the tolerance, or twice the source's own gap."""
    gap, allowed = (max((float(_gap(block).max()) for block in blocks), default=0.0) for blocks in (own, theirs))
    within = all(bool((_gap(b) <= OTHER_SHAPE.bound(b.reference)).all()) for b in own)
    passed = within or gap <= 2 * allowed
    figures = {"max_abs_diff": _number(gap), "source_max_abs_diff": _number(allowed)}
    said = "agree with" if passed else "differ from"
    check = Check(
        name=name, passed=passed, detail=f"they {said} the whole sequence by {gap:.3g}", figures=dict(figures)
    )
    worst = max(own, key=lambda block: float(_gap(block).max()), default=None)
    return check, None if passed or worst is None else _counterexample(name, worst, _gap(worst), None)


def rounding(pieces: Iterable[Block]) -> float:
    """Return what one function may differ by when it is computed in another way: twice what the source's logits do.

    `pieces` pairs the source's whole sequences with its own pieces. How far rounding carries depends on the model and
    the machine's kernels, so no constant fits all. At most it is what `OTHER_SHAPE` allows: a source that is at odds
    with itself excuses nothing.
    """
    gaps = (float(_gap(block).max()) for block in pieces)
    return min(2 * max(gaps, default=0.0), OTHER_SHAPE.absolute)


def full_blocks(job: Job, reference: Observation, found: Observation) -> tuple[Block, ...]:
    """Pair the prefill logits of every sample."""
    rows = zip(job.sequences, job.positions, reference.full, found.full, strict=True)
    return tuple(Block(*row) for row in rows)


def cached_blocks(job: Job, reference: Observation, found: Observation) -> tuple[Block, ...]:
    """Pair the logits that came through the cache."""
    if not reference.cached or not found.cached:
        return ()
    rows = zip(job.cached, reference.cached, found.cached, strict=True)
    return tuple(Block(job.sequences[n], _ends(job, n), left, right) for n, left, right in rows)


def padded_blocks(job: Job, reference: Observation, found: Observation) -> tuple[Block, ...]:
    """Pair the last logits of every row of the left-padded batch."""
    if reference.padded is None or found.padded is None:
        return ()
    return tuple(
        Block(job.sequences[n][:length], (length - 1,), reference.padded[row : row + 1], found.padded[row : row + 1])
        for row, (n, length) in enumerate(job.padded)
    )


def piecewise(job: Job, seen: Observation) -> Iterator[Block]:
    """Pair one model's logits of whole sequences with its own through the cache, and in the padded batch."""
    for n, found in zip(job.cached, seen.cached, strict=False):
        yield Block(job.sequences[n], _ends(job, n), _at(job, seen, n, _ends(job, n)), found)
    for row, (n, length) in enumerate(job.padded if seen.padded is not None else ()):
        assert seen.padded is not None
        whole = _at(job, seen, n, (length - 1,))
        yield Block(job.sequences[n][:length], (length - 1,), whole, seen.padded[row : row + 1])


def _ends(job: Job, number: int) -> Ids:
    return tuple(cut - 1 for cut in cuts(len(job.sequences[number]), job.decode))


def _at(job: Job, seen: Observation, number: int, positions: Sequence[int]) -> torch.Tensor:
    where = job.positions[number]
    return seen.full[number][[where.index(position) for position in positions]]


def _gap(block: Block) -> torch.Tensor:
    """Return |reference - found|; 0 where both are the same infinity, infinite where either is no number."""
    gap = (block.reference - block.found).abs()
    gap = torch.where(block.reference == block.found, torch.zeros_like(gap), gap)
    return gap.nan_to_num(nan=float("inf"), posinf=float("inf"))


def _larger(gap: torch.Tensor, worst: Mapping[str, Any]) -> bool:
    return float(gap.max()) > float(worst["difference"])


def figures_of(blocks: Sequence[Block]) -> dict[str, float | int | str]:
    """Return how far the logits of all blocks are apart, as figures of a check."""
    gaps = [_gap(block) for block in blocks]
    flips = sum(int((b.reference.argmax(-1) != b.found.argmax(-1)).sum()) for b in blocks)
    return {
        "positions": sum(len(block.positions) for block in blocks),
        "logits": sum(block.reference.numel() for block in blocks),
        "bit_equal_positions": sum(int((gap == 0).all(-1).sum()) for gap in gaps),
        "max_abs_diff": _number(max((float(gap.max()) for gap in gaps), default=0.0)),
        "argmax_differs": flips,
    }


def _counterexample(name: str, block: Block, gap: torch.Tensor, columns: Sequence[int] | None) -> Counterexample:
    row, column = divmod(int(gap.argmax()), gap.shape[1])
    return {
        "check": name,
        "ids": list(block.ids),
        "position": block.positions[row],
        "id": column if columns is None else columns[column],
        "expected": _number(float(block.reference[row, column])),
        "found": _number(float(block.found[row, column])),
        "difference": _number(float(gap[row, column])),
    }


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return value if math.isfinite(value) else str(value)


def _follow(reference: Continuation, found: Sequence[int], slack: float) -> tuple[str, int]:
    """Return how the comparison of one pair ends, and after how many equal tokens."""
    for step, token in enumerate(reference.tokens):
        if token != found[step]:
            return ("near tie" if reference.margins[step] <= slack else "differs"), step
    return "equal", len(reference.tokens)
