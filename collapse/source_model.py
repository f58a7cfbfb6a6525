"""The source model in memory, in fp32, with what transformers said about its files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from collapse.auto import auto_class
from collapse.checkpoint import Checkpoint
from collapse.dequantise import plain_tensors
from collapse.errors import CheckpointError
from collapse.memory import release_memory
from collapse.naming import Naming, naming_of
from collapse.progress import Stopwatch
from collapse.quantised import FIELD, Cut, Group, Scheme
from collapse.trace import load_config, meta_model, quiet

Way = Literal["plain", "transformers", "reference"]


@dataclass(frozen=True)
class LoadedModel:
    """A model on the CPU, in evaluation mode.

    Attributes:
        model: the model, whose weights are plain numbers.
        keys: what transformers reports: `missing_keys`, `unexpected_keys`, `mismatched_keys`.
        way: how quantised weights became numbers, as of `way_of`.
        scheme: how the files are quantised.
    """

    model: PreTrainedModel
    keys: Mapping[str, Iterable[Any]]
    way: Way
    scheme: Scheme | None

    @property
    def naming(self) -> Naming:
        """How the names in the files become the model's, companions of quantised weights included."""
        return replace(naming_of(self.model), scheme=self.scheme)


def way_of(checkpoint: Checkpoint) -> Way:
    """Return how quantised weights are read: by transformers where it can without a GPU, else by our reference.

    transformers dequantises fp8 on the CPU, but right only where all blocks are of one size; the other schemes ask for
    a library of their own. "plain" is a checkpoint that is not quantised.
    """
    quantised = checkpoint.quantisation
    if quantised is None:
        return "plain"
    even = quantised.scheme.method == "fp8" and all(_is_even(checkpoint, group) for group in quantised.groups)
    return "transformers" if even and quantised.scheme.place == FIELD else "reference"


def _is_even(checkpoint: Checkpoint, group: Group) -> bool:
    """Whether rows over scales is the block's size, as transformers takes it also where the last block is smaller."""
    shape, scales = group.shape or (), checkpoint.tensors[group.companions[0]].shape
    steps = [cut.tensors.get(group.form.required[0], (0, 0))[1] for cut in group.cuts.values() if isinstance(cut, Cut)]
    same = all(step * count in {0, size} for step, count, size in zip(steps, scales, shape, strict=False))
    return len(group.companions) == 1 and len(scales) == len(shape) == len(steps) and same


def load_plain(checkpoint: Checkpoint, dtype: torch.dtype | str = torch.float32) -> LoadedModel:
    """Load the checkpoint's model; raises what transformers raises where its files do not fit.

    `dtype` is as for `from_pretrained`; "auto" keeps that of the files.
    """
    config, way = load_config(checkpoint), way_of(checkpoint)
    kind = auto_class(config)
    options = {"dtype": dtype, "output_loading_info": True}
    if way == "reference":
        kind = kind._model_mapping[type(config)]
        for part in (config, config.get_text_config()):
            vars(part).pop(FIELD, None)  # the weights that it is given are not quantised
        state = dict(plain_tensors(checkpoint))
        model, keys = kind.from_pretrained(None, config=config, state_dict=state, **options)
        _require_no_bias(checkpoint, state, keys["unexpected_keys"])
    else:
        model, keys = kind.from_pretrained(str(checkpoint.root), local_files_only=True, use_safetensors=True, **options)
    return LoadedModel(model.eval(), keys, way, checkpoint.quantisation.scheme if checkpoint.quantisation else None)


def _require_no_bias(checkpoint: Checkpoint, state: Mapping[str, torch.Tensor], unexpected: Iterable[str]) -> None:
    """Some quantisers write a bias of zeros for every weight; one of other numbers would be added by their kernels."""
    stems = {group.stem for group in checkpoint.quantisation.groups} if checkpoint.quantisation else set()
    for name in unexpected:
        if name.removesuffix("bias") in stems and bool(state[name].any()):
            raise CheckpointError("is not zero, and the model without quantisation has no place for it", where=name)


def load_source(checkpoint: Checkpoint, watch: Stopwatch) -> tuple[PreTrainedModel, frozenset[str]]:
    """Load the source in fp32; return it and the names in its files that no module claims."""
    release_memory()  # what reading text and tracing left behind must not lie under the weights
    with watch.stage("load model"), quiet():
        try:
            found = load_plain(checkpoint)
        except Exception as error:  # transformers raises many kinds for files that do not fit
            reason = _misfit(checkpoint) or " ".join((str(error).strip() or type(error).__name__).split())[:300]
            raise CheckpointError(f"cannot be loaded ({reason})", where=checkpoint.label) from None
    if found.keys["missing_keys"]:
        reason = f"has no {min(found.keys['missing_keys'])}, so transformers would fill it with random numbers"
        raise CheckpointError(reason, where=checkpoint.label, fix="give a complete checkpoint")
    watch.measure_forward(found.model)
    return found.model, frozenset(found.keys["unexpected_keys"])


def source_weights(checkpoint: Checkpoint, watch: Stopwatch) -> dict[str, torch.Tensor]:
    """Return the source's parameters under all their names, and its buffers, in fp32, as a program takes them."""
    model, _ = load_source(checkpoint, watch)
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def _misfit(checkpoint: Checkpoint) -> str | None:
    """Return which tensor has another shape than config.json asks for; transformers only prints it."""
    wanted = meta_model(load_config(checkpoint)).state_dict()
    for name, info in checkpoint.tensors.items():
        group = checkpoint.group(name)
        weight, shape = (name, info.shape) if group is None else (group.weight, group.shape)
        if weight in wanted and shape is not None and tuple(wanted[weight].shape) != shape:
            return f"{weight} has the shape {list(shape)}, config.json asks for {list(wanted[weight].shape)}"
    return None
