"""The text that the reference model learns from: the samples of the built-in schemas, split once."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

SAMPLES = Path(__file__).parents[1] / "collapse" / "schemas"
DOMAINS = ("log", "code", "text")
HELD_OUT = 0.1
END, PAD = "<|endoftext|>", "<|pad|>"


def documents(domain: str) -> list[str]:
    """Return the sample files of a domain, in order of their names."""
    paths = sorted(path for path in (SAMPLES / domain).iterdir() if path.is_file())
    return [path.read_text(encoding="utf-8") for path in paths]


def split(text: str) -> tuple[str, str]:
    """Cut a document at the line nearest after 90 %: what is trained on, and what is held out."""
    cut = text.find("\n", int(len(text) * (1 - HELD_OUT))) + 1 or len(text)
    return text[:cut], text[cut:]


def train_tokenizer(vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the training part of every domain."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [split(text)[0] for domain in DOMAINS for text in documents(domain)]
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """Return the token ids of the texts in a row, each ended by the end token, int64 `[tokens]`."""
    ids: list[int] = []
    for text in texts:
        ids += [*tokenizer.backend_tokenizer.encode(text).ids, tokenizer.eos_token_id]
    return torch.tensor(ids)


def windows(ids: Tensor, length: int, count: int, seed: int) -> Tensor:
    """Return `count` windows at random places, `[count, length]`; one shorter row where `ids` is shorter."""
    if len(ids) <= length:
        return ids[None]
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(ids) - length + 1, (count,), generator=generator)
    return torch.stack([ids[start : start + length] for start in starts.tolist()])
