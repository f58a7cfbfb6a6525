"""What the search for a smaller native shape works on: texts in three parts, units, prices, and counted sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collapse.analysis.block_runs import BlockRuns
from collapse.analysis.channels import narrow_channels
from collapse.analysis.flops import Cost, cost
from collapse.analysis.layer_search import LayerSearch, Step
from collapse.analysis.layers import Layers
from collapse.analysis.traffic import element_bytes
from collapse.canonical import digest
from collapse.certify.losses import SequenceLoss
from collapse.certify.metrics import Design
from collapse.dtypes import FLOATS
from collapse.errors import UnsupportedError
from collapse.passes.base import Context, Proposal
from collapse.passes.shrink_experts import mixtures_of
from collapse.passes.shrink_places import mappable, tried_kinds
from collapse.plan import Evidence, Plan, Rewrite, Skipped
from collapse.rewrite.graph import rewrite_program
from collapse.search.fisher import Fisher
from collapse.search.free_walk import FreeWalk
from collapse.search.map_trials import MapTrials
from collapse.search.measure import Judge
from collapse.search.memory import Memory, remembering, surroundings
from collapse.search.mixtures import Mixtures
from collapse.search.places import Place
from collapse.search.rewrites import Origin
from collapse.search.shapes import KINDS, Lost, Prices, Shape
from collapse.search.sweep import Sweep
from collapse.search.trials import Trials
from collapse.search.units import Units, units_of
from collapse.search.walk import Order, Point, Walk
from collapse.search.written import can_write, written
from collapse.sequences import Ids, apart, context_length, cut, encoder, text_bytes

FIT_WINDOW, FITTING = 256, 128  # tokens of a sequence to fit to; sequences
WRITTEN_EVERY = 2  # of those: after the beginning of one in so many the source writes one more
WINDOW = 128  # tokens of a sequence to judge by: more of them, not longer ones, make a bound tight
CHOOSING, HELD_OUT = 32, 512  # sequences; a rate of a hundredth is not certified with fewer
MEASURED_EVERY = 4  # a mean without a bound is taken over one held-out sequence in so many
STRETCH, EVERY = 8, 4  # of calibration blocks, every fourth stretch of eight chooses, the others fit
WEIGHED = 32  # sequences to fit to on which the source is asked what an error costs
FIT_EVERY, TRY_EVERY = 4, 8  # of the sequences one in so many, where single blocks are fitted and tried
SIZE_OF = {"params": "params", "flops": "prefill_flops", "decode": "weight_bytes_per_decode_token"}
Cutting = Callable[[Sequence[str], int, Callable[[str], Ids], int], Iterable[Ids]]
PENDING = Evidence(grade="measured", claim="is being measured", method="search")


@dataclass(frozen=True)
class Texts:
    """Token ids [sequences, tokens]: to fit weights to, to choose shapes by, and to judge what was chosen."""

    fitting: Tensor
    choosing: Tensor
    held_out: Tensor


def texts_of(context: Context) -> Texts | None:
    """Return sequences of the corpus; None where a part has too little text. Held-out text neither fits nor chooses.

    Half of those to fit to are of related text, where there is some: a fit to few systems' text is bad for others'.
    """
    blocks = context.texts.calibration
    if not blocks:  # a schema of token ids alone: there may be no tokenizer either
        return None
    chooses = [number // STRETCH % EVERY == EVERY - 1 for number in range(len(blocks))]
    fit, choose = ([one for one, flag in zip(blocks, chooses, strict=True) if flag is side] for side in (False, True))
    more = _windows(context, context.related, FITTING // 2, FIT_WINDOW)
    found = Texts(
        torch.cat([_windows(context, fit, FITTING - len(more), FIT_WINDOW), more]),
        _windows(context, choose, CHOOSING, WINDOW),
        _windows(context, context.texts.held_out, HELD_OUT, WINDOW, apart),  # or a bound would count text twice
    )
    return found if all(len(one) for one in (found.fitting, found.choosing, found.held_out)) else None


def _with_written(
    context: Context, model: PreTrainedModel, windows: Tensor, memory: Memory, move: str
) -> tuple[Tensor, tuple[Skipped, ...]]:
    """Return the windows to fit to with those that the source writes after some beginnings, or why it writes none."""
    if not can_write(model):
        return windows, ()
    begun = windows[::WRITTEN_EVERY]

    def write() -> list[list[int]]:
        ids: list[list[int]] = written(
            model, begun, lambda done, of: context.progress("writing text to fit to", done, of)
        ).tolist()
        return ids

    count, length = begun.shape
    rows = int(model.get_input_embeddings().weight.shape[0])
    try:
        more = memory.written((count, length), rows, write)
    except UnsupportedError as error:
        return windows, (Skipped(pass_name=move, site="model", reason=f"fitted to the corpus alone: {error}"),)
    return torch.cat([windows, torch.tensor(more, dtype=torch.long)]), ()


def _fisher(context: Context, model: PreTrainedModel, units: Sequence[Units], windows: Tensor) -> Fisher:
    """Return what an error in what the readers of some units write costs, on some of the windows."""
    told = "asking what errors cost"
    readers = [one.reader for one in units]
    return Fisher(model, readers, spread(windows, WEIGHED), lambda done, of: context.progress(told, done, of))


def spread(windows: Tensor, count: int) -> Tensor:
    """Return up to `count` of the windows, evenly spaced."""
    return windows[:: max(1, -(-len(windows) // count))]


def judging(context: Context, held_out: Tensor) -> Tensor:
    """Return the held-out sequences that judge: all where losses are to be certified, fewer where they are measured."""
    return held_out if any(one.kind == "loss" for one in context.budgets) else held_out[::MEASURED_EVERY]


def _windows(context: Context, blocks: Sequence[str], count: int, length: int, cutting: Cutting = cut) -> Tensor:
    """Return whole windows of the text, [windows, length]; shorter ones where the model takes no such length."""
    length = min(length, context_length(dict(context.checkpoint.config)) or length)
    found = [ids for ids in cutting(blocks, count, encoder(context.checkpoint), length) if len(ids) == length]
    return torch.tensor(found, dtype=torch.long).reshape(len(found), length)


@dataclass(frozen=True)
class Task:
    """One search: `left_out` are units that cannot be narrowed, sublayers without maps and so on, with the reasons.

    `movable` says whether anything is left that can go.
    """

    context: Context
    moves: tuple[str, ...]
    movable: bool
    origin: Origin
    walk: Walk | FreeWalk
    judge: Judge
    left_out: tuple[Skipped, ...]
    before: Cost
    memory: Memory
    fisher: Fisher

    @classmethod
    def of(cls, context: Context, layers: Layers, moves: Sequence[str], texts: Texts, memory: Memory) -> Task:
        """Load the model, find what the `moves` may narrow, and rank the blocks where they may go."""
        units, left_alone = narrowable(context, layers, moves)
        places = mappable(context, layers, units, moves)
        model = context.loaded[0]
        runs = BlockRuns(model, layers.site)
        before = _cost(context, ())
        mixtures, whole = mixtures_of(context, layers, moves, texts.fitting[::FIT_EVERY], memory)
        prices = _prices(before, context, layers, units, places.found, mixtures)
        origin = Origin(context.checkpoint, context.config, context.program, layers, units, mixtures)
        dtypes = {one.reader: origin.dtype_of_reader(one) for one in units}
        dtypes |= {place.site: origin.dtype_of_site(place.site) for place in places.found}
        kinds = tried_kinds(places, moves)
        whole_blocks = context.layout == "native" and "layers" in moves
        movable = bool(units or kinds or whole_blocks or mixtures is not None)
        fitting, unwritten = texts.fitting, tuple[Skipped, ...]()
        if movable:
            fitting, unwritten = _with_written(context, model, texts.fitting, memory, moves[0])
        fisher = _fisher(context, model, units, fitting)
        sweep = Sweep(model, layers, units, fitting, places=places.found, dtypes=dtypes, metric=fisher.weighing)
        choosing = Judge.of(runs, texts.choosing)
        walk: Walk | FreeWalk
        if context.layout == "free":
            some = fitting[::FIT_EVERY], texts.choosing[::TRY_EVERY]
            trials = Trials(model, layers, units, *some, metric=fisher.weighing)
            maps = MapTrials(model, layers, kinds, *some)
            walk = FreeWalk(sweep, choosing, prices, units, trials, maps, places.attentions, context.progress, memory)
        else:
            order = _order(context, runs, layers, texts, memory) if whole_blocks else Order(())
            walk = Walk(sweep, choosing, prices, units, order, context.progress, memory, mixtures)
        left = (*left_alone, *places.skipped, *whole, *unwritten)
        judge = Judge.of(runs, judging(context, texts.held_out))
        return cls(context, tuple(moves), movable, origin, walk, judge, left, before, memory, fisher)

    @property
    def left_alone(self) -> tuple[Skipped, ...]:
        """What was left out of the search, and out of its choices, with the reasons."""
        if self.fisher.reason is None:
            return self.left_out
        reason = f"what goes is chosen as if all that a reader writes counted alike: {self.fisher.reason}"
        return (*self.left_out, Skipped(pass_name=self.moves[0], site="model", reason=reason))

    @property
    def design(self) -> Design:
        """The design of certificates on the held-out sequences."""
        return Design(split=digest(self.judge.windows.tolist()), length=self.judge.windows.shape[1] - 1)

    def allowed(self, shape: Shape) -> bool:
        """Whether the architecture can have a shape."""
        return not isinstance(self.origin.structure(shape, {}, PENDING), Skipped)

    def level(self, step: float) -> dict[str, float]:
        """Return the level at which a part `step` of the blocks' parameters is gone."""
        prices = self.walk.prices["params"]
        return {"params": 1 - step * sum(prices.blocks) / prices.total}

    def sizes(self, shape: Shape) -> dict[str, float]:
        """Return what a shape leaves of every size, counted in its graph, as a share of the source's."""
        return self.memory.shares(shape, lambda: self._counted(shape))

    def _counted(self, shape: Shape) -> dict[str, float]:
        narrower, maps = self.origin.structure(shape, {}, PENDING), self.origin.maps(shape, {}, PENDING)
        assert not isinstance(narrower, Skipped) and not isinstance(maps, Skipped)  # the walk takes what is allowed
        after = _cost(self.context, (*narrower, *maps[0]))
        return {name: getattr(after, field) / getattr(self.before, field) for name, field in SIZE_OF.items()}

    def source_cost(self) -> Cost:
        """Return the sizes of the source, with the element sizes of its files."""
        context = self.context
        sizes = element_bytes(context.checkpoint, context.program)
        return cost(context.program, prompt=context.schema.workload.prompt, element_bytes=sizes)

    def losses(self, point: Point) -> list[SequenceLoss]:
        """Return what every held-out sequence loses at a point."""
        return self.memory.losses((point.shape, len(self.judge.windows)), lambda: self._judged(point))

    def _judged(self, point: Point) -> Iterator[SequenceLoss]:
        size = text_bytes(self.context.checkpoint)
        yield from self.judge.losses(
            point.swept.model, size, lambda done, of: self.context.progress("judging on held-out text", done, of)
        )

    def rewrites(self, point: Point, evidence: Evidence) -> Proposal:
        """Return a point as rewrites with their evidence, and the fitted tensors."""
        narrower = self.origin.structure(point.shape, point.swept.kept, evidence)
        maps = self.origin.maps(point.shape, point.swept.maps, evidence)
        assert not isinstance(narrower, Skipped) and not isinstance(maps, Skipped)  # the walk takes what is allowed
        refits = self.origin.refits(point.swept, evidence)
        whole = (*narrower, *maps[0])
        return Proposal((*whole, refits[0]), values=refits[1] | maps[1]) if refits else Proposal(whole, values=maps[1])


