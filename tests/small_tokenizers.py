"""Small real tokenizers of the kinds that are cut, trained on the spot, and checkpoints around them."""

import json
from functools import cache
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from collapse.bpe import fallback_alphabet
from collapse.checkpoint import Checkpoint

CORPUS = [
    "Jun 14 15:16:01 combo sshd(pam_unix)[19939]: authentication failure; logname= uid=0 euid=0",
    "the cat sat on the mat and the cat ate the rat that sat there, thereafter nothing",
    "café naïve façade, über señor: übermäßig größer, 12 12 1212 3434",
    '{"status": "ok", "items": [1, 2, 3], "nested": {"status": "error", "items": []}}',
] * 3
KINDS = ("byte-level", "byte-fallback", "many-merges", "ignore-merges", "old-merges")


def _byte_level() -> dict:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<eos>", "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", tokenizer.token_to_id("<eos>"))]
    )
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id("<pad>"), pad_token="<pad>")
    return json.loads(tokenizer.to_str())


def _byte_fallback() -> dict:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=[*special, *fallback_alphabet()], show_progress=False)
    tokenizer.train_from_iterator([line for line in CORPUS for line in line.split(",")], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [entry for entry in data["added_tokens"] if entry["content"] in special]
    return data


def _with_all_splits(data: dict) -> dict:
    """As in Gemma: every way to split a token into two tokens is a merge, at the token's own rank."""
    vocab, merges = data["model"]["vocab"], []
    for left, right in data["model"]["merges"]:
        token = left + right
        splits = [[token[:at], token[at:]] for at in range(1, len(token))]
        merges += [pair for pair in splits if pair[0] in vocab and pair[1] in vocab and pair not in merges]
    data["model"]["merges"] = merges
    return data


@cache
def _raw(kind: str) -> str:
    data = _byte_level() if kind in {"byte-level", "ignore-merges", "old-merges"} else _byte_fallback()
    if kind == "many-merges":
        data = _with_all_splits(data)
    if kind == "ignore-merges":
        data["model"]["ignore_merges"] = True
    if kind == "old-merges":
        data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    return json.dumps(data, ensure_ascii=False)


def tokenizer_data(kind: str) -> dict:
    """Return a fresh copy of the JSON of a small tokenizer."""
    return json.loads(_raw(kind))


def encode(data: dict | bytes, text: str, special: bool = False) -> list[int]:
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return _loaded(raw).encode(text, add_special_tokens=special).ids


def decode(data: dict | bytes, ids: list[int]) -> str:
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return _loaded(raw).decode(ids, skip_special_tokens=False)


@cache
def _loaded(raw: bytes) -> Tokenizer:
    tokenizer = Tokenizer.from_buffer(raw)
    tokenizer.no_padding()
    return tokenizer


def checkpoint(root: Path, rows: int, config: dict | None = None, **files: dict | str | None) -> Checkpoint:
    """Write a checkpoint whose only tensor is a token table; `files` by name with `__` for the dot."""
    base = {"model_type": "llama", "vocab_size": rows}
    (root / "config.json").write_text(json.dumps({**base, **(config or {})}))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (root / name.replace("__", ".")).write_text(text)
    save_file({"model.embed_tokens.weight": np.zeros((rows, 2), np.float32)}, root / "model.safetensors")
    return Checkpoint.open(root)
