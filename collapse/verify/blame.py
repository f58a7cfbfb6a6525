"""Names what a refuted plan is wrong about: rewrites that alone change the logits, tensors that differ, config edits.

Asked only after a refutation. The graph answers first: each rewrite is replayed alone on the source's graph, with the
ids of the counterexample. Where all of them are right there, the fault lies in the files: a tensor of the reloaded
model that is not what the graph reads, or a config edit with which transformers computes something else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from collapse.auto import auto_class
from collapse.checkpoint import Checkpoint
from collapse.erase import CONFIG, side_files
from collapse.errors import CollapseError
from collapse.free_layout import BASE, SITES, is_free_config
from collapse.naming import Naming, naming_of
from collapse.plan import AddBias, Narrow, Plan, Replace, Rewrite, StandIn
from collapse.program import Program
from collapse.rewrite.channels import is_channels
from collapse.rewrite.config import config_edits
from collapse.rewrite.graph import rewrite_program, rewrite_weights
from collapse.rewrite.origin import origins
from collapse.rewrite.tensors import erased_names, output_name, token_narrow
from collapse.rewrite.values import Values, plan_digests, values_of
from collapse.source_model import load_plain
from collapse.trace import quiet
from collapse.untrusted import read_json
from collapse.verdict import Blamed
from collapse.verify.compare import EQ, OTHER_SHAPE, Tolerance
from collapse.verify.computed import exact_part, says_of_source
from collapse.verify.dynamic import allowed_difference
from collapse.verify.static import OTHER_VALUES, read_tensors

Weights = Mapping[str, torch.Tensor]
CUT = 3  # tokens that a replay decodes through the cache


def blame(
    output: Path, source: Checkpoint, plan: Plan, ids: Sequence[int], program: Program, weights: Weights
) -> tuple[Blamed, ...]:
    """Return what the refutation of `output` comes down to, the surest finding alone; empty where none is found.

    Args:
        output: the directory that was refuted.
        source: the checkpoint that was collapsed.
        plan: the plan that `output` is of.
        ids: token ids of the source on which the two differ.
        program: the source's program.
        weights: what it reads, by state-dict name, in fp32.
    """
    values = values_of(output, read_tensors(output)[0].values(), plan)
    exact = plan if says_of_source(plan) and not plan_digests(plan) else exact_part(plan)
    for found in (
        _other_values(plan, values),
        _alone(exact, ids, program, weights),
        tensors_blamed(output, source, plan, program, weights, values),
        _config_file(output, source, plan),
        _configs(source, plan, ids, program, weights),
        _without(exact, ids, program, weights),
        _too_far(plan),
    ):
        first = tuple(found)
        if first:
            return first
    return ()


def _other_values(plan: Plan, values: Values) -> Iterator[Blamed]:
    """Yield the replaced tensors of the output that have not the data with the digest in the plan."""
    for name, digest in plan_digests(plan).items():
        if name not in values.tensors or values.digest(name) != digest:
            yield Blamed(pass_name="writer", site=name, reason=f"the output {OTHER_VALUES}")


def _too_far(plan: Plan) -> Iterator[Blamed]:
    """Yield the computed weights whose evidence bounds the distance to the source, where nothing else is wrong."""
    computed = [one for one in plan.rewrites if isinstance(one, Replace | StandIn | AddBias)]
    for rewrite in computed if says_of_source(plan) else ():
        yield _blamed(rewrite, "the output is farther from the source than the evidence allows")


def _alone(plan: Plan, ids: Sequence[int], program: Program, weights: Weights) -> Iterator[Blamed]:
    """Yield the rewrites that change logits when nothing else is rewritten."""
    for rewrite in plan.rewrites:
        gap = _gap_of(_single(plan, rewrite), ids, program, weights)
        if gap is not None:
            yield _blamed(rewrite, f"alone, in the graph, {gap}")


def _without(plan: Plan, ids: Sequence[int], program: Program, weights: Weights) -> Iterator[Blamed]:
    """Yield the rewrites without which the graph says what the source says: those that are wrong only together."""
    if len(plan.rewrites) < 2 or _gap_of(plan, ids, program, weights) is None:
        return
    for rewrite in plan.rewrites:
        rest = plan.model_copy(update={"rewrites": tuple(other for other in plan.rewrites if other is not rewrite)})
        if _gap_of(rest, ids, program, weights) is None:
            yield _blamed(rewrite, "without it the graph agrees with the source, with it it does not")


def _single(plan: Plan, rewrite: Rewrite) -> Plan:
    return plan.model_copy(update={"rewrites": (rewrite,)})


def _blamed(rewrite: Rewrite, reason: str) -> Blamed:
    return Blamed(pass_name=rewrite.pass_name, site=rewrite.site, reason=reason)


def _gap_of(plan: Plan, ids: Sequence[int], program: Program, weights: Weights) -> str | None:
    """Return how the graph under `plan` differs from the source's graph on `ids`, or None."""
    narrow = token_narrow(plan)
    strange = [token for token in ids if narrow is not None and token not in narrow.kept]
    if strange:
        return f"it has no row for token {strange[0]}"
    kept = list(narrow.kept) if narrow else None
    new_ids = [kept.index(token) for token in ids] if kept else list(ids)
    try:
        changed, held = _replayed(plan, program, weights)
        before, after = _logits(program, weights, ids), _logits(changed, held, new_ids)
    except CollapseError as error:
        return f"it cannot be applied ({error})"
    except (RuntimeError, IndexError) as error:
        return f"it does not run ({str(error).splitlines()[0][:120]})"
    allowed = allowed_difference(plan)
    for way, tolerance in (("prefill", EQ), ("decode", OTHER_SHAPE)):
        wanted = before[way] if kept is None else before[way][:, kept]
        gap = _gap(wanted, after[way], tolerance.widened(allowed))
        if gap:
            return f"it moves a logit by {gap:.3g} ({way})"
    return None


