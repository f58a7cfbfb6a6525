"""The vocabulary pass for every method alike: token ids as `collapse` keeps them, tables cut to their rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedModel

from benchmarks.peers.text import Source
from collapse.analysis.token_use import Declined, Samples, token_use
from collapse.checkpoint import Checkpoint
from collapse.errors import UnsupportedError
from collapse.plan import IndexSet
from collapse.rewrite.tokenizer import narrow_tokenizer
from collapse.schema import InputSchema
from collapse.search.surgery import copy_sharing
from collapse.tokenizer import TokenizerFile

BLOCK = 4096  # characters of a block of text


@dataclass(frozen=True)
class Vocabulary:
    """The kept ids, ascending, [kept]; new id n is old id `kept[n]`. `tokenizer` gives new ids."""

    kept: torch.Tensor
    tokenizer: Tokenizer


def vocabulary_of(checkpoint: Checkpoint, kind: str, sources: tuple[Source, ...]) -> Vocabulary:
    """Return what the vocabulary pass keeps for the whole text of some sources; raises where it declines."""
    blocks = tuple(
        source.text[start : start + BLOCK] for source in sources for start in range(0, len(source.text), BLOCK)
    )
    use = token_use(checkpoint, InputSchema.model_validate({"type": kind}), Samples(blocks))
    if isinstance(use, Declined):
        raise UnsupportedError(use.reason, where="vocabulary", fix="leave it off")
    return _vocabulary(TokenizerFile.read(checkpoint.root), use.kept)


def _vocabulary(file: TokenizerFile, kept: IndexSet) -> Vocabulary:
    tokenizer = Tokenizer.from_buffer(narrow_tokenizer(file, {old: new for new, old in enumerate(kept)}))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return Vocabulary(torch.tensor(list(kept)), tokenizer)


def narrow(model: PreTrainedModel, kept: torch.Tensor) -> PreTrainedModel:
    """Return the model with the kept rows of embedding and head alone; one that is tied stays tied."""
    smaller = copy_sharing(model)
    embedding, head = smaller.get_input_embeddings(), smaller.get_output_embeddings()
    tied = head.weight is embedding.weight
    embedding.weight = nn.Parameter(embedding.weight[kept], requires_grad=False)
    embedding.num_embeddings, embedding.padding_idx = len(kept), None
    head.weight = embedding.weight if tied else nn.Parameter(head.weight[kept], requires_grad=False)
    if head.bias is not None:
        head.bias = nn.Parameter(head.bias[kept], requires_grad=False)
    head.out_features = len(kept)
    smaller.config.get_text_config().vocab_size = len(kept)
    return smaller
