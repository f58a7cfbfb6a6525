"""`collapse schema`: list, show, check and infer the contracts about a model's inputs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from collapse.canonical import dumps
from collapse.cli_args import CorpusCommand
from collapse.corpus import builtin_corpus, infer_schema, read_corpus
from collapse.errors import OutputError
from collapse.schema import TYPES, InputSchema, load_schema

schema_app = typer.Typer(
    help="The contract about a model's inputs: built-in ones, your own, or one derived from your files.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)

_ABOUT = {
    "log": "lines that programs write about what they do",
    "json": "JSON documents and JSON lines",
    "code": "source code",
    "text": "prose",
}

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Spec = Annotated[str, typer.Argument(metavar="NAME|FILE|JSON", help="A built-in name, a file, or inline JSON.")]
Field = Annotated[str | None, typer.Option("--field", help="The field of .jsonl records that holds the text.")]


@schema_app.command("list", epilog="Example: collapse schema list --json")
def list_schemas(as_json: Json = False) -> None:
    """List the built-in schemas with the size of their sample text."""
    rows = [_builtin_row(name) for name in TYPES]
    if as_json:
        typer.echo(dumps(rows), nl=False)
        return
    for row in rows:
        sample = f"{row['characters']:>8} characters in {row['files']} files"
        typer.echo(f"{row['name']:<6}{row['about']:<48}{sample}")


@schema_app.command(
    epilog="Examples: collapse schema show log    "
    """collapse schema show '{"type": "log", "max_line_length": 120}' --json"""
)
def show(spec: Spec, as_json: Json = False) -> None:
    """Show a schema with its defaults and its digest."""
    schema = load_schema(spec)
    if as_json:
        typer.echo(dumps({"schema": schema.to_json(), "digest": schema.digest}), nl=False)
        return
    typer.echo(_fields(schema.to_json()))
    typer.echo(f"{'digest':<18}{schema.digest}")


@schema_app.command(
    cls=CorpusCommand,
    epilog="Examples: collapse schema check mine.toml    collapse schema check log --corpus logs/*.log",
)
def check(
    spec: Spec,
    corpus: Annotated[
        list[Path] | None, typer.Option("--corpus", metavar="FILES...", help="Text that must obey it.")
    ] = None,
    field: Field = None,
    as_json: Json = False,
) -> None:
    """Check a schema, and files against it. Exit code 2 and one line if something is wrong."""
    schema = load_schema(spec)
    found: dict[str, Any] = {"digest": schema.digest, "ok": True}
    if schema.output.corpus:
        read_corpus(schema.output.corpus, InputSchema(type=schema.type))
    if corpus:
        read = read_corpus(corpus, schema, field)
        found |= {"documents": len(read.documents), "characters": read.characters, "corpus": read.digest}
    typer.echo(dumps(found) if as_json else _checked(found), nl=not as_json)


@schema_app.command(epilog="Example: collapse schema infer /var/log/app/*.log -o app.json")
def infer(
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="Text as the model will get it.")],
    as_json: Json = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the schema there, as JSON.")] = None,
) -> None:
    """Derive a schema that exactly covers your files, and print what was seen."""
    schema, observed = infer_schema(files)
    stated = schema.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    if output is not None:
        _write(output, dumps(stated), files)
    if as_json:
        typer.echo(dumps({"observed": observed.model_dump(mode="json"), "schema": stated}), nl=False)
        return
    typer.echo(observed.describe())
    typer.echo(f"\n{dumps(stated)}", nl=False)


def _builtin_row(name: str) -> dict[str, Any]:
    corpus = builtin_corpus(load_schema(name))
    return {
        "name": name,
        "about": _ABOUT[name],
        "characters": corpus.characters,
        "documents": len(corpus.documents),
        "files": len(set(corpus.sources)),
        "digest": load_schema(name).digest,
    }


def _fields(values: dict[str, Any], prefix: str = "") -> str:
    rows = []
    for name, value in sorted(values.items()):
        if isinstance(value, dict):
            rows.append(_fields(value, f"{prefix}{name}."))
        else:
            rows.append(f"{prefix + name:<18}{'-' if value is None else value}")
    return "\n".join(rows)


def _checked(found: dict[str, Any]) -> str:
    if "documents" not in found:
        return f"ok: schema {found['digest'][:12]}"
    text = f"{found['documents']} documents, {found['characters']} characters"
    return f"ok: schema {found['digest'][:12]} holds for {text}"


def _write(path: Path, text: str, inputs: Iterable[Path]) -> None:
    if path.suffix != ".json":
        raise OutputError("the schema is written as JSON", where=str(path), fix="name a .json file")
    if any(path.exists() and path.samefile(name) for name in inputs if name.exists()):
        raise OutputError("is one of the files to read", where=str(path), fix="name another file")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot be written ({error.strerror})", where=str(path)) from error
