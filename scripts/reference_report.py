"""Measure the trained reference model as it lies on disk: loss, gates, and what its bias is worth."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import collapse.models  # registers the architecture
from collapse.models.position_bias import position_entropy
from scripts.reference_corpus import documents, split, stream, windows

WINDOWS = 12
GATE_WINDOWS = 96
SEED = 7


def measure(folder: Path, other_text: Path) -> dict[str, Any]:
    """Return the figures of the checkpoint in `folder`, on the samples and on files below `other_text`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    silent = copy.deepcopy(model)
    for layer in silent.model.layers:
        layer.self_attn.position_adaptive_bias.weight.data.zero_()
    figures: dict[str, Any] = {
        "parameters": sum(value.numel() for value in model.parameters()),
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "thresholds_nats": [round(bias.threshold.item(), 4) for bias in _biases(model)],
        "samples": {},
        "other_text": {},
    }
    for domain in ("log", "json", "code", "text"):
        held = stream(tokenizer, [split(text)[1] for text in documents(domain)])
        whole = stream(tokenizer, documents(domain))
        figures["samples"][domain] = language(model, silent, held) | gates(model, whole)
    for name, ids in _others(tokenizer, other_text).items():
        figures["other_text"][name] = gates(model, ids)
        if name.endswith(".txt"):
            figures["other_text"][name] |= language(model, silent, ids)
    return figures


@torch.no_grad()
def language(model: Any, silent: Any, ids: Tensor) -> dict[str, float]:
    """Return the held-out loss, and the KL divergence when every bias is zeroed, both in nats a token."""
    rows = windows(ids, model.config.max_position_embeddings, WINDOWS, SEED)
    losses, divergences = [], []
    for row in rows:
        base, zeroed = (F.log_softmax(each(row[None]).logits[0], -1) for each in (model, silent))
        losses.append(F.nll_loss(base[:-1], row[1:]))
        divergences.append((base.exp() * (base - zeroed)).sum(-1))
    divergence = torch.stack(divergences)
    return {
        "loss": round(float(torch.stack(losses).mean()), 4),
        "kl_of_zeroing": round(float(divergence.mean()), 6),
        "kl_of_zeroing_max": round(float(divergence.max()), 6),
        "kl_of_zeroing_second_half": round(float(divergence[:, divergence.shape[1] // 2 :].mean()), 6),
    }


@torch.no_grad()
def gates(model: Any, ids: Tensor) -> dict[str, Any]:
    """Return position entropy and gate over many contexts: random ones, and every place in the text once."""
    context = model.config.max_position_embeddings
    rows = windows(ids, context, GATE_WINDOWS, SEED)
    if len(ids) > context:
        rows = torch.cat((rows, ids.unfold(0, context, context // 2)))
    entropy = position_entropy(rows + 1, model.config.entropy_settings)
    opened = [bias.gate(entropy) for bias in _biases(model)]
    return {
        "contexts": len(rows),
        "entropy_max": round(float(entropy.max()), 4),
        "entropy_end_median": round(float(entropy[:, -1].median()), 4),
        "gate_max": [round(float(gate.max()), 6) for gate in opened],
        "gate_mean": [round(float(gate.mean()), 6) for gate in opened],
        "gate_open_share": [round(float((gate > 0).float().mean()), 6) for gate in opened],
        "dead_layers": [layer for layer, gate in enumerate(opened) if not bool(gate.any())],
    }


def _biases(model: Any) -> list[Any]:
    return [layer.self_attn.position_adaptive_bias for layer in model.model.layers]


def _others(tokenizer: PreTrainedTokenizerFast, folder: Path) -> dict[str, Tensor]:
    paths = sorted((*folder.glob("logs/*.log"), *folder.glob("json/*.json*"), *folder.glob("prose/*.txt")))
    texts = {f"{path.parent.name}/{path.name}": path.read_text("utf-8", "replace")[:400_000] for path in paths}
    return {name: stream(tokenizer, [text]) for name, text in texts.items()}


assert collapse.models  # imported for its effect
