"""Heals the model of a decided plan, and puts what was trained into the plan, with what is known of the result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collapse.analysis.layer_search import BATCH
from collapse.analysis.layers import layer_lists
from collapse.canonical import digest
from collapse.certify.certificate import certify
from collapse.certify.losses import SequenceLoss, sequence_loss
from collapse.certify.metrics import Design
from collapse.dtypes import FLOATS
from collapse.errors import UnsupportedError
from collapse.fingerprint import data_digest
from collapse.heal.pair import Pair, run
from collapse.heal.settings import Settings
from collapse.heal.texts import encoder_of, starts, windows
from collapse.heal.touched import Names, blocks_by_number, costly_rewrites, touched, trainable
from collapse.heal.train import MOST_CHECKED, Figures, Healed, heal
from collapse.naming import naming_of
from collapse.passes.base import Context
from collapse.passes.shrink_task import HELD_OUT, WINDOW, judging
from collapse.plan import AddBias, Evidence, Plan, Replace, Rewrite, Skipped, StandIn
from collapse.rewrite.free import added_tensors
from collapse.rewrite.model import collapsed_model
from collapse.rewrite.origin import origins
from collapse.rewrite.tensors import token_narrow
from collapse.rewrite.values import Values
from collapse.search.surgery import copy_sharing
from collapse.sequences import longest_allowed, text_bytes
from collapse.verify.computed import exact_part

NAME, DEAD = "heal", "dead-module"


@dataclass(frozen=True)
class Healing:
    """The plan with the trained tensors, whose data `values` has by the source's names, or by those of added ones.

    Where none are trained the plan is as it was, but for a note.
    """

    plan: Plan
    values: Mapping[str, Tensor] = field(default_factory=dict)


def heal_plan(context: Context, plan: Plan, values: Values | None, settings: Settings) -> Healing:
    """Distill the model that `plan` makes from the source, and return the plan with the result.

    The source is what the exact rewrites leave of it: where the vocabulary is cut, its distribution over the kept ids.
    Nothing is trained where no rewrite makes another function. `values` has the data of tensors that passes replaced.

    Raises `UnsupportedError` where the schema has no text, or too little of it.
    """
    if not costly_rewrites(plan):
        return _left(plan, "nothing was removed at a cost, so there is nothing to make good")
    task = _task(context, plan, values, settings)
    if not task.pair.touched:
        return _left(plan, "no tensor that the plan touched can have computed values")
    unhealed = copy_sharing(task.pair.student)
    healed = heal(task.pair, task.windows, task.protected, task.settings, task.progress)
    if not healed.weights:
        return _left(
            plan, "the divergence on text that was not trained on did not fall, so weights stay", healed.figures
        )
    data = _stored(task, healed)
    evidence = _evidence(task, *_losses(task, unhealed), healed.figures)
    return Healing(_with(plan, data, evidence), data)


def _left(plan: Plan, reason: str, figures: Figures | None = None) -> Healing:
    one = Skipped(pass_name=NAME, site="model", reason=reason, figures=figures or {})
    return Healing(plan.model_copy(update={"skipped": (*plan.skipped, one)}))


@dataclass(frozen=True)
class _Task:
    """What the parts of a healing share; `names` are those of the student's tensors, as of `origins`."""

    context: Context
    plan: Plan
    pair: Pair
    names: Names
    settings: Settings
    windows: Tensor
    protected: Tensor
    held_out: Tensor

    def progress(self, done: int, total: int) -> None:
        self.context.progress("healing", done, total)


