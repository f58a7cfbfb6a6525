"""Which experts of a mixture a search may drop, and in which order: by how little the logits need them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collapse.analysis import first_order
from collapse.analysis.experts import Experts, drop_experts, experts_of, grouped, needed
from collapse.analysis.layers import Layers
from collapse.analysis.site_influence import batches_of
from collapse.analysis.sites import Group, places_of
from collapse.errors import CollapseError, UnsupportedError
from collapse.passes.base import Context
from collapse.plan import Evidence, Plan, Rewrite, Skipped
from collapse.rewrite.graph import rewrite_program
from collapse.rewrite.model import collapsed_model
from collapse.search.memory import Memory
from collapse.search.mixtures import Mixtures

MOVE = "experts"
RANKING = Evidence(grade="measured", claim="is being tried", method="search")


def mixtures_of(
    context: Context, layers: Layers, moves: Sequence[str], windows: Tensor, memory: Memory
) -> tuple[Mixtures | None, tuple[Skipped, ...]]:
    """Rank the experts of all blocks on calibration `windows`, [sequences, tokens]; None where none may go, and why.

    An expert that no token is sent to is missed least; the others go by the estimate of first order of what the logits
    lose without them (`collapse.analysis.first_order`). It ranks; the search measures what a model loses without some.
    """
    if MOVE not in moves:
        return None, ()
    found, skipped = _found(context, layers)
    if not found:
        return None, skipped
    reason = _unfit(context, found)
    if reason is None:
        try:
            return _ranked(context, found, windows, memory), skipped
        except CollapseError as error:  # a router or a module that is not understood
            reason = str(error)
    return None, (*skipped, Skipped(pass_name=MOVE, site=layers.site, reason=reason))


def _ranked(context: Context, found: dict[int, Experts], windows: Tensor, memory: Memory) -> Mixtures:
    """Raise `CollapseError` where experts cannot be ranked, or a model without some cannot be made."""
    most = next(iter(found.values())).size - needed(context.config)
    mixtures = Mixtures(found, _orders(context, found, windows, memory), most, partial(_made, context))
    mixtures.without(mixtures.step)
    rewrite_program(
        context.program, _plan(context, _rewrites(context, mixtures.kept(mixtures.step))), context.checkpoint.config
    )
    return mixtures


def _found(context: Context, layers: Layers) -> tuple[dict[int, Experts], tuple[Skipped, ...]]:
    found: dict[int, Experts] = {}
    skipped: list[Skipped] = []
    for block in range(layers.size):
        for one in experts_of(context.program, context.checkpoint, f"{layers.site}.{block}"):
            if isinstance(one, Skipped):
                skipped.append(one)
            else:
                found[block] = one
    return found, tuple(skipped)


def _unfit(context: Context, found: dict[int, Experts]) -> str | None:
    """Return why no experts of the model can go."""
    if context.layout == "free":
        return "experts go in the native layout only, as many in every layer"
    sizes = {one.size for one in found.values()}
    if len(sizes) > 1:
        return f"layers have {min(sizes)} to {max(sizes)} of them, and the native layout has one number"
    if grouped(context.config):
        return "a router that chooses groups first would have other groups without some of their experts"
    if min(sizes) <= needed(context.config):
        return f"a token is sent to {needed(context.config)} of {min(sizes)}"
    return None


def _orders(context: Context, found: dict[int, Experts], windows: Tensor, memory: Memory) -> dict[str, tuple[int, ...]]:
    """Return by module its experts from the one that is missed least."""
    sites = [one.site for one in found.values()]
    flat = memory.kl(("experts", sites), lambda: chain.from_iterable(_estimates(context, sites, windows)))
    size = len(flat) // len(sites)
    pieces = [torch.tensor(flat[number * size : (number + 1) * size]) for number in range(len(sites))]
    return {site: tuple(torch.argsort(piece, stable=True).tolist()) for site, piece in zip(sites, pieces, strict=True)}


def _estimates(context: Context, sites: Sequence[str], windows: Tensor) -> list[list[float]]:
    places = places_of(context.program, context.checkpoint)
    groups: dict[str, Group] = {one.path: one for one in places.groups if one.kind == "experts"}
    model = context.loaded[0]
    batches = batches_of(windows, model.get_input_embeddings().weight.shape[0])

    def progress(done: int, of: int) -> None:
        context.progress("ranking experts", done, of)

    swept = first_order.sweep(model, [groups[site] for site in sites], batches, 0, progress)
    for site in sites:
        routed = swept[groups[site].key].routed
        if routed is None or not float(routed.sum()):
            raise UnsupportedError("which tokens its experts are given is not seen", where=site)
    return [swept[groups[site].key].fisher.tolist() for site in sites]


def _made(context: Context, kept: Sequence[tuple[Experts, Sequence[int]]]) -> PreTrainedModel:
    """Return the source in memory without some experts, from the weights that are loaded."""
    rewrites = _rewrites(context, kept)
    model = context.loaded[0]
    weights = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return collapsed_model(context.checkpoint, context.program, _plan(context, rewrites), weights)


def _rewrites(context: Context, kept: Sequence[tuple[Experts, Sequence[int]]]) -> tuple[Rewrite, ...]:
    rewrites = drop_experts(kept, context.program, context.checkpoint, context.config, RANKING, MOVE)
    if isinstance(rewrites, Skipped):
        raise UnsupportedError(rewrites.reason, where=rewrites.site)
    return rewrites


def _plan(context: Context, rewrites: Sequence[Rewrite]) -> Plan:
    return Plan(
        source="", model_type=context.checkpoint.model_type, input_schema={}, schema_digest="", layout="native",
        rewrites=tuple(rewrites),
    )  # fmt: skip
