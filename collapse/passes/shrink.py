"""Make the model smaller than any proof allows, within a budget: fewer blocks, KV groups, neurons and sublayers.

In the native layout there is one width for all blocks; in the free one each has its own, or maps for sublayers. What
goes is searched on calibration text, what stays is refitted to the source on it; what it costs is bounded on held-out
text, which chose nothing. Without a budget nothing is done: no part of a trained model is useless, and only the user
can say what a loss is worth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from collapse.analysis.layers import Layers, layer_lists
from collapse.budget import Budget
from collapse.certify.certificate import Certificate, learn_then_test
from collapse.certify.losses import SequenceLoss
from collapse.passes.base import Context, Proposal
from collapse.passes.shrink_evidence import Figures, measurement, path_figures
from collapse.passes.shrink_path import Trail, rounded
from collapse.passes.shrink_places import MAPPING, uniform
from collapse.passes.shrink_task import WINDOW, Task, opened_memory, texts_of
from collapse.plan import Evidence, Skipped
from collapse.search.walk import Point

STEPS = (0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8)  # of the blocks' parameters
FARTHEST = 0.5  # nats a token: where no KL is given, the walk ends here
Sizes = Mapping[str, float]  # what is left of each size, as shares
CLOSER = 4  # how often a size is aimed at a bit lower until the counted one is right


@dataclass(frozen=True)
class Shrink:
    """One of the moves, as a pass; `collapse.passes.together` makes one search of several."""

    name: str

    def propose(self, context: Context) -> Proposal:
        """Propose what this move alone can do within the budget."""
        return Shrinking((self.name,)).propose(context)


@dataclass(frozen=True)
class Shrinking:
    """Several moves, searched together."""

    moves: tuple[str, ...]

    @property
    def name(self) -> str:
        """The names of all moves."""
        return ", ".join(self.moves)

    def propose(self, context: Context) -> Proposal:
        """Walk to ever smaller models, and take the smallest that the budget allows.

        A budget of losses is met where the bounds on held-out text are within it (*certified*), or not at all. A
        budget of sizes alone is met by the first model that is small enough, and what that loses is *measured*.
        """
        if not context.budgets:
            return Proposal()
        found = layer_lists(context.program, context.checkpoint, context.config)
        lists = [one for one in found if isinstance(one, Layers)]
        if len(lists) != 1:
            reasons = tuple(one for one in found if isinstance(one, Skipped))
            return Proposal(skipped=reasons or (self._skipped(f"has {len(lists)} lists of blocks, not one"),))
        if context.layout == "native" and not set(self.moves) - set(MAPPING):
            return Proposal(skipped=uniform(lists[0], self.moves))
        texts = texts_of(context)
        if texts is None:
            reason = f"the corpus has too little text for sequences of {WINDOW} tokens to fit, to choose and to judge"
            return Proposal(skipped=(self._skipped(reason),))
        with opened_memory(context, texts, self.moves) as memory:
            task = Task.of(context, lists[0], self.moves, texts, memory)
            if task.left_alone and not task.movable:
                return Proposal(skipped=task.left_alone)
            trail = Trail(task, self.moves)
            losses = tuple(one for one in context.budgets if one.kind == "loss")
            chosen = self._certified(task, losses, trail) if losses else self._measured(task, trail)
        return replace(chosen, skipped=(*chosen.skipped, *task.left_alone), path=trail.path())

    def _skipped(self, reason: str, figures: Figures | None = None) -> Skipped:
        return Skipped(pass_name=self.moves[0], site="model", reason=reason, figures=figures or {})

    def _measured(self, task: Task, trail: Trail) -> Proposal:
        """Meet budgets of sizes: halfway first where blocks and groups may go, which are chosen in small steps."""
        wanted = {one.metric: 1 + one.limit for one in task.context.budgets}
        aim = wanted if task.walk.in_steps else _aimed(task, wanted)
        for _ in range(CLOSER):
            levels = [_halfway(aim), aim] if task.walk.in_steps else [aim]
            path = list(trail.noted(task.walk.points(levels, task.allowed)))
            if len(path) < len(levels):
                return Proposal(
                    skipped=(self._skipped(f"{self.name} alone cannot make it that small", path_figures(path)),)
                )
            sizes = task.sizes(path[-1].shape)
            trail.counted(len(trail.points) - 1, sizes)
            if all(sizes[metric] <= limit for metric, limit in wanted.items()):
                losses = trail.judged(task.losses(path[-1]))
                trail.taken(len(trail.points) - 1)
                return _taken(task, path, measurement(losses, sizes["params"]), sizes)
            aim = _closer(aim, sizes, wanted)
        return Proposal(
            skipped=(self._skipped(f"{self.name} alone were not found to make it that small", path_figures(path)),)
        )

    def _certified(self, task: Task, losses: Sequence[Budget], trail: Trail) -> Proposal:
        """Meet budgets of losses: go on while the bounds hold, and where sizes are asked for too, until they are."""
        wanted = {one.metric: 1 + one.limit for one in task.context.budgets if one.kind == "size"}
        path: list[Point] = []
        tests = learn_then_test(_walked(task, losses, wanted, path, trail), losses, task.design)
        trail.tested(tests)
        met = [one for one in tests if one.met]
        if not met:
            figures = {**tests[0].to_evidence().figures, **path_figures(path)} if tests else {}
            return Proposal(skipped=(self._skipped(_none_met(tests, trail), figures),))
        taken = path[: len(met)]
        trail.taken(len(met) - 1)
        sizes = task.sizes(taken[-1].shape)
        trail.counted(len(met) - 1, sizes)
        found = _taken(task, taken, _alone(met[-1]), sizes)
        if all(sizes[metric] <= limit for metric, limit in wanted.items()):
            return found
        reason = "the bound on held-out text breaks the budget before the sizes are reached"
        return replace(found, skipped=(self._skipped(reason, path_figures(path)),))


def _alone(certificate: Certificate) -> Evidence:
    """Return a certificate as evidence that says what it is about: other passes of the plan may lose more."""
    evidence = certificate.to_evidence()
    return evidence.model_copy(update={"claim": f"these rewrites alone lose {evidence.claim}"})


def _none_met(tests: Sequence[Certificate], trail: Trail) -> str:
    if tests:
        return "the bound on held-out text breaks the budget with the first step already"
    if trail.points:
        return (
            f"the first step loses {trail.points[0].kl:.4g} nats a token on the text that chose, too much to be judged"
        )
    return "no native shape is smaller" if trail.task.context.layout == "native" else "no shape is smaller"


def _aimed(task: Task, wanted: Sizes) -> Sizes:
    """Return a level whose shape counts as small as is wanted, or the last one tried; it is fitting that costs."""
    aim = wanted
    for _ in range(CLOSER):
        shape = task.walk.shape(aim)
        if shape is None or not task.allowed(shape):
            break
        sizes = task.sizes(shape)
        if all(sizes[metric] <= limit for metric, limit in wanted.items()):
            break
        aim = _closer(aim, sizes, wanted)
    return aim


def _closer(aim: Sizes, sizes: Sizes, wanted: Sizes) -> Sizes:
    """Aim lower by what was counted too much."""
    return {metric: aim[metric] - max(0.0, sizes[metric] - limit) for metric, limit in wanted.items()}


def _halfway(level: Mapping[str, float]) -> dict[str, float]:
    return {metric: (1 + share) / 2 for metric, share in level.items()}


def _walked(
    task: Task, losses: Sequence[Budget], wanted: Mapping[str, float], path: list[Point], trail: Trail
) -> Iterator[list[SequenceLoss]]:
    """Walk on while it is asked for, and yield the held-out losses of each point, which is put on the path."""
    limit = next((one.limit for one in losses if one.metric == "kl"), FARTHEST)
    levels = [task.level(step) for step in STEPS]
    if wanted:
        levels = [level for level in levels if any(level["params"] > share for share in wanted.values())]
        levels.append(dict(wanted))
    for point in trail.noted(task.walk.points(levels, task.allowed)):
        if point.kl > limit:
            return
        path.append(point)
        yield trail.judged(task.losses(point))


def _taken(task: Task, path: Sequence[Point], evidence: Evidence, sizes: Mapping[str, float]) -> Proposal:
    """Return the last point of the path as a proposal."""
    shares = {f"{metric}_share": share for metric, share in rounded(sizes).items()}
    figures = {**evidence.figures, **path_figures(path), **shares}
    return task.rewrites(path[-1], evidence.model_copy(update={"figures": figures}))
