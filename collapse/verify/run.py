"""Runs all checks on an output directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from collapse.checkpoint import Checkpoint
from collapse.manifest import load_manifest
from collapse.plan import Plan
from collapse.verdict import Check, Verdict
from collapse.verify.job import Settings
from collapse.verify.static import static_checks

if TYPE_CHECKING:
    from collapse.verify.dynamic import Reference


def verify(
    output: Path,
    source: Checkpoint | None,
    *,
    samples: Sequence[Sequence[int]] = (),
    program: Reference | None = None,
    plan: Plan | None = None,
    settings: Settings | None = None,
    static_only: bool = False,
) -> Verdict:
    """Check the directory `output` against `source`.

    Args:
        output: the directory, or the staging folder before it is published.
        source: the checkpoint that was collapsed; without it nothing can be verified, only refuted.
        samples: in-schema sequences of source token ids.
        program: the rewritten program with its weights, or a function that prepares them when they are needed.
        plan: the plan that the output must be of; None trusts the manifest's.
        settings: how much is compared.
        static_only: leave out the checks that run the model.

    Raises:
        CheckpointError: the source cannot be loaded.
    """
    checks = static_checks(output, source, plan)
    failed = any(check.passed is False for check in checks)
    if failed or source is None or static_only:
        return Verdict(checks=checks)
    if not any(samples):
        reason = "the model was not run: there is no sample of the input domain"
        return Verdict(checks=(*checks, Check(name="run", passed=None, detail=reason)))
    from collapse.verify.dynamic import dynamic_checks  # torch is only needed from here on

    ran, example = dynamic_checks(
        output, source, load_manifest(output).plan, samples, reference=program, settings=settings
    )
    return Verdict(checks=(*checks, *ran), counterexample=example)
