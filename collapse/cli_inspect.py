"""Commands that look at a model and change nothing: flops, trace, graph, report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from collapse.canonical import dumps
from collapse.errors import CollapseError, OutputError
from collapse.report.text import FIGURES, exact, short

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})

Model = Annotated[str, typer.Argument(help="Model directory; config.json is enough.", show_default=False)]
Prompt = Annotated[int, typer.Option("--prompt", min=1, help="Tokens of the prompt.")]
New = Annotated[int, typer.Option("--new", min=1, help="Tokens to generate.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


@contextlib.contextmanager
def _waiting(what: str) -> Iterator[None]:
    """Show on stderr, where that is a terminal, that work is going on."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(what) if console.is_terminal else contextlib.nullcontext():
        yield


def _count(model: str, prompt: int) -> Any:
    from collapse.analysis.config_cost import config_only, cost_of_config

    config = config_only(model)
    with _waiting("tracing"):
        return cost_of_config(config, prompt=prompt)


def flops_data(model: str, *, prompt: int = 512, new: int = 128, thop: bool = False) -> dict[str, Any]:
    """Return the figures of a model given by its config, of each module too, and of a whole request.

    `request_flops` is one prefill and `new - 1` decode steps, each a token further on; executed. With `thop` its
    count of the prefill stands beside ours, head at every position, with what it does not see.
    """
    found = _count(model, prompt)
    cost = found.cost
    opinion = {"thop": _second_opinion(model, found, prompt)} if thop else {}
    return {
        **cost.figures(),
        "prompt": prompt,
        "new": new,
        "request_flops": _request(found, prompt, new),
        "method": found.method,
        "modules": {path: part.figures() for path, part in cost.modules.items()},
        **opinion,
    }


def _second_opinion(model: str, found: Any, prompt: int) -> dict[str, Any]:
    from collapse.analysis.config_cost import config_only
    from collapse.analysis.flops import matrix_work
    from collapse.analysis.second_opinion import second_opinion
    from collapse.analysis.sizes import Call
    from collapse.trace import meta_model

    work = matrix_work(found.prefill, Call(1, prompt, 0))
    opinion = second_opinion(meta_model(config_only(model)), work, prompt=prompt)
    return {"flops": 2 * opinion.macs, "ours": opinion.flops, "coverage": opinion.coverage, "gaps": dict(opinion.gaps)}


def _request(found: Any, prompt: int, new: int) -> int:
    """Prefill gives the first new token; the step after it attends to one token more than the prompt has."""
    from collapse.analysis.flops import Work, matrix_work
    from collapse.analysis.sizes import Call, traced_call

    first = found.cost.decode_flops_per_token
    shares = traced_call(found.decode) not in {Call(1, 1, prompt - 1), Call(1, 1, 0)}
    steps: tuple[Work, ...] = matrix_work(found.decode, Call(1, 1, prompt)) if shares else ()
    growth = sum(work.flops for work in steps) - first if shares else 0
    return int(found.cost.prefill_flops + sum(first + growth * step for step in range(1, new)))


@app.command()
def flops(
    model: Model,
    prompt: Prompt = 512,
    new: New = 128,
    thop: Annotated[bool, typer.Option("--thop", help="Count with thop too, and name what it does not see.")] = False,
    as_json: AsJson = False,
) -> None:
    """Count FLOPs and bytes from the traced graph, without weights.

    Example: collapse flops ./SmolLM2-135M --prompt 512 --new 128
    """
    data = flops_data(model, prompt=prompt, new=new, thop=thop)
    if as_json:
        typer.echo(dumps(data), nl=False)
        return
    for name, words in FIGURES.items():
        typer.echo(f"{words:36} {exact(data[name]):>24}  {short(data[name])}")
    typer.echo(
        f"{f'FLOPs of {prompt} + {new} tokens':36} {exact(data['request_flops']):>24}  {short(data['request_flops'])}"
    )
    if thop:
        second = data["thop"]
        typer.echo(
            f"\nthop, the same prefill with the head at every position: {short(second['flops'])} of "
            f"{short(second['ours'])} FLOPs ({second['coverage']:.1%}). It does not see:"
        )
        for what, missed in second["gaps"].items():
            typer.echo(f"{what:60} {short(missed)}")


