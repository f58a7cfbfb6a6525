"""Text on its way to token ids: what to encode so that few contexts of a request come as a surprise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from collapse.chat import chat_templates
from collapse.checkpoint import Checkpoint
from collapse.tokenizer import LEGACY, TOKENIZER, TokenizerFile

EDGE = 24  # characters at either end of a line that may be tokenized together with what surrounds it
BATCH = 4096  # texts a call of the tokenizer


@dataclass(frozen=True)
class TextSource:
    """The tokenizer of a checkpoint at work, with the ways in which a text can reach it."""

    checkpoint: Checkpoint
    file: TokenizerFile
    encoder: Tokenizer

    def encode(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Yield the ids of each text, without the special tokens of the post-processor."""
        wanted = list(texts)
        for start in range(0, len(wanted), BATCH):
            batch = self.encoder.encode_batch_fast(wanted[start : start + BATCH], add_special_tokens=False)
            yield from (encoding.ids for encoding in batch)

    def ids(self, texts: Iterable[str]) -> set[int]:
        """Return every id that occurs in the encodings of `texts`."""
        seen = np.zeros(max(self.file.strings) + 1, dtype=bool)
        for row in self.encode(texts):
            seen[row] = True
        return {int(number) for number in np.flatnonzero(seen)}

    def template_samples(self) -> tuple[str, ...]:
        """Return the sample chats of all chat templates."""
        return tuple(text for template in chat_templates(self.checkpoint) for text in template.samples())

    def contexts(self, blocks: tuple[str, ...]) -> Iterator[str]:
        """Yield the blocks whole, and the edges of their lines: alone, ended, after a space, in a chat."""
        edges = tuple(dict.fromkeys(_edges(line) for block in blocks for line in block.splitlines()))
        yield from blocks
        for edge in edges:
            yield from (edge, f"{edge}\n", f" {edge}")
        for template in chat_templates(self.checkpoint):
            if wrap := template.wrapper():
                yield from map(wrap, edges)


def _edges(line: str) -> str:
    """Cut whole words from the middle of a line, since only its edges meet what surrounds it.

    The middle is seen in its block; leaving it out makes calibration several times faster.
    """
    head, tail = line.find(" ", EDGE), line.rfind(" ", 0, max(0, len(line) - EDGE))
    return line[:head] + line[tail:] if 0 < head < tail else line


def open_text(checkpoint: Checkpoint) -> TextSource | None:
    """Return the tokenizer of a checkpoint, or None where the model has no tokenizer file, only ids."""
    if not any((checkpoint.root / name).is_file() for name in (TOKENIZER, *LEGACY)):
        return None
    file = TokenizerFile.read(checkpoint.root)
    return TextSource(checkpoint, file, file.encoder())
