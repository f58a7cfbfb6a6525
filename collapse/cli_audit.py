"""`collapse audit`: every byte of an output, for people and for CI services."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from collapse.canonical import dumps
from collapse.replace import replace_file

if TYPE_CHECKING:
    from collapse.audit import Audit
    from collapse.checkpoint import Checkpoint

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The directory that collapse wrote.")]
Source = Annotated[
    str | None, typer.Option("--source", metavar="MODEL", help="The model that was collapsed: search its erased rows.")
]
Key = Annotated[
    Path | None, typer.Option("--verify-key", metavar="PUB", help="Demand a signature of this Ed25519 key (PEM).")
]
Sarif = Annotated[Path | None, typer.Option("--sarif", metavar="FILE", help="Write SARIF 2.1.0 here too.")]
Junit = Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML here too.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def audit(
    folder: Folder,
    source: Source = None,
    verify_key: Key = None,
    sarif: Sarif = None,
    junit: Junit = None,
    as_json: Json = False,
) -> None:
    """Account for every byte of an output: header, tensor, or listed file; nothing stale, nothing hidden.

    With --source the bytes of every erased row are searched for in every file, archives expanded. Hexadecimal,
    base64, and rows that were computed with are not recognised.

    Exit code 0: clean. 1: at least one finding. 2: not decided, or the input is wrong.
    """
    from collapse.audit import audit as run_audit
    from collapse.audit.text import to_text
    from collapse.signing import load_public_key

    key = load_public_key(verify_key) if verify_key else None
    found = run_audit(folder, _open(source) if source else None, key)
    _write(found, folder, sarif, junit)
    typer.echo(dumps(found.to_json()) if as_json else f"{to_text(found)}\n", nl=False)
    raise typer.Exit(found.exit_code)


def _open(source: str) -> Checkpoint:
    from collapse.sources import resolve

    return resolve(source)


def _write(found: Audit, folder: Path, sarif: Path | None, junit: Path | None) -> None:
    if sarif:
        from collapse import __version__
        from collapse.audit.sarif import to_sarif

        replace_file(sarif, dumps(to_sarif(found, folder, __version__)).encode())
    if junit:
        from collapse.audit.junit import to_junit

        replace_file(junit, to_junit(found, folder.resolve().name))