def narrowable(context: Context, layers: Layers, moves: Sequence[str]) -> tuple[tuple[Units, ...], tuple[Skipped, ...]]:
    """Return the units of the kinds among `moves` that all blocks have alike, and why others are left alone."""
    found = units_of(context.program, context.checkpoint, layers)
    skipped = [one for one in found if isinstance(one, Skipped) and one.pass_name in moves]
    if context.layout == "free":
        return _narrowable_alone(context, found, moves), (*skipped, *_whole_blocks(layers, moves))
    units: list[Units] = []
    for kind in (kind for kind in KINDS if kind in moves):
        some = [one for one in found if isinstance(one, Units) and one.kind == kind]
        reason = _uneven(some, layers) or next(filter(None, (_unfit(context, one) for one in some)), None)
        reason = reason or _unnamed(context, some)
        if reason is None:
            units += some
        else:
            skipped.append(Skipped(pass_name=kind, site=layers.site, reason=reason))
    return tuple(sorted(units, key=lambda one: (one.block, KINDS.index(one.kind)))), tuple(skipped)


def _narrowable_alone(context: Context, found: Sequence[Units | Skipped], moves: Sequence[str]) -> tuple[Units, ...]:
    """Return the units among `moves` of which some can go and whose readers can be computed anew."""
    some = [one for one in found if isinstance(one, Units) and one.kind in moves and one.size > 1]
    return tuple(one for one in some if _unfit(context, one) is None)


