"""Rotary embeddings whose frequencies grow with the sequence (dynamic NTK), which no graph can follow."""

from __future__ import annotations

from transformers import PreTrainedModel


def keep_original_frequencies(model: PreTrainedModel) -> int | None:
    """Make the rotary modules of `model` keep the frequencies of their original length; return that length in tokens.

    transformers changes them as soon as a position lies beyond it, by a branch on the value of a tensor. Up to that
    length the branch is not taken, so that the model computes the same without it. None where nothing grows.
    """
    limits: list[int] = []
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = list(kind.values()) if isinstance(kind, dict) else [kind]
        if any("dynamic" in name for name in kinds if isinstance(name, str)):
            limits.append(int(module.original_max_seq_len))
            module.rope_type = {n: _settled(k) for n, k in kind.items()} if isinstance(kind, dict) else _settled(kind)
    return min(limits, default=None)


def _settled(kind: str | None) -> str | None:
    return "default" if kind is not None and "dynamic" in kind else kind