def _replayed(plan: Plan, program: Program, weights: Weights) -> tuple[Program, Weights]:
    """Apply a plan to the graph; rows of channels are zeroed, not cut, so that one layer alone can lose them."""
    zeroed = dict(weights)
    for rewrite in plan.rewrites:
        if isinstance(rewrite, Narrow) and is_channels(program, rewrite):
            zeroed |= _zeroed(rewrite, program, zeroed)
    rest = tuple(rewrite for rewrite in plan.rewrites if not is_channels(program, rewrite))
    shortened = plan.model_copy(update={"rewrites": rest})
    return rewrite_program(program, shortened), rewrite_weights(program, zeroed, shortened)


def _zeroed(rewrite: Narrow, program: Program, weights: Weights) -> dict[str, torch.Tensor]:
    gone = torch.tensor(sorted(set(range(rewrite.size)) - set(rewrite.kept)), dtype=torch.long)
    found: dict[str, torch.Tensor] = {}
    for axis in rewrite.axes:
        name = program.model_name(axis.tensor)
        if name is not None:
            tensor = found.get(name, weights[name]).detach().clone().index_fill(axis.dim, gone, 0.0)
            found |= dict.fromkeys(program.aliases(name), tensor)
    return found


def _logits(program: Program, weights: Weights, ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """Run a graph whole, and in two chunks where it has a cache."""
    row = torch.tensor([list(ids)])
    mask = torch.ones_like(row)
    whole = program.run(weights, row, mask)[0][0]
    cut = len(ids) - CUT
    if cut < 1 or not program.cache:
        return {"prefill": whole, "decode": whole}
    _, cache = program.run(weights, row[:, :cut], mask[:, :cut])
    tail = program.run(weights, row[:, cut:], mask, cache)[0][0]
    return {"prefill": whole, "decode": torch.cat([whole[:cut], tail])}


def _gap(wanted: torch.Tensor, found: torch.Tensor, tolerance: Tolerance) -> float:
    """Return the largest difference where any is beyond the tolerance, else 0."""
    gap = (wanted - found).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(gap.max()) if bool((gap > tolerance.bound(wanted)).any()) else 0.0


def tensors_blamed(
    output: Path,
    source: Checkpoint,
    plan: Plan,
    program: Program,
    weights: Weights,
    values: Values | None = None,
) -> Iterator[Blamed]:
    """Yield the tensors that the reloaded model has otherwise than the graph; `values` are those that were computed."""
    try:
        with quiet():
            loaded = load_plain(Checkpoint.open(output))
    except Exception:  # that it cannot be loaded is known, and no tensor can be compared then
        return
    there, naming = loaded.model.state_dict(), loaded.naming
    files = _files(naming, source, plan)
    for name, (origin, wanted) in expected_state(naming, source, plan, program, weights, values).items():
        if name not in there or there[name].shape != wanted.shape or not torch.equal(there[name], wanted):
            for part in _parts(plan, files.get(name, [origin]), there.get(name), wanted):
                touched = [rewrite.site for rewrite in plan.rewrites if _touches(rewrite, part)]
                reason = f"the reloaded {name} is not what plan and source make of {part}"
                reason += f" ({', '.join(touched)})" if touched else ""
                yield Blamed(pass_name="writer", site=part, reason=reason)


def _files(naming: Naming, source: Checkpoint, plan: Plan) -> dict[str, list[str]]:
    """Return the source's file names of each tensor of the output's model: several where transformers merges them."""
    found: dict[str, list[str]] = {}
    for name in sorted(filter(source.is_weight, source.tensors.keys() - erased_names(plan)[0])):
        found.setdefault(str(naming.resolve(output_name(plan, name))[0]), []).append(name)
    return found


def _parts(plan: Plan, names: Sequence[str], there: torch.Tensor | None, wanted: torch.Tensor) -> list[str]:
    """Return those of the merged parts that differ: a part's number in the output is its row."""
    if len(names) == 1 or there is None or there.shape != wanted.shape:
        return list(names)
    rows = {str(int(place[0])) for place in (there != wanted).nonzero()}
    numbers = {name: [part for part in output_name(plan, name).split(".") if part.isdecimal()] for name in names}
    return [name for name in names if numbers[name] and numbers[name][-1] in rows]


def expected_state(
    naming: Naming, source: Checkpoint, plan: Plan, program: Program, weights: Weights, values: Values | None = None
) -> dict[str, tuple[str, torch.Tensor]]:
    """Return the output's tensors by their state-dict name, each with the source's file name that it comes from."""
    rewritten = rewrite_weights(program, weights, plan, values=values)
    names = origins(naming, source, plan, program)
    return {after: (name, rewritten[before].detach()) for after, (name, before) in names.items()}


def _touches(rewrite: Rewrite, name: str) -> bool:
    axes = {axis.tensor for axis in rewrite.axes} if isinstance(rewrite, Narrow) else set()
    return name in axes or name.startswith(f"{rewrite.site}.") or name in getattr(rewrite, "tensors", ())


def _config_file(output: Path, source: Checkpoint, plan: Plan) -> Iterator[Blamed]:
    """Yield the fields of the output's config.json that plan and source make otherwise."""
    raw = side_files(source, plan)[CONFIG]
    wanted, there = map(_by_field, (source.config if raw is None else json.loads(raw), read_json(output / CONFIG)))
    for field in sorted(wanted.keys() | there.keys()):
        if wanted.get(field) != there.get(field):
            reason = f"{field} is {there.get(field)}, plan and source make it {wanted.get(field)}"
            yield Blamed(pass_name="writer", site=f"{CONFIG}: {field}", reason=reason)


def _by_field(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json; of one of a free layout those of its base, and each entry of its sites."""
    if not is_free_config(config):
        return dict(config)
    sites = {f"{SITES}.{number}": entry for number, entry in enumerate(config.get(SITES, ()))}
    return {**config.get(BASE, {}), **sites}


def _configs(
    source: Checkpoint, plan: Plan, ids: Sequence[int], program: Program, weights: Weights
) -> Iterator[Blamed]:
    """Yield the rewrites with whose config edits alone transformers computes something else than the graph does."""
    same = EQ.rounded(_own_rounding(source, plan, ids, program, weights))
    for rewrite in plan.rewrites:
        single = _single(plan, rewrite)
        if not rewrite.config or is_channels(program, rewrite) or isinstance(rewrite, Replace):
            continue
        edits = ", ".join(f"{path} = {value}" for path, value in sorted(rewrite.config.items()))
        difference = _config_gap(source, single, ids, program, weights, same)
        if difference is not None:
            yield _blamed(rewrite, f"with its config edits ({edits}) transformers {difference}")


def _own_rounding(source: Checkpoint, plan: Plan, ids: Sequence[int], program: Program, weights: Weights) -> float:
    """Return twice what transformers and the graph differ by on the source, up to what `OTHER_SHAPE` allows."""
    said = _both(source, plan.model_copy(update={"rewrites": ()}), ids, program, weights)
    if isinstance(said, str) or said[0].shape != said[1].shape:
        return 0.0
    return min(2 * float((said[0] - said[1]).abs().nan_to_num(nan=torch.inf).max()), OTHER_SHAPE.absolute)


def _config_gap(
    source: Checkpoint, plan: Plan, ids: Sequence[int], program: Program, weights: Weights, tolerance: Tolerance
) -> str | None:
    said = _both(source, plan, ids, program, weights)
    if isinstance(said, str):
        return said
    wanted, found = said
    if found.shape != wanted.shape:
        return f"gives {found.shape[-1]} logits, the graph {wanted.shape[-1]}"
    gap = _gap(wanted, found, tolerance)
    return f"moves a logit by {gap:.3g} from the graph's" if gap else None


def _both(
    source: Checkpoint, plan: Plan, ids: Sequence[int], program: Program, weights: Weights
) -> tuple[torch.Tensor, torch.Tensor] | str:
    """Return the logits of the graph and of transformers under a plan, or why transformers has none."""
    narrow = token_narrow(plan)
    kept = list(narrow.kept) if narrow else None
    row = torch.tensor([[kept.index(token) for token in ids] if kept else list(ids)])
    rewritten = rewrite_program(program, plan)
    wanted: torch.Tensor = rewritten.run(rewrite_weights(program, weights, plan), row, torch.ones_like(row))[0][0]
    try:
        with quiet(), torch.no_grad():
            model = _built(source, plan, program, weights)
            return wanted, model(input_ids=row).logits[0]
    except Exception as error:  # a config class or a model may raise anything for values that do not fit
        return f"cannot run the model ({(str(error).strip() or type(error).__name__).splitlines()[0][:120]})"


def _built(source: Checkpoint, plan: Plan, program: Program, weights: Weights) -> PreTrainedModel:
    """Build the model of the edited config with the weights that the graph reads."""
    config = AutoConfig.for_model(**config_edits(source.config, plan))
    model = auto_class(config).from_config(config, dtype=torch.float32).eval()
    expected = expected_state(naming_of(model), source, plan, program, weights)
    state = {name: tensor for name, (_, tensor) in expected.items()}
    missing = model.load_state_dict(state, strict=False, assign=True).missing_keys
    model.tie_weights()
    tied = set(getattr(model, "all_tied_weights_keys", ()))
    if set(missing) - tied - {name for name, _ in model.named_buffers()}:
        raise KeyError(f"misses {min(set(missing) - tied)}")
    return model
