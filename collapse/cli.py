"""The command line. Exit codes: 0 done, 1 refuted, 2 bad input or nothing decided."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from collapse.cli_args import CorpusCommand
from collapse.cli_audit import audit
from collapse.cli_check import add_commands
from collapse.cli_influence import influence
from collapse.cli_inspect import flops, graph, report, trace
from collapse.cli_schema import schema_app
from collapse.errors import CollapseError, OutputError, PlanError

if TYPE_CHECKING:
    from collapse.heal.settings import Settings
    from collapse.options import Options
    from collapse.pipeline import Result
    from collapse.progress import Stopwatch
    from collapse.search_path import SearchPath

USAGE_ERROR = typer.BadParameter.__bases__[0]  # typer does not export the class that it raises
INTERRUPTED = 130  # as shells have it: 128 and the number of SIGINT
HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    name="collapse",
    epilog="Exit codes: 0 done, 1 refuted, 2 bad input or nothing decided.",
    no_args_is_help=True,
    context_settings=HELP,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model directory, a .gguf file, or a hub id.")]
Schema = Annotated[str, typer.Option("--schema", "-s", help="A built-in name, a JSON or TOML file, or inline JSON.")]
Corpus = Annotated[
    list[Path] | None, typer.Option("--corpus", metavar="FILES...", help="Your own text, instead of the sample.")
]
Field = Annotated[str | None, typer.Option("--field", help="The field of .jsonl records that holds the text.")]
Stage = Annotated[str, typer.Option("--stage", help="How far a dead module goes: fuse, short-circuit or erase.")]
Layout = Annotated[
    str,
    typer.Option("--layout", help="native: loads in plain transformers; free: blocks may differ, for collapse.load."),
]
Placeholder = Annotated[bool, typer.Option("--placeholder", help="Leave 16 zero bytes under each erased name.")]
Threshold = Annotated[float | None, typer.Option("--threshold", help="Nats; overrides the fitted one of --stage fuse.")]
Passes = Annotated[list[str] | None, typer.Option("--pass", help="Run only this pass; may be repeated.")]
Budgets = Annotated[
    str | None,
    typer.Option("--budget", help="What may be lost, or goes beyond what costs nothing: kl<=0.02, params=-10%."),
]
Heal = Annotated[
    str | None, typer.Option("--heal", metavar="TOKENS", help="Distill what a budget took from, on so much text: 200k.")
]
HealBf16 = Annotated[bool, typer.Option("--heal-bf16", help="Let --heal run both models in bfloat16 while training.")]
Protect = Annotated[
    list[Path] | None, typer.Option("--protect", metavar="FILES...", help="Text that --heal must not make worse.")
]
Cache = Annotated[
    Path | None, typer.Option("--cache", help="Where a search keeps what it measured, to go on after an interruption.")
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Measure all anew, and keep nothing.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the split and of the samples.")]
ShardSize = Annotated[int, typer.Option("--max-shard-size", min=1, help="Bytes of the largest weight file.")]
Sign = Annotated[
    Path | None, typer.Option("--sign", metavar="KEY", help="Sign the manifest with this Ed25519 key (PEM).")
]
Prompts = Annotated[int, typer.Option("--prompts", min=1, help="Greedy continuations to compare.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars, no table.")]


def _version(asked: bool) -> None:
    if asked:
        from collapse.manifest import versions

        typer.echo(f"collapse {versions()['collapse']}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Dead-code elimination for language models: declare the inputs, erase what they cannot reach, prove it."""


