"""The passes, in the order in which they run. A new pass is one file here and one line in `PASSES`."""

from __future__ import annotations

from collections.abc import Iterable

from collapse.passes.base import Context, Pass, Proposal
from collapse.passes.constant_fold import ConstantFold
from collapse.passes.dead_module import DeadModule
from collapse.passes.last_token import LastToken
from collapse.passes.positions import Positions
from collapse.passes.shrink import Shrink, Shrinking
from collapse.passes.specialise import Specialise
from collapse.passes.text_only import TextOnly
from collapse.passes.unread_weights import UnreadWeights
from collapse.passes.vocabulary import Vocabulary

PASSES: tuple[Pass, ...] = (
    TextOnly(),
    UnreadWeights(),
    Positions(),
    Specialise(),
    Vocabulary(),
    DeadModule(),
    Shrink("layers"),
    Shrink("kv-groups"),
    Shrink("neurons"),
    Shrink("experts"),
    Shrink("sublayers"),
    Shrink("stand-in"),
    LastToken(),
    ConstantFold(),
)
MOVES = tuple(one.name for one in PASSES if isinstance(one, Shrink))


def together(passes: Iterable[Pass]) -> tuple[Pass, ...]:
    """Return the passes with the moves among them as one search, in the place of the first."""
    found = list(passes)
    moves = [one for one in found if isinstance(one, Shrink)]
    joined = Shrinking(tuple(one.name for one in moves))
    return tuple(joined if one is moves[0] else one for one in found if one not in moves[1:]) if moves else tuple(found)


__all__ = ["MOVES", "PASSES", "Context", "Pass", "Proposal", "together"]