def _task(context: Context, plan: Plan, values: Values | None, settings: Settings) -> _Task:
    checkpoint = context.checkpoint
    encode = encoder_of(checkpoint, plan)
    longest = longest_allowed(checkpoint.config, context.schema) or settings.length
    settings = replace(settings, length=min(settings.length, longest))
    length, count = settings.length, settings.steps * settings.rows
    more = windows(context.related, encode, length, (count + MOST_CHECKED) // 2)
    own = windows(context.texts.calibration, encode, length, count + MOST_CHECKED - len(more))
    drawn = torch.cat([enough(own, "--heal"), more])
    held_out = judging(context, enough(starts(context.texts.held_out, encode, min(WINDOW, length), HELD_OUT), "--heal"))
    protected = windows(context.protected, encode, length, settings.steps + MOST_CHECKED)
    if context.protected:
        enough(protected, "--protect")
    pair, names = _models(context, plan, values, settings)
    return _Task(context, plan, pair, names, settings, drawn, protected, held_out)


def enough(found: Tensor, option: str) -> Tensor:
    """Return the windows if there are two or more: some train, others decide; raises `UnsupportedError` otherwise."""
    if len(found) < 2:
        reason = f"the text is less than two windows of {found.shape[1]} tokens"
        raise UnsupportedError(reason, where=option, fix="give more of it")
    return found


def _models(context: Context, plan: Plan, values: Values | None, settings: Settings) -> tuple[Pair, Names]:
    checkpoint, program, exact = context.checkpoint, context.program, exact_part(plan)
    weights = _weights(context)
    source = collapsed_model(checkpoint, program, exact, weights)
    student = collapsed_model(checkpoint, program, plan, weights, values)
    theirs, ours = (
        origins(naming_of(one), checkpoint, made, program) for one, made in ((source, exact), (student, plan))
    )
    chosen = (touched if settings.scope == "touched" else trainable)(checkpoint, program, plan)
    parameters = {name for name, _ in student.named_parameters(remove_duplicate=False)}
    trained = frozenset(name for name, (origin, _) in ours.items() if origin in chosen and name in parameters)
    return Pair(source, student, trained, _blocks(context, theirs, ours)), ours


def _weights(context: Context) -> dict[str, Tensor]:
    """Return the source's parameters and buffers by their state-dict names."""
    model, _ = context.loaded
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def _blocks(context: Context, theirs: Names, ours: Names) -> tuple[tuple[str, str], ...]:
    """Return the blocks of both models, where there is one list of them; else only logits are compared."""
    sites = [one.site for one in layer_lists(context.program, context.checkpoint, context.config)]
    if len(sites) != 1:
        return ()
    source, student = (blocks_by_number(names, sites[0]) for names in (theirs, ours))
    return tuple((source[number], path) for number, path in sorted(student.items()) if number in source)


def _stored(task: _Task, healed: Healed) -> dict[str, Tensor]:
    """Round the trained tensors to the dtype of the files, in the student too; return them by the names of values."""
    added, files = added_tensors(task.plan), task.context.checkpoint.tensors
    parameters = dict(task.pair.student.named_parameters(remove_duplicate=False))
    trained = {id(parameters[name]) for name in healed.weights}
    found: dict[str, Tensor] = {}
    for name, (origin, _) in task.names.items():
        parameter = parameters.get(name)
        if parameter is None or id(parameter) not in trained:
            continue
        dtype = added[origin].dtype if origin in added else files[origin].dtype
        found[origin] = parameter.detach().to("cpu", FLOATS[dtype])
        parameter.data.copy_(found[origin])
    return found


@torch.no_grad()
def _losses(task: _Task, unhealed: PreTrainedModel) -> tuple[list[SequenceLoss], list[SequenceLoss]]:
    """Return what the unhealed model and the student lose on every held-out window.

    Both beside the source with all of its ids, which is run once for the two: what a cut of the vocabulary costs is in.
    """
    narrow = token_narrow(task.plan)
    kept, size = list(narrow.kept) if narrow else None, text_bytes(task.context.checkpoint)
    device = task.pair.student.device
    whole, models = _uncut(task).to(device), (unhealed.to(device), task.pair.student)
    found: tuple[list[SequenceLoss], list[SequenceLoss]] = ([], [])
    for done, batch in enumerate(torch.split(task.held_out, BATCH), 1):
        told = batch if kept is None else torch.tensor(kept)[batch]
        source = run(whole, told.to(device)).logits[:, :-1]
        others = [run(model, batch.to(device)).logits[:, :-1] for model in models]
        for row, ids in enumerate(told[:, 1:]):
            told_bytes = size(ids.tolist())
            for logits, losses in zip(others, found, strict=True):
                losses.append(sequence_loss(source[row], logits[row], ids, text_bytes=told_bytes, kept=kept))
        task.context.progress("judging on held-out text", done, -(-len(task.held_out) // BATCH))
    return found


def _uncut(task: _Task) -> PreTrainedModel:
    """Return what the exact rewrites leave of the source, but with its whole vocabulary."""
    narrow, exact = token_narrow(task.plan), exact_part(task.plan)
    if narrow is None:
        return task.pair.source
    rest = tuple(one for one in exact.rewrites if one is not narrow)
    plan = exact.model_copy(update={"rewrites": rest})
    return collapsed_model(task.context.checkpoint, task.context.program, plan, _weights(task.context))


def _evidence(task: _Task, before: Sequence[SequenceLoss], after: Sequence[SequenceLoss], figures: Figures) -> Evidence:
    """Return what is known of the healed model as a whole: a certificate for budgets of losses, else measures."""
    settings = task.settings
    how = "distillation from the source on text that judges nothing, "
    how += f"{figures['tokens']} tokens in {figures['steps']} steps"
    how += " in bfloat16" if settings.bf16 else ""
    measured = {"held_out_kl_before": _kl(before), "held_out_kl": _kl(after)}
    settled: Figures = {"scope": settings.scope, "rate": settings.rate, "hidden": settings.hidden}
    budgets = [one for one in task.context.budgets if one.kind == "loss"]
    if budgets:
        design = Design(split=digest(task.held_out.tolist()), length=task.held_out.shape[1] - 1)
        found = certify(after, budgets, design, tries=_tries(task.plan)).to_evidence()
        claim, grade, method = f"healed, the model loses {found.claim}", found.grade, f"{how}; {found.method}"
        settled |= found.figures
    else:
        fall = f"{measured['held_out_kl_before']:.4f} before, {measured['held_out_kl']:.4f} after"
        claim = f"healing changed the mean KL divergence on held-out text from {fall}, nats a token"
        grade, method = "measured", f"{how}; losses measured on held-out text, with no bound"
        settled["held_out_tokens"] = sum(one.tokens for one in after)
    return Evidence(grade=grade, claim=claim, method=method, figures={**settled, **figures, **measured})


def _tries(plan: Plan) -> int:
    """Return by how many delta is divided, since the held-out text may have chosen which plan is healed.

    A search that takes the k-th point of a fixed sequence of tests on it leads to the k-th of many models that could
    have been healed; all its rewrites have one evidence. Each has the share 1 / (k (k + 1)) of delta, which sum up to
    1 over all k. Dead modules are taken together or not at all, by the same text: twice as many.
    """
    dead = 2 if any(one.pass_name == DEAD for one in plan.rewrites) else 1
    ranks = {digest(one.evidence.model_dump()): one.evidence.figures.get("rank", 0) for one in costly_rewrites(plan)}
    return dead * prod(rank * (rank + 1) for rank in ranks.values() if isinstance(rank, int) and rank)


def _kl(losses: Iterable[SequenceLoss]) -> float:
    found = list(losses)
    return sum(one.kl for one in found) / sum(one.tokens for one in found)


def _with(plan: Plan, data: Mapping[str, Tensor], evidence: Evidence) -> Plan:
    """Put the trained tensors into the plan, in place of what passes computed for the same ones.

    What is added, such as a map in place of a module, stays where it is in the plan. Its data are those of the healing
    then, and so is its evidence.
    """
    digests = {name: data_digest(tensor) for name, tensor in data.items()}
    rest: list[Rewrite] = []
    config: dict[str, object] = {}
    for rewrite in plan.rewrites:
        if isinstance(rewrite, StandIn | AddBias):
            rest.append(_with_added(rewrite, digests, evidence))
        elif not isinstance(rewrite, Replace):
            rest.append(rewrite)
        elif left := {name: found for name, found in rewrite.tensors.items() if name not in data}:
            rest.append(rewrite.model_copy(update={"tensors": left}))
        else:
            config |= rewrite.config
    added = added_tensors(plan)
    replaced = {name: found for name, found in digests.items() if name not in added}
    if replaced:
        rest.append(Replace(pass_name=NAME, site="model", evidence=evidence, tensors=replaced, config=config))
    return plan.model_copy(update={"rewrites": tuple(rest)})


def _with_added(rewrite: StandIn | AddBias, digests: Mapping[str, str], evidence: Evidence) -> Rewrite:
    """Return the rewrite with the digests of what was trained of it, if anything was."""
    new = {part: digests.get(f"{rewrite.prefix}{part}", tensor.sha256) for part, tensor in rewrite.added.items()}
    added = {part: tensor.model_copy(update={"sha256": new[part]}) for part, tensor in rewrite.added.items()}
    return rewrite.model_copy(update={"added": added, "evidence": evidence}) if added != rewrite.added else rewrite
