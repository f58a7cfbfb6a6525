"""thop's count as a second opinion, with the gaps between it and ours named."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from collapse.analysis.flops import Work
from collapse.portable import portable
from collapse.trace import quiet


@dataclass(frozen=True)
class SecondOpinion:
    """What thop counts of a prefill, beside our count of the same call, head at every position.

    Attributes:
        macs: multiply-accumulates that thop sees; it has rules for `nn.Linear` and convolutions.
        linear_macs: our own count of the same `nn.Linear` modules; equal to `macs` where thop sees just those.
        flops: our count of everything.
        gaps: FLOPs that thop does not see, by operator and class of the module that runs it.
    """

    macs: int
    linear_macs: int
    flops: int
    gaps: Mapping[str, int]

    @property
    def coverage(self) -> float:
        """The share of our FLOPs that thop sees."""
        return 2 * self.macs / self.flops if self.flops else 1.0


def second_opinion(model: PreTrainedModel, work: tuple[Work, ...], *, prompt: int) -> SecondOpinion:
    """Run thop on a throw-away copy of `model`, since it leaves buffers and hooks in what it profiles.

    Args:
        model: a model on the meta device, or a small one on the CPU; it is left as it is.
        work: our own count of a prefill of `prompt` tokens of one sequence.
        prompt: tokens of the prompt.
    """
    from thop import profile

    device = next(model.parameters()).device
    ids = torch.ones(1, prompt, dtype=torch.long, device=device)
    with quiet(), portable(), torch.no_grad(), redirect_stdout(io.StringIO()):
        macs, _ = profile(copy.deepcopy(model).eval(), inputs=(ids,), verbose=False)
    kinds = {name: type(module) for name, module in model.named_modules()}
    linear = {item.node for item in work if issubclass(kinds.get(item.module, nn.Module), nn.Linear)}
    gaps: dict[str, int] = {}
    for item in work:
        if item.node not in linear:
            kind = kinds.get(item.module, nn.Module).__name__
            gaps[f"{item.op} in {kind}"] = gaps.get(f"{item.op} in {kind}", 0) + item.flops
    ours = sum(item.flops for item in work if item.node in linear) // 2
    return SecondOpinion(int(macs), ours, sum(item.flops for item in work), dict(sorted(gaps.items())))