@app.command()
def trace(model: Model, prompt: Prompt = 512, as_json: AsJson = False) -> None:
    """Show modules, parameters and FLOPs; equal consecutive layers take one line.

    Example: collapse trace ./SmolLM2-135M
    """
    found = _count(model, prompt)
    from collapse.report.data import Figures, modules_of

    modules = modules_of(found.cost, found.cost, found.prefill)
    if as_json:
        rows = [
            {"path": item.path, "type": item.type, "count": item.count, **item.before.model_dump()} for item in modules
        ]
        typer.echo(dumps({"prompt": prompt, **Figures.of(found.cost).model_dump(), "modules": rows}), nl=False)
        return
    from rich.console import Console

    Console().print(_table(found.cost, modules, prompt))


def _table(cost: Any, modules: Any, prompt: int) -> Any:
    from rich.table import Table

    table = Table(caption=f"prefill of {prompt} tokens, executed; figures are of one module with its children")
    table.add_column("module", no_wrap=True)
    table.add_column("class")
    for title in ("times", "params", "prefill FLOPs", "decode FLOPs"):
        table.add_column(title, justify="right")
    for item in modules:
        around = [other.path for other in modules if item.path.startswith(f"{other.path}.")]
        own = item.path.removeprefix(f"{max(around, key=len)}.") if around else item.path
        table.add_row("  " * len(around) + own, item.type, str(item.count), *map(short, _shown(item.before)))
    table.add_section()
    table.add_row("whole model", "", "1", *map(short, _shown(cost)))
    return table


def _shown(figures: Any) -> tuple[int, int, int]:
    return figures.params, figures.prefill_flops, figures.decode_flops_per_token


@app.command()
def graph(
    model: Annotated[str, typer.Argument(help="Model or output directory.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write, .svg or .png.")] = Path("graph.svg"),
    module: Annotated[str | None, typer.Option("--module", help="Draw this module node by node.")] = None,
    prompt: Prompt = 512,
) -> None:
    """Draw a model; of an output directory both sides, before and after.

    Example: collapse graph ./SmolLM2-135M --module model.layers.0.self_attn -o attention.svg
    """
    from collapse.report.render import render

    kind = output.suffix.removeprefix(".")
    if kind not in {"svg", "png"}:
        raise OutputError(
            f"cannot draw {output.suffix or 'a file without a suffix'}", where=str(output), fix="use .svg or .png"
        )
    picture = render(_picture(model, module, prompt), kind)
    try:
        output.write_bytes(picture)
    except OSError as error:
        raise OutputError(f"cannot be written ({error.strerror})", where=str(output)) from None
    typer.echo(str(output))


def _picture(model: str, module: str | None, prompt: int) -> Any:
    from collapse.report.data import Figures, Report, modules_of
    from collapse.report.graph import model_graph, report_graph
    from collapse.report.node_graph import module_graph

    report = Path(model) / "report.json"
    if module is None and report.is_file():
        return report_graph(Report.load(report))
    found = _count(model, prompt)
    if module is not None:
        return module_graph(found.prefill, module, prompt=prompt)
    modules = modules_of(found.cost, found.cost, found.prefill)
    return model_graph(modules, name=Path(model).resolve().name, figures=Figures.of(found.cost))


@app.command()
def report(
    base: Annotated[str, typer.Argument(help="Model directory, output directory or report.json.")],
    new: Annotated[str, typer.Argument(help="The same, to compare with.")],
    form: Annotated[str, typer.Option("--format", help="markdown or json.")] = "markdown",
    prompt: Annotated[
        int | None, typer.Option("--prompt", min=1, help="Tokens of the prompt; by default the report's, else 512.")
    ] = None,
) -> None:
    """Print the FLOP diff between two models, for a pull request.

    Example: collapse report ./SmolLM2-135M ./SmolLM2-135M-log --format markdown
    """
    if form not in {"markdown", "json"}:
        raise CollapseError(f"no format {form!r}", where="--format", fix="use markdown or json")
    from collapse.report.diff import load_sides, to_json, to_markdown

    with _waiting("counting"):
        sides = load_sides(base, new, prompt=prompt)
    typer.echo(dumps(to_json(*sides)) if form == "json" else to_markdown(*sides), nl=False)
