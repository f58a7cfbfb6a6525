"""What a healing may choose, checked before any work."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from collapse.errors import PlanError

Scope = Literal["touched", "all"]
SUFFIXES = {"": 1, "k": 1_000, "m": 1_000_000}


@dataclass(frozen=True)
class Settings:
    """How a collapsed model is distilled.

    Attributes:
        tokens: tokens of domain text to train on; more than there are go over the text again.
        scope: "touched" trains what the plan changed, "all" every floating point parameter.
        rate: the highest learning rate, reached after `warmup`, a share of all steps; then a cosine down to a tenth.
        rows: windows in a step.
        length: tokens of a window.
        hidden: weight of the hidden-state term beside the KL divergence; 0 leaves it out.
        temperature: by which the logits of both models are divided; the divergence counts by its square.
        protect_rate: how fast the multiplier of the protected text follows a violation.
        bf16: run both models in bfloat16 while training, faster where the CPU has instructions for it; weights, their
            updates and all looks stay in fp32.
        clip: the norm that gradients are cut to.
        checks: how often, the end included, the text that is not trained on is looked at.
        seed: of the order of the windows.
    """

    tokens: int
    scope: Scope = "touched"
    rate: float = 5e-5
    warmup: float = 0.1
    rows: int = 16
    length: int = 256
    hidden: float = 0.1
    temperature: float = 1.0
    protect_rate: float = 0.3
    bf16: bool = False
    clip: float = 1.0
    checks: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.scope not in get_args(Scope):
            raise PlanError(f"unknown scope {self.scope!r}", where="heal", fix=f"choose among {get_args(Scope)}")
        if min(self.tokens, self.rows, self.checks) < 1 or self.length < 2:
            raise PlanError("tokens, rows, length and checks must be positive", where="heal", fix="give at least one")
        numbers = (self.rate, self.temperature, self.clip)
        if not all(0 < number < math.inf for number in numbers) or not (self.hidden >= 0 and self.protect_rate > 0):
            raise PlanError("rate, temperature and clip must be positive numbers", where="heal", fix="leave them out")

    @property
    def steps(self) -> int:
        """How many times the weights are changed; one at least."""
        return max(1, round(self.tokens / (self.rows * self.length)))

    def factor(self, step: int) -> float:
        """Return the share of `rate` at `step`, counted from 0."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return (step + 1) / warm
        gone = (step - warm) / max(1, self.steps - warm)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * gone))


def parse_tokens(text: str) -> int:
    """Return a number of tokens: `200000`, `200k` or `1.5M`. Raises `PlanError` for anything else, and for none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text.strip())
    tokens = round(float(match.group(1)) * SUFFIXES[match.group(2).lower()]) if match else 0
    if tokens < 1:
        raise PlanError("is no number of tokens", where=f"--heal {text!r}", fix="write for example 200k")
    return tokens