@app.command(
    cls=CorpusCommand,
    context_settings=HELP,
    epilog="Examples: collapse export MODEL --schema log -o OUT    collapse export MODEL --plan plan.json -o OUT",
)
def export(
    context: typer.Context,
    model: Model,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to; MODEL-SCHEMA by default.")] = None,
    schema: Schema = "log",
    corpus: Corpus = None,
    field: Field = None,
    stage: Stage = "erase",
    placeholder: Placeholder = False,
    threshold: Threshold = None,
    layout: Layout = "native",
    passes: Passes = None,
    budget: Budgets = None,
    heal: Heal = None,
    heal_bf16: HealBf16 = False,
    protect: Protect = None,
    cache: Cache = None,
    no_cache: NoCache = False,
    plan: Annotated[Path | None, typer.Option("--plan", help="Apply exactly this reviewed plan.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier output of collapse.")] = False,
    max_shard_size: ShardSize = 5 * 10**9,
    prompts: Prompts = 8,
    seed: Seed = 0,
    sign: Sign = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Collapse MODEL for the inputs of a schema: decide, rewrite, erase, verify, report."""
    from collapse.pipeline import export as run
    from collapse.plan import Plan
    from collapse.rewrite.values import load_values
    from collapse.search_path import load_path

    if plan:
        _require_none_given(
            context, "schema", "stage", "placeholder", "threshold", "layout", "passes", "budget", "heal"
        )
    reviewed = Plan.load(plan) if plan else None
    values = load_values(reviewed, plan) if reviewed and plan else None
    searched = load_path(reviewed, plan) if reviewed and plan else None
    options = _options(context, searched)
    watch = _watch(quiet)
    target = output or _default_output(model, schema)
    result = run(model, target, schema, options, plan=reviewed, values=values, force=force, watch=watch)
    _tell(result, watch, as_json, quiet)


@app.command(
    "plan",
    cls=CorpusCommand,
    context_settings=HELP,
    epilog="Example: collapse plan MODEL --schema log --corpus logs/*.log -o plan.json",
)
def make(
    context: typer.Context,
    model: Model,
    schema: Schema = "log",
    corpus: Corpus = None,
    field: Field = None,
    stage: Stage = "erase",
    placeholder: Placeholder = False,
    threshold: Threshold = None,
    layout: Layout = "native",
    passes: Passes = None,
    budget: Budgets = None,
    heal: Heal = None,
    heal_bf16: HealBf16 = False,
    protect: Protect = None,
    cache: Cache = None,
    no_cache: NoCache = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan here, for review.")] = None,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Dry run: what would go, why, and what it saves. Writes nothing but the plan, if asked."""
    from collapse.pipeline import make_plan

    if output and (output.is_dir() or not output.parent.is_dir()):
        reason = "is a directory" if output.is_dir() else "its directory does not exist"
        raise OutputError(f"cannot be written: {reason}", where=str(output), fix="name a file")
    watch = _watch(quiet)
    options = _options(context)
    result = make_plan(model, schema, options, save=output, watch=watch)
    _tell(result, watch, as_json, quiet)


add_commands(app)  # after export and plan, so that help lists the main job first
app.command(
    context_settings=HELP,
    epilog="Example: collapse audit out/ --source model/ --verify-key key.pub.pem --sarif audit.sarif",
)(audit)
app.command(
    cls=CorpusCommand,
    context_settings=HELP,
    epilog="Example: collapse influence MODEL --schema log --corpus logs/*.log --sites sublayers --exact all",
)(influence)
for command in (report, graph, flops, trace):
    app.command(context_settings=HELP)(command)
app.add_typer(schema_app, name="schema")


def _require_none_given(context: typer.Context, *names: str) -> None:
    """Refuse options that a reviewed plan has decided: they would be ignored."""
    options = {one.name: one.opts[0] for one in context.command.params}
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name not in {"DEFAULT", "DEFAULT_MAP"}:
            raise PlanError("a reviewed plan is applied as it is", where=options[name], fix="make a new plan with it")


def _options(context: typer.Context, searched: SearchPath | None = None) -> Options:
    """Return what `export` or `plan` was asked for; what the one of them has not is left at its default.

    Paths are text in a context.
    """
    from collapse.budget import parse_budgets
    from collapse.options import make_options
    from collapse.signing import load_private_key

    given = context.params
    return make_options(
        corpus=tuple(map(Path, given["corpus"] or ())),
        text_field=given["field"],
        stage=given["stage"],
        placeholder=given["placeholder"],
        threshold=given["threshold"],
        layout=given["layout"],
        passes=tuple(given["passes"]) if given["passes"] else None,
        budgets=parse_budgets(given["budget"]) if given["budget"] is not None else None,
        heal=_healing(given["heal"], given["heal_bf16"], given["seed"]),
        protect=tuple(map(Path, given["protect"] or ())),
        seed=given["seed"],
        max_shard_size=given.get("max_shard_size"),
        prompts=given.get("prompts"),
        sign=load_private_key(Path(given["sign"])) if given.get("sign") else None,
        searched=searched,
        cache=_cache(Path(given["cache"]) if given["cache"] else None, given["no_cache"]),
    )


def _healing(tokens: str | None, bf16: bool, seed: int) -> Settings | None:
    from collapse.heal.settings import Settings, parse_tokens

    if tokens is None and bf16:
        raise PlanError("is about a healing, and none is asked for", where="--heal-bf16", fix="add --heal")
    return Settings(tokens=parse_tokens(tokens), seed=seed, bf16=bf16) if tokens is not None else None


def _cache(folder: Path | None, nothing: bool) -> Path | None:
    from collapse.sources import cache_directory

    if nothing and folder:
        raise PlanError("is where to keep what --no-cache says not to keep", where="--cache", fix="leave one out")
    if nothing or folder:
        return folder
    try:
        return cache_directory() / "search"
    except RuntimeError:  # a user without a home, as in many a container: nothing is kept
        return None


def _watch(quiet: bool) -> Stopwatch:
    from collapse.memory import map_large_blocks
    from collapse.progress import Stopwatch

    map_large_blocks()
    return Stopwatch(quiet)


def _default_output(model: str, schema: str) -> Path:
    """Name the output after model and schema, beside where the user stands."""
    kind = Path(schema).stem if not schema.lstrip().startswith("{") else "custom"
    return Path(f"{Path(model).stem if model.endswith('.gguf') else Path(model).name}-{kind}")


def _tell(result: Result, watch: Stopwatch, as_json: bool, quiet: bool) -> None:
    from collapse.canonical import dumps
    from collapse.report.markdown import summary_lines, summary_table
    from collapse.report.path import path_table
    from collapse.report.speed import sentence

    watch.finish()
    for missed in result.report.unmet:
        typer.echo(f"collapse: {missed}", err=True)
    if as_json:
        typer.echo(dumps(result.report.to_json()), nl=False)
    elif not quiet:
        typer.echo(summary_table(result.report))
        for line in summary_lines(result.report.rewrites):
            typer.echo(line)
        for note in result.report.notes:
            typer.echo(note)
        if result.report.search and result.report.search.points:
            typer.echo(path_table(result.report.search))
        if result.report.decode_speed:
            typer.echo(sentence(result.report.decode_speed))
    if result.output and not as_json:
        typer.echo(f"Report: {result.output / 'REPORT.md'}")


def main() -> None:
    """Run the command line; a user's mistake is one line on standard error and exit code 2."""
    try:
        code = app(standalone_mode=False)  # what a command leaves with by `typer.Exit` comes back as a number
    except CollapseError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _interrupted()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except MemoryError:
        _fail("out of memory; close other programs or give a smaller model", OutputError.exit_code)
    except Exception as error:
        _other(error)
    else:
        if code == INTERRUPTED:  # typer makes an exit of it
            _interrupted()
        sys.exit(code if isinstance(code, int) else 0)


def _interrupted() -> None:
    _fail("interrupted; nothing was published, and a search under a budget goes on where it was", INTERRUPTED)


def _other(error: Exception) -> None:
    """Usage errors can show themselves; anything but those and the system's is our bug, and is shown whole."""
    if isinstance(error, USAGE_ERROR):
        error.show()  # type: ignore[attr-defined]
        sys.exit(2)
    if isinstance(error, OSError):
        _fail(f"{error.filename or 'a file'}: {error.strerror or error}", 2)
    raise error


def _fail(message: str, code: int) -> None:
    typer.echo(f"collapse: {message}", err=True)
    sys.exit(code)
