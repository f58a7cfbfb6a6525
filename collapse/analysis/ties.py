"""Tensors that a checkpoint holds twice although the model ties them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from transformers import PreTrainedConfig

from collapse.checkpoint import Checkpoint, TensorInfo
from collapse.errors import PlanError
from collapse.trace import load_config, meta_model, quiet


def duplicates(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Return copy -> original for tensors that the model ties and whose bytes are equal.

    The original is the name that the model declares as the source of the tie. transformers unties two tensors
    of different value, so those are left alone. Only word embeddings are looked at: no causal LM ties others.
    """
    return {copy: original for copy, original, equal in _tied_pairs(checkpoint) if equal}


def config_as_loaded(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return the config of the model that transformers makes of the files: it unties tables that differ there."""
    config = load_config(checkpoint)
    if not all(equal for _, _, equal in _tied_pairs(checkpoint)):
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    return config


def require_whole_ties(checkpoint: Checkpoint, replaced: Mapping[str, str], erased: Container[str]) -> None:
    """Refuse new data for one name of a tied tensor while its other name stays in the files with other data.

    `replaced` has the digest of the new data by name. Raises `PlanError`. transformers would untie the two.
    """
    if not any(_is_vocabulary_table(checkpoint, checkpoint.tensors[name]) for name in replaced):
        return
    for pair in duplicates(checkpoint).items():
        for name, other in (pair, pair[::-1]):
            if name in replaced and other not in erased and replaced.get(other) != replaced[name]:
                reason = f"the tensor is replaced, but {other}, which the model ties to it, is not replaced by the same"
                raise PlanError(reason, where=name, fix="replace both alike, or erase one of them")


def _tied_pairs(checkpoint: Checkpoint) -> Iterator[tuple[str, str, bool]]:
    """Yield (copy, original, whether their bytes are equal) for tied tensors that the files hold both."""
    tables = [info for info in checkpoint.tensors.values() if _is_vocabulary_table(checkpoint, info)]
    if len({info.shape for info in tables}) == len(tables):
        return
    for copy, original in _tied_names(checkpoint):
        left, right = checkpoint.tensors.get(copy), checkpoint.tensors.get(original)
        if left and right:
            yield copy, original, same_bytes(checkpoint, left, right)


def same_bytes(checkpoint: Checkpoint, left: TensorInfo, right: TensorInfo) -> bool:
    """Whether two tensors have the same dtype, shape and data; read in pieces of 4 MiB."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    step = 1 << 22
    with (checkpoint.root / left.file).open("rb") as one, (checkpoint.root / right.file).open("rb") as two:
        one.seek(left.start)
        two.seek(right.start)
        spans = range(0, left.nbytes, step)
        return all(one.read(min(step, left.nbytes - at)) == two.read(min(step, left.nbytes - at)) for at in spans)


def _is_vocabulary_table(checkpoint: Checkpoint, info: TensorInfo) -> bool:
    text = checkpoint.config.get("text_config")
    sizes = {part.get("vocab_size") for part in (checkpoint.config, text) if isinstance(part, dict)}
    return len(info.shape) == 2 and info.shape[0] in sizes


def _tied_names(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield (target, source) of every tie of the model, as the checkpoint spells the names."""
    with quiet():
        model = meta_model(load_config(checkpoint))
    prefix = f"{model.base_model_prefix}."
    for target, source in sorted(model.all_tied_weights_keys.items()):
        yield _spelled(checkpoint, target, prefix), _spelled(checkpoint, source, prefix)


def _spelled(checkpoint: Checkpoint, name: str, prefix: str) -> str:
    """Checkpoints of the bare base model lack its prefix; transformers reads them all the same."""
    bare = name.removeprefix(prefix)
    return bare if name not in checkpoint.tensors and bare in checkpoint.tensors else name
