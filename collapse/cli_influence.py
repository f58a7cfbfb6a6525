"""`collapse influence`: which parts of a model matter least on a domain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collapse.errors import PlanError

if TYPE_CHECKING:
    from collapse.analysis.site_influence import Influence, SiteInfluence

HEAD = 40  # rows of the table

Exact = Annotated[
    str, typer.Option("--exact", metavar="N|all", help="Measure so many sites of each kind, the lowest estimates.")
]


def influence(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model directory, a .gguf file, or a hub id.")],
    schema: Annotated[str, typer.Option("--schema", "-s", help="A built-in name, a file, or inline JSON.")] = "log",
    corpus: Annotated[
        list[Path] | None, typer.Option("--corpus", metavar="FILES...", help="Your own text, instead of the sample.")
    ] = None,
    field: Annotated[str | None, typer.Option("--field", help="The field of .jsonl records that holds text.")] = None,
    generic: Annotated[bool, typer.Option("--generic", help="Measure on the built-in prose instead.")] = False,
    sites: Annotated[str | None, typer.Option("--sites", metavar="KIND,...", help="Kinds of sites; all else.")] = None,
    exact: Exact = "8",
    by: Annotated[str, typer.Option("--by", metavar="zero,mean", help="What stands in for a measured site.")] = "zero",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="How much text.")] = 4096,
    ranges: Annotated[int, typer.Option("--ranges", min=1, help="Sites of the neurons of one feed-forward.")] = 12,
    seed: Annotated[int, typer.Option("--seed", help="Of the split and of the drawn labels.")] = 0,
    cache: Annotated[Path | None, typer.Option("--cache", help="Where figures are kept, to go on later.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines: all sites.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")] = False,
) -> None:
    """Show what leaving each part of MODEL out costs its logits on the schema's text, least first."""
    from collapse.analysis.site_influence import Settings, check_settings
    from collapse.analysis.sites import KINDS
    from collapse.canonical import dumps
    from collapse.options import make_options
    from collapse.progress import Stopwatch
    from collapse.survey import influence as run

    kinds, stand_ins = check_settings(sites.split(",") if sites else KINDS, by.split(","))
    watch = Stopwatch(quiet)
    found = run(
        model,
        schema,
        make_options(corpus=tuple(corpus or ()), text_field=field, seed=seed),
        settings=Settings(kinds, _count(exact), stand_ins, ranges),
        tokens=tokens,
        generic=generic,
        cache=cache,
        watch=watch,
    )
    watch.finish()
    if as_json:
        typer.echo(dumps(influence_data(found)), nl=False)
    else:
        _show(found)


def _count(exact: str) -> int | None:
    if exact == "all":
        return None
    if not exact.isdecimal():
        raise PlanError(f"{exact!r} is no number of sites", where="--exact", fix="give a number, or all")
    return int(exact)


def influence_data(found: Influence) -> dict[str, Any]:
    """Return the figures of all sites as plain JSON values, in the model's order."""
    return {
        "tokens": found.tokens,
        "sites": [_row(one) for one in found.sites],
        "skipped": [one.model_dump(mode="json", by_alias=True) for one in found.skipped],
    }


def _row(one: SiteInfluence) -> dict[str, Any]:
    from dataclasses import asdict

    site, group = one.site, one.site.group
    return {
        "name": site.name,
        "kind": group.kind,
        "path": group.path,
        "block": group.block,
        "module": group.module,
        "attends": group.attends,
        "units": [list(run) for run in site.units.runs],
        "size": group.size,
        **asdict(site.sizes),
        "estimate": asdict(one.estimate),
        "exact": {by: asdict(loss) for by, loss in one.losses.items()},
    }


def _show(found: Influence) -> None:
    """Print the measured sites, least cost for each parameter first, or where none is the estimated ones."""
    measured = sorted((one for one in found.sites if one.losses), key=_price)
    rest = sorted((one for one in found.sites if not one.losses), key=lambda one: one.estimate.fisher)
    rows = (measured or rest)[:HEAD]
    width = max((len(one.site.name) for one in rows), default=0)
    heads = ("parameters", "KL", "KL/param", "NLL", "flips", "confident", "by", "estimate", "norm")
    typer.echo(f"{'site':<{width}}" + "".join(f"{head:>11}" for head in heads))
    for one in rows:
        cells = (f"{one.site.sizes.parameters:,}", *_cells(one))
        typer.echo(f"{one.site.name:<{width}}" + "".join(f"{cell:>11}" for cell in cells))
    typer.echo(f"\n{found.tokens} tokens; KL, NLL and estimate in nats a token, KL/param in nano-nats a parameter")
    if len(measured) > HEAD or (measured and rest):
        hidden = max(0, len(measured) - HEAD)
        typer.echo(
            f"not shown: {hidden} measured, {len(rest)} estimated only; --exact all measures all, --json has all"
        )
    for left in found.skipped:
        typer.echo(f"left alone: {left.site}: {left.reason}")


def _price(one: SiteInfluence) -> float:
    return (one.kl or 0.0) / max(1, one.site.sizes.parameters)


def _cells(one: SiteInfluence) -> tuple[str, ...]:
    norm = "" if one.estimate.norm is None else f"{one.estimate.norm:.3f}"
    estimate = f"{one.estimate.fisher:.2g}"
    if not one.losses:
        return ("",) * 6 + (estimate, norm)
    by, loss = min(one.losses.items(), key=lambda item: item[1].kl)
    shares = (f"{loss.flips:.1%}", f"{loss.confident_flips:.1%}")
    return (f"{loss.kl:.4g}", f"{_price(one) * 1e9:.3g}", f"{loss.nll:+.4f}", *shares, by, estimate, norm)
