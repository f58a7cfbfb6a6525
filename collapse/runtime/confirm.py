"""Confirms a budget of decode speed by measurement: source and output decode in turns, on this machine.

The budget itself is met by a count of the weight bytes that a step reads, which is the same everywhere. Times are not:
they go into the report, and neither plan nor verdict depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from collapse.budget import Budget
from collapse.checkpoint import Checkpoint
from collapse.errors import UnsupportedError
from collapse.plan import Plan
from collapse.report.data import Figures
from collapse.report.speed import DecodeSpeed, decode_speed
from collapse.rewrite.tensors import token_narrow
from collapse.runtime.decoding import FEWEST, WARM_UP, Clock, Decoding, in_turns
from collapse.runtime.load import load
from collapse.schema import load_schema
from collapse.sequences import sequence_length
from collapse.source_model import load_plain
from collapse.trace import quiet

PROMPT, STEPS = 64, 64  # tokens before the first step, and steps at most
SECONDS = 4.0  # from which on no further step is begun


def asked_speed(budgets: Sequence[Budget]) -> Budget | None:
    """Return the budget of decode speed, if there is one."""
    return next((one for one in budgets if one.metric == "decode"), None)


def confirm(
    source: Checkpoint, output: Path, plan: Plan, sample: Sequence[int], budget: Budget,
    figures: tuple[Figures, Figures], clock: Clock,
) -> DecodeSpeed | str:  # fmt: skip
    """Measure the decode step of both models in the dtype of their files; a string says why it cannot be done.

    Args:
        source: the model that was collapsed.
        output: the directory of the collapsed one.
        plan: what was applied.
        sample: in-schema token ids of the source that the plan keeps; the prompt is its beginning.
        budget: of `decode`.
        figures: counted on source and output.
        clock: gives seconds.
    """
    if source.quantisation is not None:
        return "the weights are quantised, and what their kernels take on the CPU says nothing about others"
    room = sequence_length(source, load_schema(plan.input_schema))
    prompt = torch.tensor([sample[: min(PROMPT, room // 2)]], dtype=torch.long)
    steps = min(STEPS, room - prompt.shape[1] - WARM_UP)
    if prompt.numel() == 0 or steps < FEWEST:
        return f"there is no room for {FEWEST} steps within {room} tokens"
    with quiet():
        models = (load_plain(source, dtype="auto").model, load(output, guard="off"))
    prompts = (prompt, _renumbered(prompt, plan))
    try:
        decodings = [Decoding(model, ids) for model, ids in zip(models, prompts, strict=True)]
    except UnsupportedError as error:
        return error.what
    before, after = in_turns(decodings, steps, seconds=SECONDS, clock=clock)
    read = [one.weight_bytes_per_decode_token for one in figures]
    return decode_speed(
        before, after, limit=1 + budget.limit, predicted=read[1] / read[0], prompt=prompt.shape[1],
        threads=torch.get_num_threads(), dtype=str(models[1].dtype).removeprefix("torch."),
    )  # fmt: skip


def _renumbered(ids: torch.Tensor, plan: Plan) -> torch.Tensor:
    narrow = token_narrow(plan)
    if narrow is None:
        return ids
    new = {old: number for number, old in enumerate(narrow.kept)}
    return torch.tensor([[new[old] for old in row] for row in ids.tolist()], dtype=torch.long)
