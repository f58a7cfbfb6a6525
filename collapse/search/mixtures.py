"""The experts of a model that a search may drop: which are missed least, and the model that is left without some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from collapse.analysis.experts import Experts

STEPS = 16  # in which the experts of a layer go at most


@dataclass(frozen=True)
class Mixtures:
    """As many experts in each of some modules; the native layout has one number for all of them.

    Attributes:
        found: the modules with their experts, by block.
        orders: by module, the experts' numbers, those that are missed least first.
        most: how many of a module can go: a token is sent to a number of them, and those must be left.
        make: gives the model of the source in memory that keeps the given experts of each module.
    """

    found: Mapping[int, Experts]
    orders: Mapping[str, Sequence[int]]
    most: int
    make: Callable[[Sequence[tuple[Experts, Sequence[int]]]], PreTrainedModel]
    _made: dict[int, PreTrainedModel] = field(default_factory=dict, init=False, compare=False)

    @property
    def step(self) -> int:
        """How many experts of every module go at a time."""
        return max(1, next(iter(self.found.values())).size // STEPS)

    def kept(self, lost: int) -> list[tuple[Experts, tuple[int, ...]]]:
        """Return the experts of every module without the `lost` that are missed least, ascending."""
        return [(one, tuple(sorted(self.orders[one.site][lost:]))) for one in self.found.values()]

    def without(self, lost: int) -> PreTrainedModel:
        """Return the model without so many experts of every module; the last one asked for is kept."""
        if lost not in self._made:
            self._made.clear()
            self._made[lost] = self.make(self.kept(lost))
        return self._made[lost]

    def count(self, lost: int, gone: Sequence[int]) -> int:
        """Return how many experts go in blocks that stay."""
        return lost * sum(block not in gone for block in self.found)
