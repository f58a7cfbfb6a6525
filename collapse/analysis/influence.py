"""What short-circuiting modules does to the logits, measured exactly, sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from collapse.analysis.stand_in import StandIn, short_circuited

ATOL, RTOL = 1e-5, 1.3e-6  # two fp32 results of the same arithmetic in another order


@dataclass(frozen=True)
class Tolerance:
    """Two logits agree when `|difference| <= atol + rtol * |reference|`."""

    atol: float = ATOL
    rtol: float = RTOL

    def excess(self, logits: torch.Tensor, reference: torch.Tensor) -> float:
        """Return by how much the worst logit breaks the tolerance; at most 0 where none does."""
        return float(((logits - reference).abs() - self.atol - self.rtol * reference.abs()).max())


SAME = Tolerance()


@dataclass(frozen=True)
class JointEffect:
    """Facts about short-circuiting several sites at once.

    Attributes:
        sequences: how many were run.
        violations: on how many some logit breaks the tolerance.
        largest: the largest absolute difference of any logit.
    """

    sequences: int
    violations: int
    largest: float


def logits_of(model: nn.Module, sequence: Sequence[int]) -> torch.Tensor:
    """Return the logits `[sequence, vocabulary]` of one unpadded sequence."""
    with torch.no_grad():
        output = model(input_ids=torch.tensor([list(sequence)]), use_cache=False)
    logits: torch.Tensor = output.logits[0]
    return logits


def single_effects(
    model: nn.Module,
    stand_ins: Sequence[StandIn],
    sequences: Sequence[Sequence[int]],
    tolerance: Tolerance,
    advance: Callable[[int], None],
) -> list[float]:
    """Return each stand-in's worst excess over the tolerance, each alone.

    A stand-in is not run on further sequences once it has broken the tolerance.
    """
    worst = [float("-inf")] * len(stand_ins)
    for done, sequence in enumerate(sequences if stand_ins else (), 1):
        reference = logits_of(model, sequence)
        for i, stand_in in enumerate(stand_ins):
            if worst[i] <= 0:
                with short_circuited(model, [stand_in]):
                    worst[i] = max(worst[i], tolerance.excess(logits_of(model, sequence), reference))
        advance(done)
    return worst


def joint_effect(
    model: nn.Module,
    stand_ins: Sequence[StandIn],
    sequences: Sequence[Sequence[int]],
    tolerance: Tolerance,
    advance: Callable[[int], None],
) -> JointEffect:
    """Measure all stand-ins together on every sequence."""
    violations, largest = 0, 0.0
    for done, sequence in enumerate(sequences, 1):
        reference = logits_of(model, sequence)
        with short_circuited(model, stand_ins):
            logits = logits_of(model, sequence)
        violations += tolerance.excess(logits, reference) > 0
        largest = max(largest, float((logits - reference).abs().max()))
        advance(done)
    return JointEffect(len(sequences), violations, largest)
