"""Losses of one sequence against plain arithmetic on a few numbers, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from collapse.certify import SequenceLoss, losses, sequence_loss
from collapse.errors import PlanError

EXACT = 1e-12  # float64, sums of some hundred terms


def softmax(row: list[float]) -> list[float]:
    weights = [math.exp(value) for value in row]
    return [weight / sum(weights) for weight in weights]


def by_hand(source: torch.Tensor, found: torch.Tensor, targets: list[int], kept: list[int]) -> dict[str, float]:
    """The same sums, one probability after the other."""
    sums = dict.fromkeys(("source_nll", "nll", "kl", "flips", "confident", "confident_flips", "lost_mass"), 0.0)
    for row, other, target in zip(source.tolist(), found.tolist(), targets, strict=True):
        p, q = softmax(row), softmax(other)
        mass = sum(p[i] for i in kept)
        sums["source_nll"] -= math.log(p[target])
        sums["nll"] -= math.log(q[kept.index(target)]) if target in kept else -math.inf
        sums["kl"] += sum(p[i] / mass * math.log(p[i] / mass / q[j]) for j, i in enumerate(kept))
        sums["lost_mass"] += 1 - mass
        flip = p.index(max(p)) != kept[q.index(max(q))]
        sums["flips"] += flip
        sums["confident"] += max(p) >= 0.5
        sums["confident_flips"] += flip and max(p) >= 0.5
    return sums


def logits(tokens: int = 60, ids: int = 7, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    source = torch.randn(tokens, ids, generator=generator, dtype=torch.float64) * 2
    found = source + torch.randn(tokens, ids, generator=generator, dtype=torch.float64)
    return source, found, torch.randint(0, ids, (tokens,), generator=generator)


@pytest.mark.parametrize("kept", [None, [0, 1, 2, 3, 4, 5, 6], [0, 2, 3, 6], [6, 1, 3]])
def test_losses_are_those_of_plain_arithmetic(kept: list[int] | None) -> None:
    source, found, targets = logits()
    columns = kept or list(range(7))
    targets = torch.tensor(columns)[targets % len(columns)]
    loss = sequence_loss(source, found[:, columns], targets, text_bytes=99, kept=kept)
    expected = by_hand(source, found[:, columns], targets.tolist(), columns)
    assert (loss.tokens, loss.text_bytes) == (60, 99)
    assert expected["flips"] > expected["confident_flips"] > 0, "the case must have both kinds"
    for name, value in expected.items():
        assert getattr(loss, name) == pytest.approx(value, abs=EXACT * 60), name


def test_a_model_loses_nothing_against_itself() -> None:
    source, _, targets = logits()
    loss = sequence_loss(source, source, targets, text_bytes=1)
    assert (loss.kl, loss.flips, loss.confident_flips, loss.lost_mass) == (0.0, 0, 0, 0.0)
    assert loss.nll == loss.source_nll > 0
    assert loss.confident > 0


@pytest.mark.parametrize("rows", [1, 7, 60])
def test_pieces_give_the_whole(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source, found, targets = logits()
    whole = sequence_loss(source, found, targets, text_bytes=1)
    monkeypatch.setattr(losses, "CHUNK", 7 * rows)
    assert sequence_loss(source, found, targets, text_bytes=1) == whole


def test_narrow_dtypes_are_widened_before_anything_is_computed() -> None:
    source, found, targets = (tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in logits())
    wide = sequence_loss(source.double(), found.double(), targets, text_bytes=1)
    assert sequence_loss(source, found, targets, text_bytes=1) == wide


def test_large_logits_lose_no_digits() -> None:
    source, found, targets = logits()
    moved = sequence_loss(source + 4096.0, found - 4096.0, targets, text_bytes=1)
    plain = sequence_loss(source, found, targets, text_bytes=1)
    assert moved.kl == pytest.approx(plain.kl, abs=1e-9)
    assert moved.nll == pytest.approx(plain.nll, abs=1e-9)


def test_a_target_that_is_gone_costs_infinitely_much() -> None:
    source, found, targets = logits()
    targets[:] = 2
    loss = sequence_loss(source, found[:, :2], targets, text_bytes=1, kept=[0, 1])
    assert loss.nll == math.inf and math.isfinite(loss.kl) and math.isfinite(loss.source_nll)


def test_an_argmax_that_is_gone_is_a_flip() -> None:
    source = torch.tensor([[9.0, 0.0, 0.0]])
    loss = sequence_loss(source, source[:, 1:], torch.tensor([1]), text_bytes=1, kept=[1, 2])
    assert (loss.flips, loss.confident, loss.confident_flips) == (1, 1, 1)
    assert loss.kl == 0.0, "over the kept ids the two agree"
    assert loss.lost_mass == pytest.approx(1 / (1 + 2 * math.exp(-9)), abs=EXACT)


def test_half_a_probability_is_confident() -> None:
    tie = torch.zeros(1, 2)
    assert sequence_loss(tie, tie, torch.tensor([0]), text_bytes=1).confident == 1


def test_masked_ids_are_no_trouble_unless_the_source_uses_them() -> None:
    masked = torch.tensor([[1.0, 2.0, -math.inf]])
    free = torch.tensor([[1.0, 2.0, 0.0]])
    target = torch.tensor([0])
    assert sequence_loss(masked, masked, target, text_bytes=1).kl == 0.0
    assert 0 < sequence_loss(masked, free, target, text_bytes=1).kl < math.inf
    assert sequence_loss(free, masked, target, text_bytes=1).kl == math.inf


@pytest.mark.parametrize(
    ("source", "found", "targets", "kept", "message"),
    [
        ((3, 5), (3, 5), (2,), None, "do not fit together"),
        ((3, 5), (3, 4), (3,), None, "do not fit together"),
        ((3, 5), (3, 5), (3,), [0, 1], "do not fit together"),
        ((0, 5), (0, 5), (0,), None, "do not fit together"),
        ((3, 5), (3, 0), (3,), [], "do not fit together"),
        ((3, 5), (3, 2), (3,), [1, 1], "no id can be kept twice"),
        ((3, 5), (3, 2), (3,), [1, 5], "must be ids below 5"),
        ((3, 5), (3, 2), (3,), [-1, 3], "must be ids below 5"),
    ],
)
def test_what_does_not_fit_is_refused(source, found, targets, kept, message) -> None:
    ids = torch.zeros(targets, dtype=torch.long)
    with pytest.raises(PlanError, match=message):
        sequence_loss(torch.zeros(source), torch.zeros(found), ids, text_bytes=1, kept=kept)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_logits_that_are_no_numbers_are_never_counted(bad: float, side: int) -> None:
    pair = [torch.zeros(2, 3), torch.zeros(2, 3)]
    pair[side][1, 2] = bad
    with pytest.raises(PlanError, match="logits are NaN; run both models in a wider dtype"):
        sequence_loss(*pair, torch.zeros(2, dtype=torch.long), text_bytes=1)


def test_a_target_that_the_source_excludes_is_refused() -> None:
    source = torch.tensor([[0.0, -math.inf]])
    with pytest.raises(PlanError, match="no losses of a sequence"):
        sequence_loss(source, source, torch.tensor([1]), text_bytes=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": 0},
        {"flips": 5},
        {"confident": 5},
        {"confident_flips": 2},
        {"kl": -1.0},
        {"nll": math.nan},
        {"source_nll": math.inf},
        {"text_bytes": -1},
    ],
)
def test_losses_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    right = dict(tokens=4, text_bytes=4, source_nll=1.0, nll=1.0, kl=0.0, flips=1, confident=2, confident_flips=1)
    assert SequenceLoss(**right)
    with pytest.raises(PlanError, match="no losses of a sequence"):
        SequenceLoss(**(right | wrong))
