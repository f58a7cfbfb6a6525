"""Runs all checks on an output directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from collapse.checkpoint import Checkpoint
from collapse.errors import UnsupportedError
from collapse.manifest import load_manifest
from collapse.plan import Plan
from collapse.progress import Stopwatch
from collapse.verdict import Blamed, Check, Verdict
from collapse.verify.job import Settings
from collapse.verify.static import static_checks

if TYPE_CHECKING:
    from collapse.verify.dynamic import Reference

Samples = Sequence[Sequence[int]]
Drawn = Samples | Callable[[Plan], Samples]


def verify(
    output: Path,
    source: Checkpoint | None,
    *,
    samples: Drawn = (),
    program: Reference | None = None,
    plan: Plan | None = None,
    settings: Settings | None = None,
    static_only: bool = False,
    watch: Stopwatch | None = None,
) -> Verdict:
    """Check the directory `output` against `source`.

    Args:
        output: the directory, or the staging folder before it is published.
        source: the checkpoint that was collapsed; without it nothing can be verified, only refuted.
        samples: in-schema sequences of source token ids, or what draws them, given the plan; asked only when needed.
        program: the rewritten program with its weights, or a function that prepares them when they are needed.
        plan: the plan that the output must be of; None trusts the manifest's.
        settings: how much is compared.
        static_only: leave out the checks that run the model.
        watch: counts the models' own forward passes apart.

    Raises:
        CheckpointError: the source cannot be loaded.
    """
    checks = static_checks(output, source, plan)
    failed = any(check.passed is False for check in checks)
    if failed or source is None or static_only:
        return Verdict(checks=checks)
    found = load_manifest(output).plan
    drawn = samples(found) if callable(samples) else samples
    if not any(drawn):
        reason = "the model was not run: there is no sample of the input domain"
        return Verdict(checks=(*checks, Check(name="run", passed=None, detail=reason)))
    from collapse.verify.dynamic import dynamic_checks  # torch is only needed from here on

    ran, example = dynamic_checks(output, source, found, drawn, reference=program, settings=settings, watch=watch)
    return Verdict(checks=(*checks, *ran), counterexample=example)


def with_blame(verdict: Verdict, output: Path, source: Checkpoint | None, samples: Drawn, origin: Reference) -> Verdict:
    """Add to a refuted verdict what is wrong: rewrites, tensors or config edits.

    `origin` is the source's program with its weights, or what prepares them; it is asked only where running the
    output refuted it. What the files alone refute names its file already. A model that cannot be traced blames nothing.
    """
    if verdict.status != "refuted" or source is None or not any(check.name == "samples" for check in verdict.checks):
        return verdict
    if all(check.name.startswith("graph") and check.name != "graph: weights" for check in verdict.failures):
        reason = "only the graph that was rewritten in memory differs; the output from disk says what the source says"
        blamed = Blamed(pass_name="graph", site="rewritten graph", reason=reason)
        return verdict.model_copy(update={"blamed": (blamed,)})
    from collapse.verify.blame import blame

    plan = load_manifest(output).plan
    example = verdict.counterexample
    ids = example["ids"] if example else max(samples(plan) if callable(samples) else samples, key=len)
    try:
        program, weights, *_ = origin() if callable(origin) else origin
    except UnsupportedError:
        return verdict
    try:
        found = blame(output, source, plan, ids, program, weights)
    except Exception as error:  # whatever stops the search for the cause must not hide the refutation
        reason = f"what is wrong could not be found out ({type(error).__name__}: {error})"
        found = (Blamed(pass_name="blame", site="model", reason=reason),)
    return verdict.model_copy(update={"blamed": found})
