"""The passes, in the order in which they run. A new pass is one file here and one line in `PASSES`."""

from __future__ import annotations

from collapse.passes.base import Context, Pass, Proposal
from collapse.passes.constant_fold import ConstantFold
from collapse.passes.dead_module import DeadModule
from collapse.passes.last_token import LastToken
from collapse.passes.layers import LayersPass
from collapse.passes.positions import Positions
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
    LayersPass(),
    LastToken(),
    ConstantFold(),
)

__all__ = ["PASSES", "Context", "Pass", "Proposal"]
