"""Drop whole blocks that the schema's text hardly needs, within a budget.

The layout stays native: a shorter model of the same architecture. Which blocks go is searched on calibration text; what
it costs is bounded on held-out text, which chose nothing. Without a budget the pass does nothing: no block of a trained
model is useless, and only the user can say what a loss is worth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collapse.analysis.block_runs import BlockRuns
from collapse.analysis.flops import Cost, cost
from collapse.analysis.layer_search import BATCH, LayerSearch, Step
from collapse.analysis.layers import Layers, drop_layers, layer_lists
from collapse.budget import Budget
from collapse.canonical import digest
from collapse.certify.certificate import Certificate, learn_then_test
from collapse.certify.losses import SequenceLoss, sequence_loss
from collapse.certify.metrics import Design
from collapse.passes.base import Context, Proposal
from collapse.plan import DropLayers, Evidence, Plan, Skipped
from collapse.rewrite.graph import rewrite_program
from collapse.sequences import cut, encoder, text_bytes

WINDOW = 128  # tokens of a sequence: more of them, not longer ones, make a bound tight
CALIBRATION, HELD_OUT = 32, 128  # sequences
FARTHEST = 0.5  # nats a token: where no KL is given, the search ends here
PENDING = Evidence(grade="measured", claim="is being measured", method="search")
SIZE_OF = {"params": "params", "flops": "prefill_flops", "decode": "weight_bytes_per_decode_token"}


@dataclass(frozen=True)
class LayersPass:
    """The pass; see `propose_layers`."""

    name: str = "layers"

    def propose(self, context: Context) -> Proposal:
        """Propose dropping blocks, as many as the budget allows."""
        return propose_layers(context, self.name)


@dataclass(frozen=True)
class _Point:
    """One point of the path as a rewrite, and its sizes relative to the source's."""

    step: Step
    rewrite: DropLayers
    sizes: dict[str, float]

    def reaches(self, budgets: Sequence[Budget]) -> bool:
        return all(self.sizes[one.metric] <= 1 + one.limit for one in budgets)


@dataclass(frozen=True)
class _Task:
    """What the parts of the pass share."""

    name: str
    context: Context
    layers: Layers
    runs: BlockRuns
    held_out: Tensor
    before: Cost

    @property
    def losses(self) -> tuple[Budget, ...]:
        return tuple(one for one in self.context.budgets if one.kind == "loss")

    @property
    def sizes(self) -> tuple[Budget, ...]:
        return tuple(one for one in self.context.budgets if one.kind == "size")

    def skipped(self, reason: str, figures: dict[str, float | int | str] | None = None) -> Proposal:
        one = Skipped(pass_name=self.name, site=self.layers.site, reason=reason, figures=figures or {})
        return Proposal(skipped=(one,))


def propose_layers(context: Context, name: str) -> Proposal:
    """Search a path of ever shorter models, and take the last point that the budget allows.

    A budget of losses is met where the bounds on held-out text are within it (*certified*), or not at all. A budget of
    sizes alone is met by the first point that is small enough, and what that loses is *measured*.
    """
    if not context.budgets:
        return Proposal()
    found = layer_lists(context.program, context.checkpoint, context.config)
    lists = [one for one in found if isinstance(one, Layers)]
    if len(lists) != 1:
        return Proposal(skipped=tuple(one for one in found if isinstance(one, Skipped)) or (_several(name, lists),))
    calibration, held_out = (_windows(context, *part) for part in _parts(context))
    if not len(calibration) or not len(held_out):
        reason = f"there is no text of {WINDOW} tokens in both parts of the corpus"
        return Proposal(skipped=(Skipped(pass_name=name, site=lists[0].site, reason=reason),))
    runs = BlockRuns(context.loaded[0], lists[0].site)
    task = _Task(name, context, lists[0], runs, held_out, _cost(context, None))
    path = _path(task, LayerSearch(runs, calibration))
    return _chosen(task, path) if path else task.skipped("no block can go within the budget")


def _several(name: str, lists: Sequence[Layers]) -> Skipped:
    return Skipped(pass_name=name, site="model", reason=f"has {len(lists)} lists of blocks, not one")


def _parts(context: Context) -> tuple[tuple[Sequence[str], int], tuple[Sequence[str], int]]:
    return (context.texts.calibration, CALIBRATION), (context.texts.held_out, HELD_OUT)


def _windows(context: Context, blocks: Sequence[str], count: int) -> Tensor:
    """Return whole windows of the text, [windows, WINDOW]."""
    found = [ids for ids in cut(blocks, count, encoder(context.checkpoint), WINDOW) if len(ids) == WINDOW]
    return torch.tensor(found, dtype=torch.long).reshape(len(found), WINDOW)


