"""A model with its calibration text, and what several methods want to know of both, each measured once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from transformers import PreTrainedModel

from benchmarks.peers.moments import Moments, moments
from benchmarks.peers.streams import Turns, turns
from benchmarks.peers.structure import Structure
from benchmarks.peers.text import LENGTH
from collapse.passes.shrink_task import WEIGHED, WRITTEN_EVERY, spread
from collapse.search.fisher import Fisher
from collapse.search.map_trials import MapTrials
from collapse.search.maps import kinds_for
from collapse.search.options import MapTrial, keeping_one
from collapse.search.trials import Trial, Trials
from collapse.search.written import written


@dataclass(frozen=True)
class Calibration:
    """`ids` are rows [n, length] of tokens, as are the others.

    `search` is what SLEB, which runs often, looks at; `healing` is other text of the same sources, to distil on.
    """

    model: PreTrainedModel
    structure: Structure
    ids: torch.Tensor
    search: torch.Tensor
    healing: torch.Tensor
    dropped: list[int] = field(default_factory=list, init=False)  # SLEB's order as far as it was asked for
    fitted: dict[float, PreTrainedModel] = field(default_factory=dict, init=False)  # collapse's free models by share

    @cached_property
    def turns(self) -> Turns:
        """How the residual stream turns."""
        return turns(self.model, self.structure, self.ids)

    @cached_property
    def moments(self) -> Mapping[str, Moments]:
        """Moments of what the readers of neurons and KV groups read, by module path."""
        return moments(self.model, [units.reader for units in self.structure.units], self.ids)

    @cached_property
    def fitting(self) -> torch.Tensor:
        """What `collapse` fits to: all rows, and what the source writes after the beginning of every second one."""
        return torch.cat([self.ids, written(self.model, self.ids[::WRITTEN_EVERY], lambda done, of: None)])

    @cached_property
    def trials(self) -> tuple[Trial, ...]:
        """What the units of each block cost alone: fitted to a row in four, measured on a quarter of other rows."""
        units = self.structure.units
        tries = Trials(self.model, self.structure.layers, units, *self._tried_on, metric=self.fisher.weighing)
        return tries.run(lambda done, of: None)

    @cached_property
    def fisher(self) -> Fisher:
        """What an error in what readers write costs."""
        readers = [units.reader for units in self.structure.units]
        return Fisher(self.model, readers, spread(self.fitting, WEIGHED), lambda done, of: None)

    @cached_property
    def map_trials(self) -> tuple[MapTrial, ...]:
        """What maps in place of sublayers cost alone, on the same rows."""
        kinds = {place: kinds_for(place, ("stand-in", "sublayers")) for place in self.structure.places.found}
        tries = MapTrials(self.model, self.structure.layers, kinds, *self._tried_on)
        return keeping_one(tries.run(lambda done, of: None), self.structure.places.attentions)

    @property
    def _tried_on(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.fitting[::4], self.ids[1::16, : LENGTH // 4]

    def blocks_for(self, share: float) -> int:
        """Return how many blocks come nearest to a share of all, one at least."""
        return max(1, round(share * self.structure.size))
