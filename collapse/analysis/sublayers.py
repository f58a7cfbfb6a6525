"""Maps in place of modules, and biases on linear ones, as rewrites of the free layout: found by structure alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from collapse.checkpoint import Checkpoint
from collapse.dtypes import NAMES
from collapse.fingerprint import data_digest
from collapse.plan import AddBias, Added, Evidence, Map, Skipped, StandIn
from collapse.portable import portable
from collapse.program import Program
from collapse.trace import grown_cache, meta_model, quiet

Tensors = Mapping[str, torch.Tensor]


def outputs_of(config: PreTrainedConfig, sites: Iterable[str]) -> dict[str, int | None]:
    """Return how many values each module gives, the first of them the one that is passed on; None for it alone.

    The model of `config` is run on the meta device. A module has no entry that gives something else, or something of
    another shape than its first argument, of which a map would be made.
    """
    model = meta_model(config)
    found: dict[str, int | None] = {}
    for site in sites:
        model.get_submodule(site).register_forward_hook(partial(_note, found, site), with_kwargs=True)
    with quiet(), portable(), torch.no_grad():
        grown_cache(model, 1, 2)
    return found


def _note(
    found: dict[str, int | None], site: str, module: nn.Module, args: Any, kwargs: dict[str, Any], value: Any
) -> None:
    first = value[0] if isinstance(value, tuple) and value else value
    given = args[0] if args else kwargs.get("hidden_states")
    if isinstance(first, torch.Tensor) and isinstance(given, torch.Tensor) and given.shape == first.shape:
        found[site] = len(value) if isinstance(value, tuple) else None


def stand_in(
    program: Program,
    checkpoint: Checkpoint,
    outputs: Mapping[str, int | None],
    site: str,
    by: Map,
    tensors: Tensors,
    evidence: Evidence,
    name: str,
) -> tuple[StandIn, dict[str, torch.Tensor]] | Skipped:
    """Return the rewrite of pass `name` that puts a map in place of the module `site`, and its values for the plan.

    Args:
        program: the source's.
        checkpoint: the source.
        outputs: what `outputs_of` says of the module.
        site: path of the module.
        by: which map, as `collapse.plan.StandIn` says.
        tensors: its tensors by their part (`weight`, `bias`, `down`, `up`), in the dtype that the output has them in.
        evidence: why the map is allowed.
        name: of the pass.
    """
    held = owned(program, checkpoint, site)
    if site not in outputs or not held:
        reason = "the files have no tensor of it" if not held else "it gives no value that a map could stand in for"
        return Skipped(pass_name=name, site=site, reason=reason)
    prefix = _prefix(held, site)
    rewrite = StandIn(
        pass_name=name, site=site, evidence=evidence, by=by, prefix=prefix, outputs=outputs[site],
        tensors=tuple(held), added={part: _added(tensor) for part, tensor in tensors.items()},
    )  # fmt: skip
    return rewrite, {f"{prefix}{part}": tensor for part, tensor in tensors.items()}


def add_bias(
    program: Program, checkpoint: Checkpoint, site: str, bias: torch.Tensor, evidence: Evidence, name: str
) -> tuple[AddBias, dict[str, torch.Tensor]] | Skipped:
    """Return the rewrite of pass `name` that gives the linear module `site` a bias [channels], and its values."""
    held = owned(program, checkpoint, site)
    if len(held) != 1:
        return Skipped(pass_name=name, site=site, reason=f"the files have {len(held)} tensors of it, not its weight")
    prefix = _prefix(held, site)
    rewrite = AddBias(
        pass_name=name, site=site, evidence=evidence, prefix=prefix, added={"bias": _added(bias)},
    )  # fmt: skip
    return rewrite, {f"{prefix}bias": bias}


def _added(tensor: torch.Tensor) -> Added:
    return Added(sha256=data_digest(tensor), dtype=NAMES[tensor.dtype], shape=tuple(tensor.shape))


def owned(program: Program, checkpoint: Checkpoint, site: str) -> dict[str, str]:
    """Return the files' tensors of a module, each with its name in the model."""
    names = ((name, program.model_name(name)) for name in checkpoint.tensors)
    return {name: found for name, found in names if found is not None and found.startswith(f"{site}.")}


def _prefix(held: Mapping[str, str], site: str) -> str:
    """Return what the files' names of a module's tensors begin with; they may name what is inside otherwise."""
    rests = [(name, found.removeprefix(f"{site}.")) for name, found in held.items()]
    plain = {name.removesuffix(rest) for name, rest in rests if name.endswith(rest)}
    if len(plain) == 1 and all(name.endswith(rest) for name, rest in rests):
        return plain.pop()
    parts = zip(*(name.split(".")[:-1] for name in held), strict=False)
    return "".join(f"{found[0]}." for found in takewhile(lambda found: len(set(found)) == 1, parts))