def _path(task: _Task, search: LayerSearch) -> list[_Point]:
    points: list[_Point] = []
    limit = next((one.limit for one in task.losses if one.metric == "kl"), FARTHEST if task.losses else None)

    def progress(done: int, total: int) -> None:
        task.context.progress("searching blocks", done, total)

    rewrites: dict[tuple[int, ...], DropLayers] = {}

    def allowed(dropped: tuple[int, ...]) -> bool:
        kept = [block for block in range(task.layers.size) if block not in dropped]
        found = drop_layers(task.layers, kept, task.context.checkpoint, task.context.config, PENDING, task.name)
        if isinstance(found, DropLayers):
            rewrites[dropped] = found
        return isinstance(found, DropLayers)

    for step in search.steps(task.layers.size, allowed, progress):
        if limit is not None and step.kl > limit:
            break
        points.append(_Point(step, rewrites[step.dropped], _sizes(task, rewrites[step.dropped])))
        if task.sizes and points[-1].reaches(task.sizes):
            break
    return points


def _sizes(task: _Task, rewrite: DropLayers) -> dict[str, float]:
    """Return what remains of every size, as a share of the source's."""
    after = _cost(task.context, rewrite)
    return {name: getattr(after, field) / getattr(task.before, field) for name, field in SIZE_OF.items()}


def _cost(context: Context, rewrite: DropLayers | None) -> Cost:
    program = context.program
    if rewrite is not None:
        plan = Plan(
            source="", model_type=context.checkpoint.model_type, input_schema={}, schema_digest="", rewrites=(rewrite,)
        )
        program = rewrite_program(program, plan, context.checkpoint.config)
    return cost(program, prompt=context.schema.workload.prompt, element_bytes=4)


def _chosen(task: _Task, path: Sequence[_Point]) -> Proposal:
    if not task.losses:
        last = path[-1]
        if not last.reaches(task.sizes):
            return task.skipped("dropping blocks alone does not get that small", _figures(last))
        return Proposal((_with(last, _measured(task, last)),))
    certificates = _certificates(task, path)
    met = [point for point, one in zip(path, certificates, strict=False) if one.met]
    if not met:
        first = {**certificates[0].to_evidence().figures, **_figures(path[0])}
        return task.skipped("the bound on held-out text breaks the budget with one block gone already", first)
    taken = met[-1]
    short = "the bound on held-out text breaks the budget before the sizes are reached"
    missed = () if taken.reaches(task.sizes) else task.skipped(short, _figures(path[-1])).skipped
    return Proposal((_with(taken, certificates[len(met) - 1].to_evidence()),), missed)


def _certificates(task: _Task, path: Sequence[_Point]) -> tuple[Certificate, ...]:
    design = Design(split=digest(task.held_out.tolist()), length=WINDOW - 1)
    return learn_then_test((list(_losses(task, point)) for point in path), task.losses, design)


def _losses(task: _Task, point: _Point) -> Iterator[SequenceLoss]:
    """Yield what every held-out sequence loses."""
    size = text_bytes(task.context.checkpoint)
    batches = torch.split(task.held_out, BATCH)
    for number, ids in enumerate(batches):
        source, found = (task.runs.run(ids, dropped).logits for dropped in ((), point.step.dropped))
        for row, reference, logits in zip(ids, source, found, strict=True):
            targets = row[1:]
            yield sequence_loss(reference[:-1], logits[:-1], targets, text_bytes=size(targets.tolist()))
        task.context.progress(f"held-out text without {len(point.step.dropped)}", number + 1, len(batches))


def _measured(task: _Task, point: _Point) -> Evidence:
    losses = list(_losses(task, point))
    tokens = sum(one.tokens for one in losses)
    kl = sum(one.kl for one in losses) / tokens
    regret = sum(one.nll - one.source_nll for one in losses) / sum(one.source_nll for one in losses)
    flips = sum(one.flips for one in losses) / tokens
    confident = sum(one.confident_flips for one in losses) / max(1, sum(one.confident for one in losses))
    count = len(point.step.dropped)
    blocks = "one block" if count == 1 else f"{count} blocks"
    return Evidence(
        grade="measured",
        claim=f"without {blocks} the mean KL divergence on held-out text is {kl:.4f} nats a token",
        method="greedy search by measured KL on calibration text; losses measured on held-out text, with no bound",
        figures={"kl": kl, "regret": regret, "flips": flips, "confident_flips": confident, "tokens": tokens},
    )


def _with(point: _Point, evidence: Evidence) -> DropLayers:
    figures = {**evidence.figures, **_figures(point)}
    return point.rewrite.model_copy(update={"evidence": evidence.model_copy(update={"figures": figures})})


def _figures(point: _Point) -> dict[str, float | int | str]:
    sizes = {f"{name}_share": round(share, 6) for name, share in point.sizes.items()}
    return {"dropped": len(point.step.dropped), "calibration_kl": point.step.kl, **sizes}
