"""Byte-pair merging as data: the byte alphabets, one run of the merges, and which tokens a kept set needs.

Why a tokenizer can be cut. BPE starts from single characters and applies, again and again, the merge of
lowest rank (leftmost first) until none applies. Let K be the kept tokens, and let the cut tokenizer have
exactly the merges whose two parts and result are all in K, in the old order. Take a text whose tokens under
the full merges are all in K.

1. A finished token t is never crossed by a merge, since symbols only grow. So the merges inside its span are
   those of a run on t's own string, in the same order. That run is the *derivation* of t; it is unique.
2. If K holds every symbol of the derivation of each t in K, then every merge of the run on the text has its
   parts and its result in K, and the cut tokenizer has it.
3. A merge that the cut tokenizer lacks would, if ever applied, need a part or make a result outside K; by 2
   neither occurs in this run. So at every step the lowest-ranked applicable merge is the same in both, and
   by induction so is the whole run. Extra merges between kept tokens change nothing: they were there before.

Hence closure under derivations suffices; the parts of *other* merges with the same result (Gemma has two for
most tokens) are not needed. A token that its own string does not merge to never comes out of merging and
needs nothing. With `ignore_merges` (Llama 3) a word found whole in the vocabulary is taken as it is: its
token is in K, so the cut tokenizer finds it too, and a word that was not there before is not there now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

Pair = tuple[str, str]


def byte_alphabet() -> tuple[str, ...]:
    """Return the character that stands for each byte 0..255 in a byte-level vocabulary (256 entries).

    Printable Latin-1 stands for itself; the other bytes take the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(spare)) for byte in range(256))


def fallback_alphabet() -> tuple[str, ...]:
    """Return the token `<0xNN>` that stands for each byte 0..255 in a vocabulary with byte fallback."""
    return tuple(f"<0x{byte:02X}>" for byte in range(256))


def ranks_of(merges: Iterable[Pair]) -> dict[Pair, int]:
    """Return the rank of each merge; a merge listed twice has its last rank, as in the tokenizers library."""
    return {pair: rank for rank, pair in enumerate(merges)}


def run(symbols: Sequence[str], ranks: Mapping[Pair, int]) -> tuple[list[str], list[str]]:
    """Merge `symbols` to the end; return what remains and every symbol that a merge made, in order."""
    left: list[str] = list(symbols)
    made: list[str] = []
    while True:
        found = [(ranks[pair], at) for at, pair in enumerate(pairwise(left)) if pair in ranks]
        if not found:
            return left, made
        _, at = min(found)
        left[at : at + 2] = [left[at] + left[at + 1]]
        made.append(left[at])


def derivation(token: str, ranks: Mapping[Pair, int]) -> frozenset[str]:
    """Return the symbols that occur while `token` is merged from its characters, itself included.

    A token that its own string does not merge to has no derivation: the set holds only itself.
    """
    final, made = run(token, ranks)
    return frozenset((token, *token, *made)) if final == [token] else frozenset((token,))


def closure(tokens: Iterable[str], ranks: Mapping[Pair, int]) -> frozenset[str]:
    """Return `tokens` with the symbols of all their derivations (see the module's proof).

    One round is enough: a symbol inside a derivation has its own derivation inside it.
    """
    closed: set[str] = set()
    for token in tokens:
        closed |= derivation(token, ranks)
    return frozenset(closed)
