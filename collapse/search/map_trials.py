"""What a map costs in each sublayer's place: every one tried alone, fitted on the source's own stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from collapse.analysis.layers import Layers
from collapse.search.alone import Alone, readings
from collapse.search.maps import Fit, MapKind, module_of
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

    def run(self, progress: Progress) -> tuple[MapTrial, ...]:
        """Return the trials of all places; in each, what is harder than a hopeless one is not tried."""
        if not self.kinds:
            return ()
        by_site = {place.site: place for place in self.kinds}
        paths: dict[int, list[str]] = {}
        for place in self.kinds:
            paths.setdefault(place.block, []).append(place.site)
        alone = Alone.of(self.model, self.layers, self.choosing)
        found: list[MapTrial] = []
        for done, (site, pairs) in enumerate(readings(self.model, self.layers, self.fitting, paths), 1):
            found += self._tried(alone, by_site[site], Fit.of(pairs))
            progress(done, len(self.kinds))
        return tuple(found)

    def _tried(self, alone: Alone, place: Place, fit: Fit) -> list[MapTrial]:
        found: list[MapTrial] = []
        for kind in self.kinds[place]:
            smaller = copy_sharing(self.model)
            put_module(smaller, place.site, module_of(place, kind, fit.tensors(kind)))
            found.append(MapTrial(place, kind, alone.kl(smaller, place.block)))
            if found[-1].kl > HOPELESS:
                break
        return found
