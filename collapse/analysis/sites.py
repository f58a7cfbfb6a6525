"""The places of a model that can be short-circuited one by one, and what each would save.

A *group* is what can go from one place: a block, a sublayer, the KV groups of an attention, the neurons of a
feed-forward, the experts of a mixture. A *site* is some units of a group: the smallest thing that is tried out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from collapse.analysis.channels import channels_of
from collapse.analysis.experts import Experts, experts_of
from collapse.analysis.flop_rules import ATTENTION
from collapse.analysis.flops import Work, calls, matrix_work, with_ancestors
from collapse.analysis.layers import block_lists
from collapse.analysis.products import products_of
from collapse.analysis.residual import Sublayer, sublayers_of
from collapse.analysis.sizes import shape_reader
from collapse.analysis.traffic import element_bytes, parameter_counts, weight_reads
from collapse.analysis.units import Channels, Part
from collapse.checkpoint import Checkpoint
from collapse.errors import UnsupportedError
from collapse.plan import IndexSet, Skipped
from collapse.program import Program

Kind = Literal["layers", "sublayers", "kv-groups", "neurons", "experts"]
KINDS: tuple[Kind, ...] = get_args(Kind)
RANGES = 12  # of the neurons of one feed-forward


@dataclass(frozen=True)
class Sizes:
    """What goes with a site: parameters, FLOPs of a decode step, and bytes of weights that such a step reads."""

    parameters: int = 0
    flops: int = 0
    weight_bytes: int = 0

    def times(self, count: int) -> Sizes:
        """Return the sizes of `count` units."""
        return Sizes(self.parameters * count, self.flops * count, self.weight_bytes * count)


@dataclass(frozen=True)
class Group:
    """Units that are alike, all in one place.

    Attributes:
        kind: what the units are.
        path: the module that they are units of.
        block: number of the block.
        size: number of units; 1 for a block or a sublayer.
        module: what is changed to leave units out: the block; the writer of the sublayer; the module whose inputs the
            neurons or KV groups give; the module that holds the experts.
        unit: what one unit is worth.
        attends: of a sublayer, whether it looks at other tokens.
        read: of neurons and KV groups, which inputs of `module` each unit gives.
        in_dim: the dimension of that module's weight that counts its inputs.
        router: of experts, the parameters with one row or entry an expert that choose among them.
    """

    kind: Kind
    path: str
    block: int
    size: int
    module: str
    unit: Sizes
    attends: bool = False
    read: Part | None = None
    in_dim: int = 1
    router: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Names the group."""
        return f"{self.kind} {self.path}"


@dataclass(frozen=True)
class Site:
    """Some units of a group, the `number`-th of `count` such sets."""

    group: Group
    number: int
    count: int
    units: IndexSet

    @property
    def name(self) -> str:
        """Names the site, for people and in files: a module's path, and which part of it."""
        kind = self.group.kind
        return self.group.path if kind in {"layers", "sublayers"} else f"{self.group.path} {kind} {self.place}"

    @property
    def place(self) -> str:
        """Say which part of the group it is, counted from 0."""
        return f"{self.number}/{self.count}"

    @property
    def sizes(self) -> Sizes:
        """What would be saved without it."""
        return self.group.unit.times(len(self.units))


@dataclass(frozen=True)
class Places:
    """The groups of a model, whose blocks are the children of the module list `blocks`; and what is left alone."""

    blocks: str
    groups: tuple[Group, ...]
    skipped: tuple[Skipped, ...]


