"""Erase tensors that nothing reads: copies under a second name, and tensors that no module claims."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from transformers import PreTrainedConfig

from collapse.passes.base import Context, Proposal
from collapse.plan import Erase, Evidence, Skipped

UNCLAIMED = "no module of the model claims it"
COMPUTED = "the model computes this buffer itself when it is built"
SHARED_KV = (
    "its layer attends to the keys and values of an earlier one; vLLM before the change of 2 September 2026 (pull "
    "request 54917) asks for such tensors all the same"
)


@dataclass(frozen=True)
class UnreadWeights:
    """The pass; see `propose_unread`."""

    name: str = "unread-weights"

    def propose(self, context: Context) -> Proposal:
        """Propose erasing what no program under the schema reads."""
        return propose_unread(context, self.name)


def propose_unread(context: Context, name: str) -> Proposal:
    """Sort the file's tensors into claimed and unclaimed, read and unread; erase what is safely neither.

    A tensor that a module claims but no graph reads stays where plain transformers would miss it and fill the
    hole with random numbers; it is listed as a near miss.
    """
    copies = {
        tensor: f"it is tied to {first} and holds the same bytes" for tensor, first in context.tied_copies.items()
    }
    rewrites = [_erase(context, name, tensor, (tensor,), reason) for tensor, reason in copies.items()]
    rewrites += [
        _erase(context, name, site, tensors, _reason(context, tensors))
        for site, tensors in unclaimed_sites(context).items()
    ]
    skipped = _scheme_tensors(context, name)
    for tensor in sorted(context.checkpoint.tensors):
        if context.program.model_name(tensor) in context.reachability.unread and tensor not in copies:
            reason = "no program reads it, but its module claims it: plain transformers would report it missing"
            skipped.append(Skipped(pass_name=name, site=tensor, reason=reason))
    if not rewrites and not skipped:
        reason = "every tensor in the files is claimed by a module and read by the traced graph"
        skipped.append(Skipped(pass_name=name, site="model", reason=reason))
    return Proposal(tuple(sorted(rewrites, key=lambda erase: erase.site)), tuple(skipped))


def unclaimed_sites(context: Context) -> dict[str, tuple[str, ...]]:
    """Return site -> tensors that no module claims, by transformers' own rules for the names in files.

    A site is the outermost path with unclaimed tensors only: a whole auxiliary head, or one tensor. The tensors of a
    quantised weight go by its name, all to one site. What the scheme's loader may claim is left out.
    """
    weights = {tensor: _weight(context, tensor) for tensor in context.checkpoint.tensors}
    claims = {tensor: context.program.model_name(tensor) is not None for tensor in weights}
    alive = {path for tensor, claimed in claims.items() if claimed for path in _paths(weights[tensor])}
    sites: dict[str, list[str]] = {}
    left = frozenset(_left_to_scheme(context))
    for tensor in sorted(tensor for tensor, claimed in claims.items() if not claimed and tensor not in left):
        site = next(path for path in _paths(weights[tensor]) if path not in alive)
        sites.setdefault(site, []).append(tensor)
    return {site: tuple(tensors) for site, tensors in sites.items()}


def _weight(context: Context, tensor: str) -> str:
    group = context.checkpoint.group(tensor)
    return tensor if group is None else group.weight


def _left_to_scheme(context: Context) -> Iterable[str]:
    """Yield unclaimed tensors of a quantised checkpoint that stand in a module of the model.

    The traced model is the one without quantisation. A module that a loader puts in its place can have more tensors,
    such as the scales of a quantised cache.
    """
    if context.checkpoint.quantisation is None:
        return
    weights = {tensor: _weight(context, tensor) for tensor in context.checkpoint.tensors}
    claimed = {tensor for tensor in weights if context.program.model_name(tensor) is not None}
    modules = {path for tensor in claimed for path in _paths(weights[tensor]) if path != weights[tensor]}
    for tensor, weight in weights.items():
        if tensor not in claimed and weight.rpartition(".")[0] in modules and not _is_computed(context, tensor):
            yield tensor


def _scheme_tensors(context: Context, name: str) -> list[Skipped]:
    reason = "no module of the model without quantisation claims it, but the scheme's own may"
    return [Skipped(pass_name=name, site=tensor, reason=reason) for tensor in sorted(_left_to_scheme(context))]


def _is_computed(context: Context, tensor: str) -> bool:
    return tensor.rpartition(".")[2] in context.program.naming.computed


def _paths(tensor: str) -> Iterable[str]:
    """Yield the paths that lead to a tensor, outermost first, its own name last."""
    return accumulate(tensor.split("."), lambda path, part: f"{path}.{part}")


def _reason(context: Context, tensors: tuple[str, ...]) -> str:
    if all(_is_computed(context, tensor) for tensor in tensors):
        return COMPUTED
    if all(_shares_kv(context.config, tensor) for tensor in tensors):
        return SHARED_KV
    return UNCLAIMED


def _shares_kv(config: PreTrainedConfig, tensor: str) -> bool:
    """Whether the tensor belongs to the attention of one of the last layers, which the config says share keys."""
    text = config.get_text_config()
    shared = getattr(text, "num_kv_shared_layers", 0) or 0
    layer = re.search(r"\.layers\.(\d+)\.self_attn\.", tensor)
    return layer is not None and int(layer[1]) >= text.num_hidden_layers - shared


def _erase(context: Context, name: str, site: str, tensors: tuple[str, ...], reason: str) -> Erase:
    infos = [context.checkpoint.tensors[tensor] for tensor in tensors]
    evidence = Evidence(
        grade="proved",
        claim=f"{site} is never read: {reason}",
        method="transformers' own rules for names and ties, liveness in the traced graph by tied group",
        figures={"bytes": sum(info.nbytes for info in infos), "parameters": context.checkpoint.parameters(tensors)},
    )
    return Erase(pass_name=name, site=site, evidence=evidence, tensors=tensors)
