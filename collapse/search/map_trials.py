"""What a map costs in each sublayer's place: every one tried alone, fitted on the source's own stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from transformers import PreTrainedModel

from collapse.analysis.layers import Layers
from collapse.search.alone import Alone, readings
from collapse.search.maps import Fit, MapKind, module_of
from collapse.search.memory import Memory
from collapse.search.options import MapTrial
from collapse.search.places import Place
from collapse.search.surgery import copy_sharing, put_module

HOPELESS = 0.5  # nats a token: a map that costs more alone is the last that is tried in its place

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class MapTrials:
    """Tries of `kinds` on `model`, by place and from the mildest on, as of `collapse.search.trials.Trials`."""

    model: PreTrainedModel
    layers: Layers
    kinds: Mapping[Place, Sequence[MapKind]]
    fitting: Tensor
    choosing: Tensor

    def run(self, progress: Progress, memory: Memory | None = None) -> tuple[MapTrial, ...]:
        """Return the trials of all places; in each, what is harder than a hopeless one is not tried.

        Nor is what `memory` knows.
        """
        if not self.kinds:
            return ()
        memory = memory or Memory.empty()
        by_site = {place.site: place for place in self.kinds}
        paths: dict[int, list[str]] = {}
        for place in self.kinds:
            paths.setdefault(place.block, []).append(place.site)
        alone = Alone.of(self.model, self.layers, self.choosing)
        found: list[MapTrial] = []
        for done, (site, pairs) in enumerate(readings(self.model, self.layers, self.fitting, paths), 1):
            place = by_site[site]
            costs = memory.kl(("alone", place, self.kinds[place]), partial(self._tried, alone, place, pairs))
            found += [MapTrial(place, kind, kl) for kind, kl in zip(self.kinds[place], costs, strict=False)]
            progress(done, len(self.kinds))
        return tuple(found)

    def _tried(self, alone: Alone, place: Place, pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[float]:
        fit = Fit.of(pairs)
        for kind in self.kinds[place]:
            smaller = copy_sharing(self.model)
            put_module(smaller, place.site, module_of(place, kind, fit.tensors(kind)))
            kl = alone.kl(smaller, place.block)
            yield kl
            if not kl <= HOPELESS:  # nor where it is no number
                return
