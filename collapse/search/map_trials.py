"""What a map costs in each sublayer's place: every one tried alone, fitted on the source's own stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collapse.analysis.block_runs import BlockRuns
from collapse.analysis.layer_search import BATCH
from collapse.analysis.layers import Layers
from collapse.search.calls import block_calls, watched
from collapse.search.maps import Fit, MapKind, module_of
from collapse.search.options import MapTrial
from collapse.search.places import Place
from collapse.search.surgery import copy_sharing, put_module
from collapse.search.sweep import ROWS

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
        runs = BlockRuns(self.model, self.layers.site)
        before = [Said.of(runs, ids) for ids in torch.split(self.choosing, BATCH)]
        found: list[MapTrial] = []
        for done, (place, fit) in enumerate(self._fits(), 1):
            for kind in self.kinds[place]:
                smaller = copy_sharing(self.model)
                put_module(smaller, place.site, module_of(place, kind, fit.tensors(kind)))
                tried = BlockRuns(smaller, self.layers.site)
                kl = sum(one.kl(tried, place.block) for one in before) / self.choosing.numel()
                found.append(MapTrial(place, kind, kl))
                if kl > HOPELESS:
                    break
            progress(done, len(self.kinds))
        return tuple(found)

    def _fits(self) -> Iterator[tuple[Place, Fit]]:
        """Yield the least squares of every place on the source's own stream."""
        blocks = list(self.model.get_submodule(self.layers.site).children())
        starts, calls = zip(
            *(block_calls(self.model, blocks, ids) for ids in torch.split(self.fitting, ROWS)), strict=True
        )
        streams = list(starts)
        for number, block in enumerate(blocks):
            places = [one for one in self.kinds if one.block == number]
            with watched(self.model, [one.site for one in places]) as seen:
                streams = [call[number](block, stream) for call, stream in zip(calls, streams, strict=True)]
            yield from ((one, Fit.of(seen[one.site])) for one in places)


@dataclass(frozen=True)
class Said:
    """The source on a batch of `ids`: its stream before every block, and log-probabilities, [tokens of all, ids]."""

    ids: Tensor
    states: Mapping[int, Tensor]
    says: Tensor

    @classmethod
    def of(cls, runs: BlockRuns, ids: Tensor) -> Said:
        """Run the source once."""
        seen = runs.run(ids)
        return cls(ids, seen.states, seen.logits.flatten(0, -2).float().log_softmax(-1))

    def kl(self, tried: BlockRuns, block: int) -> float:
        """Return the KL divergence of the source from a model that is like it before `block`, summed over tokens."""
        logits = tried.run(self.ids, start=block, state=self.states[block]).logits
        found = logits.flatten(0, -2).float().log_softmax(-1)
        rows = zip(torch.split(self.says, ROWS), torch.split(found, ROWS), strict=True)
        return sum(float(torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True)) for p, q in rows)
