"""`collapse.json`: what an output directory is, and the digest of every file in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from collapse.canonical import dumps, file_digest
from collapse.checkpoint import Checkpoint
from collapse.disk import write_new
from collapse.errors import CheckpointError
from collapse.plan import Plan, Record, first_problem
from collapse.rewrite.tensors import OutputTensor, output_tensors, parameters_of
from collapse.search_path import PATH_FILE

MANIFEST = "collapse.json"
SIGNATURE = "collapse.sig"  # over the bytes of the manifest, and so of everything that it lists
REPORT_SUFFIXES = (".md", ".svg", ".dot", ".html")  # what a report may add to the model's own files


class FileRecord(Record):
    """Digest and size of one file."""

    sha256: str
    bytes: int


class Totals(Record):
    """Number of tensors, of their elements, and of their bytes."""

    tensors: int
    parameters: int
    bytes: int


class Source(Record):
    """The checkpoint that was collapsed: what reports call it, and the digest of its files."""

    label: str
    digest: str


class Manifest(Record):
    """The content of `collapse.json`; `files` lists every other file of the directory."""

    format: Literal["collapse-manifest/1"] = "collapse-manifest/1"
    plan: Plan
    plan_digest: str
    source: Source
    files: dict[str, FileRecord]
    versions: dict[str, str] = Field(description="of the libraries that wrote the directory")
    kept: Totals
    erased: Totals
    replaced: Totals = Field(
        default=Totals(tensors=0, parameters=0, bytes=0),
        description="of `kept`, what is computed, added tensors included",
    )


def versions() -> dict[str, str]:
    """Return the installed versions of what decides the bytes of an output."""
    found = {}
    for name in ("collapse", "safetensors", "tokenizers", "torch", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def make_manifest(
    folder: Path, checkpoint: Checkpoint, plan: Plan, known: Mapping[str, FileRecord] | None = None
) -> Manifest:
    """Describe `folder` as it is; files in `known` are not read again."""
    files = {name: (known or {}).get(name) or record_of(folder / name) for name in file_names(folder)}
    kept = output_tensors(checkpoint, plan)
    after = _totals(checkpoint, kept)
    infos = checkpoint.tensors.values()
    held = checkpoint.parameters(checkpoint.tensors)
    before = Totals(tensors=len(infos), parameters=held, bytes=checkpoint.weight_bytes)
    left = _totals(checkpoint, [tensor for tensor in kept if tensor.source is not None or tensor.is_placeholder])
    gone = {name: getattr(before, name) - getattr(left, name) for name in Totals.model_fields}
    return Manifest(
        plan=plan,
        plan_digest=plan.digest,
        source=Source(label=checkpoint.label, digest=checkpoint.digest),
        files=files,
        versions=versions(),
        kept=after,
        erased=Totals(**gone),
        replaced=_totals(checkpoint, [tensor for tensor in kept if tensor.digest is not None]),
    )


def _totals(checkpoint: Checkpoint, tensors: Sequence[OutputTensor]) -> Totals:
    size = sum(tensor.nbytes for tensor in tensors)
    return Totals(tensors=len(tensors), parameters=parameters_of(checkpoint, tensors), bytes=size)


def write_manifest(
    folder: Path, checkpoint: Checkpoint, plan: Plan, known: Mapping[str, FileRecord] | None = None
) -> Manifest:
    """Write `collapse.json` into `folder`, over an earlier one; call it after all other files are there."""
    manifest = make_manifest(folder, checkpoint, plan, known)
    (folder / MANIFEST).unlink(missing_ok=True)
    write_new(folder / MANIFEST, [dumps(manifest.model_dump(mode="json", by_alias=True)).encode()])
    return manifest


def load_manifest(folder: Path) -> Manifest:
    """Read `collapse.json`; raises `CheckpointError` with the field and what is wrong with it."""
    return parse_manifest(read_manifest(folder))


def read_manifest(folder: Path) -> bytes:
    """Return the bytes of `collapse.json`; raises `CheckpointError` where there is none."""
    path = folder / MANIFEST
    if path.exists() and not path.is_file():  # opening a named pipe would wait for ever
        message = f"{MANIFEST} is no plain file"
        raise CheckpointError(message, where=str(folder), fix="give a directory that collapse wrote")
    try:
        return path.read_bytes()
    except OSError as error:
        message = f"no readable {MANIFEST} ({error.strerror})"
        raise CheckpointError(message, where=str(folder), fix="give a directory that collapse wrote") from None


def parse_manifest(raw: bytes) -> Manifest:
    """Return the manifest in `raw`; raises `CheckpointError` with the field and what is wrong with it."""
    try:
        return Manifest.model_validate_json(raw)
    except ValidationError as error:
        raise CheckpointError(first_problem(error), where=MANIFEST, fix="export again") from None


def file_names(folder: Path) -> tuple[str, ...]:
    """Return the names of all files below `folder` but the manifest and its signature, with `/`, sorted."""
    own = (MANIFEST, SIGNATURE)
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return tuple(sorted(name for path in paths if (name := path.relative_to(folder).as_posix()) not in own))


def is_report(name: str) -> bool:
    """Whether a file is for people to read: nothing loads it, and it is not derived from the source."""
    return name in ("report.json", PATH_FILE) or name.endswith(REPORT_SUFFIXES)


def record_of(path: Path) -> FileRecord:
    """Return digest and size of the file at `path`."""
    return FileRecord(sha256=file_digest(path), bytes=path.stat().st_size)
