"""The sublayers that a map can stand in for: an attention or a feed-forward, found by structure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from torch import fx
from transformers import PreTrainedConfig

from collapse.analysis.layers import Layers
from collapse.analysis.residual import Sublayer, sublayers_of
from collapse.analysis.sublayers import outputs_of, owned
from collapse.checkpoint import Checkpoint
from collapse.dtypes import FLOATS
from collapse.errors import PlanError
from collapse.plan import Skipped
from collapse.program import Program
from collapse.rewrite.blocks import inside_of, leaving_values, passed_in
from collapse.rewrite.short_circuit import only_leaving
from collapse.search.units import Units


@dataclass(frozen=True)
class Place:
    """A module of a block that the residual stream gets its value from, and that nothing else reads.

    Attributes:
        site: the module's path.
        block: number of its block.
        width: channels of what enters it and of what it gives.
        parameters: how many it holds.
        attends: whether it looks at other tokens, and has an entry in the KV cache.
        outputs: how many values it gives, as `collapse.plan.StandIn` says.
        norm: the module before it that nothing else reads; None where there is none.
        units: those of it that may be narrowed.
    """

    site: str
    block: int
    width: int
    parameters: int
    attends: bool
    outputs: int | None = field(compare=False)
    norm: str | None = field(compare=False)
    units: Units | None


@dataclass(frozen=True)
class Places:
    """The places of a model, in its order; why other sublayers have none; how many of its sublayers attend in all."""

    found: tuple[Place, ...]
    skipped: tuple[Skipped, ...]
    attentions: int


def places_of(
    program: Program,
    checkpoint: Checkpoint,
    config: PreTrainedConfig,
    layers: Layers,
    units: Sequence[Units],
    name: str,
) -> Places:
    """Find the sublayers of every block that a map can stand in for, or why not, said by the pass `name`.

    `units` are those that may be narrowed.
    """
    blocks = [sublayers_of(program, f"{layers.site}.{number}") for number in range(layers.size)]
    sublayers = [(number, one) for number, some in enumerate(blocks) for one in some if isinstance(one, Sublayer)]
    outputs = outputs_of(config, [one.path for _, one in sublayers])
    inspected = [
        _place(program, checkpoint, number, one, outputs, _units_within(one.path, units), name)
        for number, one in sublayers
    ]
    unknown = [one for some in blocks for one in some if isinstance(one, Skipped)]
    skipped = [one.model_copy(update={"pass_name": name}) for one in unknown]
    return Places(
        found=tuple(one for one in inspected if isinstance(one, Place)),
        skipped=(*skipped, *(one for one in inspected if isinstance(one, Skipped))),
        attentions=sum(one.attends for _, one in sublayers),
    )


def _units_within(site: str, units: Iterable[Units]) -> Units | None:
    return next((one for one in units if one.reader.startswith(f"{site}.")), None)


def _place(
    program: Program,
    checkpoint: Checkpoint,
    block: int,
    sublayer: Sublayer,
    outputs: dict[str, int | None],
    units: Units | None,
    name: str,
) -> Place | Skipped:
    site, graph = sublayer.path, program.graph.graph
    inside = inside_of(graph, site)
    reason = _unfit(program, checkpoint, sublayer, site in outputs)
    try:
        leaving = only_leaving(graph, inside, site)
        entering = passed_in(graph, inside, leaving, site)
    except PlanError as error:
        reason = reason or error.what
    else:
        if leaving.name not in sublayer.nodes:
            reason = reason or "it gives more than what is added to the residual stream"
    if reason:
        return Skipped(pass_name=name, site=site, reason=reason)
    shapes = [shape for name, shape in program.shapes.items() if name.startswith(f"{site}.")]
    return Place(
        site=site, block=block, width=int(leaving.meta["val"].shape[-1]), parameters=sum(map(prod, shapes)),
        attends=sublayer.attends, outputs=outputs[site], norm=_norm(graph, site, inside, entering), units=units,
    )  # fmt: skip


def _unfit(program: Program, checkpoint: Checkpoint, sublayer: Sublayer, maps: bool) -> str | None:
    """Return why the files or the architecture do not let a map stand in for a module."""
    names = [name for name in program.shapes if name.startswith(f"{sublayer.path}.")]
    if not maps:
        return "it does not give a value of the shape of its first argument"
    if any(program.aliases(name)[0] not in sublayer.tensors for name in names):
        return "others need some of its tensors"
    for name in owned(program, checkpoint, sublayer.path):
        if checkpoint.group(name) is not None or checkpoint.tensors[name].dtype not in FLOATS:
            return f"{name} is quantised, and so would have to be what stands in for it"
    return None


def _norm(graph: fx.Graph, site: str, inside: set[fx.Node], entering: fx.Node) -> str | None:
    """Return the module of the same block that gives what enters `site`, and nothing else to anyone."""
    block = site.rpartition(".")[0]
    paths = [str(path) for path, _ in (entering.meta.get("nn_module_stack") or {}).values()]
    found = next((path for path in paths if path.startswith(f"{block}.")), None)
    if found is None:
        return None
    own = inside_of(graph, found)
    leaving = [node for node in leaving_values(graph, own) if not _is_same(node)]
    return found if leaving == [entering] and all(user in own | inside for user in entering.users) else None


def _is_same(node: fx.Node) -> bool:
    """Whether a node only casts a value to the dtype that it has, as norms do with what they are given."""
    if str(node.target) != "aten.to.dtype" or not isinstance(node.args[0], fx.Node):
        return False
    return bool(node.args[0].meta["val"].dtype == node.meta["val"].dtype)
