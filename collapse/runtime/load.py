"""Load a collapsed model for use, with the checks and the short circuits that only run time can make."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import collapse.models  # noqa: F401  (registers the reference architecture)
from collapse.errors import CheckpointError, CollapseError
from collapse.manifest import load_manifest
from collapse.plan import ShortCircuit
from collapse.runtime.fuse import fuse
from collapse.runtime.guard import install, make_guard
from collapse.trace import quiet

GuardMode = Literal["on", "off"]


def load(directory: str | Path, *, dtype: torch.dtype | str = "auto", guard: GuardMode = "on") -> PreTrainedModel:
    """Return the collapsed model in `directory`, in evaluation mode on the CPU.

    A plain `AutoModelForCausalLM.from_pretrained` gives the same logits; this also installs the guard, and what
    `--stage fuse` asks for: modules that are skipped while the context's position entropy is below their threshold.

    Args:
        directory: what `collapse export` wrote.
        dtype: as for `from_pretrained`; "auto" keeps that of the checkpoint.
        guard: "on" makes the model raise `SchemaError` when it is given an input outside its schema.

    Raises:
        CheckpointError: the directory is not a collapsed model, or its tensors do not fit its config.
        CollapseError: `guard` is neither "on" nor "off".
    """
    if guard not in get_args(GuardMode):
        raise CollapseError(f"guard = {guard!r}: allowed are on, off", fix="give one of them")
    root = Path(directory)
    manifest = load_manifest(root)
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                str(root), dtype=dtype, local_files_only=True, use_safetensors=True
            )
    except Exception as error:  # transformers raises many kinds for files that do not fit
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"cannot be loaded ({reason})", where=str(root), fix="run `collapse verify`") from error
    model.eval()
    if guard == "on":
        install(model, make_guard(manifest.plan, model, root))
    sites = {
        rewrite.site: rewrite.threshold
        for rewrite in manifest.plan.of_kind(ShortCircuit)
        if rewrite.stage == "fuse" and rewrite.threshold is not None
    }
    if sites:
        model.collapse_fused = fuse(model, sites)  # counts of skipped and run calls, and the way back
    return model
