"""`collapse verify` and `collapse probe`: checks of an output, for people and for CI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from collapse.canonical import dumps
from collapse.checkpoint import Checkpoint
from collapse.cli_args import CorpusCommand
from collapse.errors import CheckpointError, CollapseError, SchemaError
from collapse.manifest import MANIFEST
from collapse.plan import Plan
from collapse.probe import Probe
from collapse.probe import probe as run_probe
from collapse.replace import replace_file
from collapse.verdict import Check, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from collapse.program import Program
    from collapse.progress import Stopwatch

HELP = {"help_option_names": ["-h", "--help"]}
MARKS = {True: "ok  ", False: "FAIL", None: "--  "}

Out = Annotated[Path, typer.Argument(metavar="OUT", help="The directory that collapse wrote.")]
Source = Annotated[str | None, typer.Option("--source", metavar="MODEL", help="The model that was collapsed.")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="The reviewed plan that OUT must be of.")]
Quick = Annotated[bool, typer.Option("--quick", help="Check the files only, do not run the model.")]
Corpus = Annotated[
    list[Path] | None, typer.Option("--corpus", metavar="FILES...", help="Text to run, instead of the built-in sample.")
]
Field = Annotated[str | None, typer.Option("--field", help="The field of .jsonl records that holds the text.")]
Ids = Annotated[
    Path | None, typer.Option("--ids", metavar="FILE", help="JSON list of token id lists of the source to run.")
]
Prompts = Annotated[int, typer.Option("--prompts", min=1, help="Samples to run and to continue greedily.")]
New = Annotated[int, typer.Option("--new", min=1, help="Tokens of each greedy continuation.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars, no table.")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a model, collapsed or not.")]
Pattern = Annotated[str, typer.Option("--site", metavar="PATTERN", help="Glob on module paths or tensor names.")]
Prometheus = Annotated[
    Path | None, typer.Option("--prometheus", metavar="FILE", help="Write metrics here too, for a textfile collector.")
]


def verify(
    out: Out,
    source: Source = None,
    plan: PlanFile = None,
    quick: Quick = False,
    corpus: Corpus = None,
    field: Field = None,
    ids: Ids = None,
    prompts: Prompts = 8,
    new: New = 16,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check a collapsed model against its source: the files byte for byte, then the model by running it.

    Exit code 0: verified. 1: refuted, and the failed checks say where. 2: some check could not be run, or the
    input is wrong.
    """
    from collapse.progress import Stopwatch
    from collapse.sources import resolve
    from collapse.verify import Settings, with_blame
    from collapse.verify import verify as run_verify

    def origin() -> tuple[Program, dict[str, Tensor]]:
        assert checkpoint is not None
        return _origin(checkpoint, watch)

    def samples(found: Plan) -> list[list[int]]:
        assert checkpoint is not None
        return _read_ids(ids) if ids else _draw(checkpoint, found, corpus or [], field, prompts)

    if not (out / MANIFEST).is_file():  # nothing was claimed, so there is nothing to refute
        raise CheckpointError(f"has no {MANIFEST}", where=str(out), fix="give a directory that collapse wrote")
    watch = Stopwatch(quiet)
    with watch.stage("open model"):
        checkpoint = resolve(source) if source else None
    with watch.stage("verify"):
        verdict = run_verify(
            out,
            checkpoint,
            samples=samples,
            plan=Plan.load(plan) if plan else None,
            settings=Settings(prompts=prompts, new_tokens=new),
            static_only=quick,
            watch=watch,
        )
        verdict = with_blame(verdict, out, checkpoint, samples, origin)
    watch.finish()
    _show(verdict, quick, as_json, quiet)
    raise typer.Exit(verdict.exit_code)


def _show(verdict: Verdict, quick: bool, as_json: bool, quiet: bool) -> None:
    if as_json:
        typer.echo(dumps({"status": verdict.status, **verdict.model_dump(mode="json")}), nl=False)
    elif not quiet:
        typer.echo(_table(verdict, quick))


def probe(folder: Folder, site: Pattern, prometheus: Prometheus = None) -> None:
    """Say from the files alone whether the weights of a site are gone, as JSON.

    Exit code 0: ERASED. 1: ZEROED or ACTIVE. 2: the pattern matches nothing, or DIR is no model.
    """
    try:
        found = run_probe(folder, site)
    except (CollapseError, OSError):
        _export_metrics(None, folder, site, prometheus)
        raise
    _export_metrics(found, folder, site, prometheus)
    typer.echo(dumps(found.model_dump(mode="json")), nl=False)
    raise typer.Exit(0 if found.status == "ERASED" else 1)


def _export_metrics(found: Probe | None, folder: Path, site: str, path: Path | None) -> None:
    if path is not None:
        from collapse.report.prometheus import to_prometheus

        metrics = to_prometheus(found, model=folder.resolve().name, site=site)
        replace_file(path, metrics.encode())


def add_commands(app: typer.Typer) -> None:
    """Add `verify` and `probe` to `app`."""
    app.command(
        cls=CorpusCommand,
        context_settings=HELP,
        epilog="Examples: collapse verify out/ --source model/    collapse verify out/ --source model/ --quick --json",
    )(verify)
    app.command(context_settings=HELP, epilog="Example: collapse probe out/ --site '*.position_adaptive_bias*'")(probe)


def _draw(checkpoint: Checkpoint, plan: Plan, corpus: list[Path], field: str | None, count: int) -> list[list[int]]:
    from collapse.verify.samples import draw_samples

    return draw_samples(checkpoint, plan, corpus=corpus, text_field=field, count=count)


def _origin(checkpoint: Checkpoint, watch: Stopwatch) -> tuple[Program, dict[str, Tensor]]:
    """Trace the source and load its weights, to name what is wrong with a refuted output."""
    from collapse.analysis.ties import config_as_loaded
    from collapse.source_model import source_weights
    from collapse.trace import trace

    return trace(config_as_loaded(checkpoint)), source_weights(checkpoint, watch)


def _read_ids(path: Path) -> list[list[int]]:
    fix = "give a JSON list of lists of token ids"
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SchemaError(f"cannot be read ({error})", where=str(path), fix=fix) from None
    rows = value if isinstance(value, list) else []
    if not rows or not all(isinstance(row, list) and row and all(type(i) is int for i in row) for row in rows):
        raise SchemaError("holds no samples", where=str(path), fix=fix)
    return rows


def _table(verdict: Verdict, quick: bool) -> str:
    def line(check: Check) -> str:
        return f"{MARKS[check.passed]}  {check.name:<24}{check.detail}"

    scope = " (files only; the model was not run)" if quick and verdict.status == "verified" else ""
    blamed = [f"      {found.site} ({found.pass_name}): {found.reason}" for found in verdict.blamed]
    return "\n".join([*map(line, verdict.checks), *blamed, f"{verdict.status}{scope}"])