def sites_of(group: Group, order: Sequence[int], ranges: int = RANGES) -> tuple[Site, ...]:
    """Return the sites of a group: each unit, but of neurons `ranges` nearly equal runs of `order`, which has all."""
    if group.kind != "neurons":
        return tuple(Site(group, unit, group.size, IndexSet.of([unit])) for unit in range(group.size))
    count = min(ranges, group.size)
    bounds = [number * group.size // count for number in range(count + 1)]
    runs = (order[start:stop] for start, stop in pairwise(bounds))
    return tuple(Site(group, number, count, IndexSet.of(run)) for number, run in enumerate(runs))


def places_of(program: Program, checkpoint: Checkpoint, prompt: int = 512) -> Places:
    """Find all groups of a traced model. FLOPs are of a decode step after `prompt` tokens.

    Raises `UnsupportedError` for a model with no list of blocks, or with several.
    """
    lists = list(block_lists(program))
    if len(lists) != 1:
        raise UnsupportedError(f"has {len(lists)} lists of blocks, not one", where=checkpoint.label)
    site, size = lists[0]
    ledger = _Ledger.of(program, checkpoint, prompt)
    groups: list[Group] = []
    skipped: list[Skipped] = []
    for block in range(size):
        for found in _groups(program, checkpoint, ledger, site, block):
            (skipped if isinstance(found, Skipped) else groups).append(found)  # type: ignore[arg-type]
    return Places(site, tuple(groups), tuple(skipped))


@dataclass(frozen=True)
class _Ledger:
    """What every tensor and every node costs, tensors by the first of their tied names."""

    program: Program
    counts: Mapping[str, int]
    reads: Mapping[str, int]
    work: Sequence[Work]

    @classmethod
    def of(cls, program: Program, checkpoint: Checkpoint, prompt: int) -> _Ledger:
        step = calls(program, prompt)[1]
        reads = weight_reads(program, shape_reader(program, step), element_bytes(checkpoint, program))
        return cls(program, parameter_counts(program), reads, matrix_work(program, step))

    def name(self, tensor: str) -> str:
        return self.program.aliases(tensor)[0]

    def whole(self, tensors: frozenset[str], flops: int) -> Sizes:
        held = [self.name(tensor) for tensor in tensors]
        return Sizes(sum(self.counts.get(n, 0) for n in held), flops, sum(self.reads.get(n, 0) for n in held))

    def in_block(self, block: str) -> Sizes:
        inside = frozenset(self.name(name) for name in self.program.shapes if name.startswith(f"{block}."))
        return self.whole(inside, sum(w.flops for w in self.work if block in with_ancestors(w.module)))

    def of_sublayer(self, sublayer: Sublayer) -> Sizes:
        return self.whole(sublayer.tensors, sum(w.flops for w in self.work if w.node in sublayer.nodes))

    def of_channel(self, channels: Channels, block: str) -> Sizes:
        """Return what one neuron or KV group is worth: its share of each tensor, product and attention operator."""
        flops = {w.node: w.flops for w in self.work}
        products = list(products_of(self.program, block).values())
        total = [0, 0, 0]
        for part in channels.parts:
            rows = len(part.rows([0]))
            for tensor in (str(self.program.model_name(axis.tensor)) for axis in part.axes):
                work = sum(flops.get(one.node.name, 0) for one in products if one.weight == tensor)
                held = (self.counts.get(self.name(tensor), 0), work, self.reads.get(self.name(tensor), 0))
                total = [before + one * rows // part.size for before, one in zip(total, held, strict=True)]
        if channels.kind == "kv-groups":
            inside = (w.flops for w in self.work if w.op in ATTENTION and w.module == channels.site)
            total[1] += sum(inside) // channels.size
        return Sizes(*total)

    def of_expert(self, experts: Experts) -> Sizes:
        """A token takes as many experts as before, so that a step computes and reads as much."""
        names = {self.name(name) for name in experts.tensors(self.program)}
        return Sizes(parameters=sum(self.counts.get(name, 0) // experts.size for name in names))


def _groups(
    program: Program, checkpoint: Checkpoint, ledger: _Ledger, site: str, number: int
) -> Iterator[Group | Skipped]:
    block = f"{site}.{number}"
    yield Group("layers", block, number, 1, block, ledger.in_block(block))
    for one in sublayers_of(program, block):
        if isinstance(one, Skipped):
            yield one
        else:
            yield Group("sublayers", one.path, number, 1, one.writer, ledger.of_sublayer(one), one.attends)
    for channels in channels_of(program, checkpoint, block):
        yield channels if isinstance(channels, Skipped) else _channels(program, ledger, channels, block, number)
    for experts in experts_of(program, checkpoint, block):
        if isinstance(experts, Skipped):
            yield experts
        else:
            router = tuple(str(program.model_name(axis.tensor)) for axis in experts.router)
            worth = ledger.of_expert(experts)
            yield Group("experts", experts.site, number, experts.size, experts.site, worth, router=router)


def _channels(program: Program, ledger: _Ledger, channels: Channels, block: str, number: int) -> Group:
    inputs = {(product.weight, product.in_dim) for product in products_of(program, block).values()}
    axes = [(part, str(program.model_name(axis.tensor)), axis.dim) for part in channels.parts for axis in part.axes]
    read, tensor, dim = next(one for one in axes if one[1:] in inputs)
    reader, worth = tensor.rpartition(".")[0], ledger.of_channel(channels, block)
    return Group(channels.kind, channels.site, number, channels.size, reader, worth, read=read, in_dim=dim)