def _whole_blocks(layers: Layers, moves: Sequence[str]) -> tuple[Skipped, ...]:
    """Say that whole blocks stay in the free layout, where each block may lose what it does not need."""
    reason = "whole blocks go in the native layout only; in the free one each gets widths of its own"
    return (Skipped(pass_name="layers", site=layers.site, reason=reason),) if "layers" in moves else ()


def _uneven(units: Sequence[Units], layers: Layers) -> str | None:
    """Return why units cannot be narrowed alike in all blocks."""
    if [one.block for one in units] != list(range(layers.size)):
        return f"{len({one.block for one in units})} of {layers.size} blocks have them, or not one group a block"
    sizes = {one.size for one in units}
    if len(sizes) > 1:
        return f"blocks have {min(sizes)} to {max(sizes)} of them, and the native layout has one number"
    return "each block has only one" if sizes == {1} else None


def _unnamed(context: Context, units: Sequence[Units]) -> str | None:
    """Return why no config has one unit fewer in every block."""
    fewer = [(one.channels, range(one.size - 1)) for one in units]
    found = narrow_channels(fewer, context.program, context.config, PENDING, units[0].kind)
    return found.reason if isinstance(found, Skipped) else None


def _unfit(context: Context, units: Units) -> str | None:
    """Return why a reader's tensors cannot be computed anew."""
    for name in (f"{units.reader}.weight", f"{units.reader}.bias"):
        if name not in context.program.shapes:
            continue
        files = context.file_names(name)
        if not files or context.checkpoint.group(files[0]) is not None:
            return f"{name} is not in the files as it is in the model"
        if context.checkpoint.tensors[files[0]].dtype not in FLOATS:
            return f"{name} is {context.checkpoint.tensors[files[0]].dtype}, which is not fitted to"
    return None


