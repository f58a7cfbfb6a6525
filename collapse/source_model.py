"""The source model in memory, in fp32, with what transformers said about its files."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from collapse.auto import auto_class
from collapse.checkpoint import Checkpoint
from collapse.errors import CheckpointError
from collapse.memory import release_memory
from collapse.progress import Stopwatch
from collapse.trace import load_config, meta_model, quiet


def load_source(checkpoint: Checkpoint, watch: Stopwatch) -> tuple[PreTrainedModel, frozenset[str]]:
    """Load the source in fp32; return it and the names in its files that no module claims."""
    kind = auto_class(load_config(checkpoint))
    release_memory()  # what reading text and tracing left behind must not lie under the weights
    with watch.stage("load model"), quiet():
        try:
            model, report = kind.from_pretrained(
                str(checkpoint.root), dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
        except Exception as error:  # transformers raises many kinds for files that do not fit
            reason = _misfit(checkpoint) or " ".join((str(error).strip() or type(error).__name__).split())[:300]
            raise CheckpointError(f"cannot be loaded ({reason})", where=checkpoint.label) from None
    if report["missing_keys"]:
        reason = f"has no {min(report['missing_keys'])}, so transformers would fill it with random numbers"
        raise CheckpointError(reason, where=checkpoint.label, fix="give a complete checkpoint")
    watch.measure_forward(model)
    return model.eval(), frozenset(report["unexpected_keys"])


def source_weights(checkpoint: Checkpoint, watch: Stopwatch) -> dict[str, torch.Tensor]:
    """Return the source's parameters under all their names, and its buffers, in fp32, as a program takes them."""
    model, _ = load_source(checkpoint, watch)
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def _misfit(checkpoint: Checkpoint) -> str | None:
    """Return which tensor has another shape than config.json asks for; transformers only prints it."""
    wanted = meta_model(load_config(checkpoint)).state_dict()
    for name, info in checkpoint.tensors.items():
        if name in wanted and tuple(wanted[name].shape) != info.shape:
            return f"{name} has the shape {list(info.shape)}, config.json asks for {list(wanted[name].shape)}"
    return None
