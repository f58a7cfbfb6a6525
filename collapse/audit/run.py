"""Audits one output directory: manifest and signature, the set of files, their bytes, then what the source tells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from collapse.audit.against_source import against_source
from collapse.audit.findings import Audit, Finding
from collapse.audit.inventory import inventory, plain_files
from collapse.audit.provenance import manifest_findings, signature_findings
from collapse.audit.weights import (
    WeightFile,
    by_name,
    read_weights,
    replaced_finding,
    unowned_bytes,
    wrong_index,
    wrong_totals,
)
from collapse.checkpoint import Checkpoint, TensorInfo
from collapse.errors import CheckpointError
from collapse.manifest import MANIFEST, SIGNATURE, Manifest, parse_manifest, read_manifest
from collapse.plan import Plan
from collapse.rewrite.origin import source_name
from collapse.rewrite.tensors import PLACEHOLDER_DTYPE, PLACEHOLDER_SHAPE, erased_names, output_name
from collapse.rewrite.values import plan_digests

NO_SOURCE = "without --source, tensors were not compared and bytes of erased rows not searched for"
NO_KEY = "collapse.sig is there, but without --verify-key it was not checked"
MUTE = "erased rows are constant or shorter than 16 bytes, so they were not searched for"
ANYWAY = {"file-unlisted", "file-missing"}  # said of a file that has another finding of the kind, they add nothing


def audit(folder: Path, source: Checkpoint | None = None, key: Ed25519PublicKey | None = None) -> Audit:
    """Account for every byte of every file in `folder`.

    With `source`, the model that was collapsed, kept tensors are compared with it and the bytes of every erased row
    are searched for in every file. With `key` the manifest must be signed with its private half.

    Raises `CheckpointError` where `folder` is no directory with a `collapse.json`, `OSError` for a file that cannot
    be read.
    """
    if not folder.is_dir():
        raise CheckpointError("no such directory", where=str(folder), fix="give a directory that collapse wrote")
    raw = read_manifest(folder)
    findings = list(signature_findings(folder, raw, key))
    notes = [NO_KEY] if key is None and (folder / SIGNATURE).exists() else []
    try:
        manifest = parse_manifest(raw)
    except CheckpointError as error:
        return Audit(findings=(*findings, Finding(rule="manifest-damaged", file=MANIFEST, what=error.what)))
    findings += (*manifest_findings(raw, manifest), *inventory(folder, manifest.files))
    names = plain_files(folder)
    files, damaged = read_weights(folder, names)
    tensors, wrong = _account(folder, manifest, files)
    findings += (*damaged, *wrong)
    figures = _figures(folder, names, files)
    undecided: tuple[str, ...] = ()
    searched = source is not None and source.digest == manifest.plan.source
    if source is not None and searched:
        compared = against_source(folder, source, manifest.plan, tensors, (*names, *_own(folder)))
        findings += compared.findings
        figures |= compared.figures
        undecided = compared.undecided
        notes += [f"{figures['rows_mute']} {MUTE}"] if figures.get("rows_mute") else []
    else:
        findings += _erased_by_name(manifest.plan, tensors)
        findings += _replaced_by_digest(folder, manifest.plan, tensors)
        notes += [NO_SOURCE] if source is None else []
        undecided = () if source is None else (_other_source(source, manifest.plan),)
    return Audit(
        findings=_distinct(findings), undecided=undecided, notes=tuple(notes), searched=searched, figures=figures
    )


def _account(
    folder: Path, manifest: Manifest, files: tuple[WeightFile, ...]
) -> tuple[dict[str, TensorInfo], list[Finding]]:
    """Account for the bytes of the weight files; return the tensors by name, those of listed files first."""
    listed = tuple(file for file in files if file.name in manifest.files)
    stale = tuple(file for file in files if file.name not in manifest.files)
    tensors, twice = by_name((*listed, *stale))
    findings = [found for file in files for found in unowned_bytes(folder, file)]
    findings += wrong_index(folder, listed)
    findings += wrong_totals(by_name(listed)[0], manifest.kept)
    return tensors, [*findings, *twice]


def _figures(folder: Path, names: Iterable[str], files: tuple[WeightFile, ...]) -> dict[str, int]:
    sizes = [(folder / name).stat().st_size for name in (*names, *_own(folder))]
    weights, headers = sum(file.size for file in files), sum(file.base for file in files)
    owned = sum(info.nbytes for file in files for info in file.tensors)
    return {
        "files": len(sizes),
        "bytes": sum(sizes),
        "header_bytes": headers,
        "tensor_bytes": owned,
        "other_file_bytes": sum(sizes) - weights,
    }


def _own(folder: Path) -> tuple[str, ...]:
    paths = (folder / name for name in (MANIFEST, SIGNATURE))
    return tuple(path.name for path in paths if path.is_file() and not path.is_symlink())


def _erased_by_name(plan: Plan, tensors: Mapping[str, TensorInfo]) -> Iterator[Finding]:
    """Names tell without the source: those that the source has for the tensors, since a plan may rename some."""
    gone, placeholders = erased_names(plan)
    given = {output_name(plan, name) for name in plan_digests(plan)}
    for name, info in sorted(tensors.items()):
        original = source_name(plan, name)
        stands_in = original in placeholders and (info.dtype, info.shape) == (PLACEHOLDER_DTYPE, PLACEHOLDER_SHAPE)
        if original in gone and not stands_in and name not in given:
            what = f"{name}: the erased tensor is in the file"
            yield Finding(rule="tensor-erased", file=info.file, what=what, offset=info.start)


def _replaced_by_digest(folder: Path, plan: Plan, tensors: Mapping[str, TensorInfo]) -> Iterator[Finding]:
    """Computed data are told by the digests in the plan, without the source."""
    for original, digest in plan_digests(plan).items():
        name = output_name(plan, original)
        if name in tensors:
            yield from replaced_finding(folder, name, tensors[name], digest)
        else:
            what = f"{name}: a tensor that the plan computes is missing"
            yield Finding(rule="tensor-missing", file=MANIFEST, what=what)


def _other_source(source: Checkpoint, plan: Plan) -> str:
    told = f"its digest is {source.digest[:12]}, the plan's is {plan.source[:12]}"
    return f"the source is not the model that was collapsed ({told}), so nothing was compared with it"


def _distinct(findings: list[Finding]) -> tuple[Finding, ...]:
    """Leave out what says again, of a file, that it is not wanted or not there."""
    named: set[str] = set()
    kept = []
    for found in findings:
        if found.rule in ANYWAY and found.file in named:
            continue
        kept.append(found)
        if found.rule.startswith(("file-", "foreign-", "stale-")) and found.rule != "file-changed":
            named.add(found.file)
    return tuple(kept)