def _order(context: Context, runs: BlockRuns, layers: Layers, texts: Texts, memory: Memory) -> Order:
    """Return the blocks in the order in which they are missed least, each measured without those before it."""

    def further(known: Sequence[Step]) -> Iterator[Step]:
        search = LayerSearch(runs, texts.choosing)
        gone = known[-1].dropped if known else ()
        yield from search.steps(
            layers.size, lambda _: True, lambda done, of: context.progress("ranking blocks", done, of), gone
        )

    return Order(step.dropped for step in memory.steps(further))


def opened_memory(context: Context, texts: Texts, moves: Sequence[str]) -> AbstractContextManager[Memory]:
    """Open what was measured before in a search that went on as this one does."""
    made_for = {
        "source": context.checkpoint.digest,
        "schema": context.schema.digest,
        "layout": context.layout,
        "moves": list(moves),
        "fitting": digest(texts.fitting.tolist()),
        "choosing": digest(texts.choosing.tolist()),
        "held_out": digest(texts.held_out.tolist()),
        **surroundings(),
    }
    return remembering(context.cache, made_for)


def _prices(
    before: Cost,
    context: Context,
    layers: Layers,
    units: Sequence[Units],
    places: Sequence[Place],
    mixtures: Mixtures | None,
) -> dict[str, Prices]:
    """Return the prices of blocks, of a unit and of a sublayer in each size; those of a unit count products alone.

    An expert is worth parameters alone: a token is sent to as many as before.
    """
    blocks = [before.modules[f"{layers.site}.{number}"] for number in range(layers.size)]
    prompt = context.schema.workload.prompt
    element = blocks[0].weight_bytes_per_decode_token / max(1, blocks[0].params)
    per_parameter = {"params": 1.0, "flops": 2.0 * prompt, "decode": element}
    held: dict[Lost, float] = {one.kind: one.parameters for one in units}
    experts: dict[Lost, float] = {} if mixtures is None else {"experts": _parameters(context, mixtures)}
    return {
        metric: Prices(
            total=getattr(before, field),
            blocks=tuple(getattr(block, field) for block in blocks),
            mixed=frozenset() if mixtures is None else frozenset(mixtures.found),
            unit={kind: count * per_parameter[metric] for kind, count in held.items()}
            | {kind: count if metric == "params" else 0.0 for kind, count in experts.items()},
            place={place.site: getattr(before.modules[place.site], field) for place in places},
            parameter=per_parameter[metric],
        )
        for metric, field in SIZE_OF.items()
    }


def _parameters(context: Context, mixtures: Mixtures) -> float:
    """Return what one expert of a mixture holds on average, with its row of the router."""
    shapes = context.program.shapes
    names = [name for one in mixtures.found.values() for name in one.tensors(context.program)]
    return sum(prod(shapes[name][1:]) for name in names) / len(mixtures.found)


def _cost(context: Context, rewrites: Sequence[Rewrite]) -> Cost:
    """Count the sizes of the model after some rewrites, in its graph."""
    program = context.program
    if rewrites:
        plan = Plan(
            source="", model_type=context.checkpoint.model_type, input_schema={}, schema_digest="",
            layout=context.layout, rewrites=tuple(rewrites),
        )  # fmt: skip
        program = rewrite_program(program, plan, context.checkpoint.config)
    return cost(program, prompt=context.schema.workload.prompt, element_bytes=4)
