"""Accounts for the bytes of weight files: header, tensors, nothing else; and which of them equal the source's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from collapse.audit.findings import Finding, first_difference
from collapse.audit.inventory import WEIGHTS
from collapse.checkpoint import INDEX, SINGLE, TensorInfo, header_entries
from collapse.errors import CheckpointError
from collapse.manifest import Totals
from collapse.rewrite.bytes import SourceReader, differences
from collapse.rewrite.layout import Shard, header, index
from collapse.rewrite.tensors import OutputTensor
from collapse.rewrite.values import data_digest
from collapse.verify.static import OTHER_VALUES, same_form

Span = tuple[int, int]  # of byte offsets in a file, half-open


@dataclass(frozen=True)
class WeightFile:
    """One safetensors file: its size and the end of its header in bytes, and its tensors in order of offset."""

    name: str
    size: int
    base: int
    tensors: tuple[TensorInfo, ...]


def read_weights(folder: Path, names: Iterable[str]) -> tuple[tuple[WeightFile, ...], tuple[Finding, ...]]:
    """Return the safetensors files among `names`, and a finding for each whose header cannot be read."""
    files, findings = [], []
    for name in (name for name in names if name.endswith(WEIGHTS)):
        try:
            base, tensors = header_entries(folder / name, name)
        except CheckpointError as error:
            findings.append(Finding(rule="weights-damaged", file=name, what=error.what, offset=0))
            continue
        files.append(WeightFile(name, (folder / name).stat().st_size, base, tensors))
    return tuple(files), tuple(findings)


def unowned_bytes(folder: Path, file: WeightFile) -> Iterator[Finding]:
    """Yield every place of a weight file that is neither its canonical header nor the data of one tensor."""
    right = header([_written(info) for info in file.tensors])
    with (folder / file.name).open("rb") as stream:
        there = stream.read(file.base)
    at = first_difference(there, right)
    if at is not None:
        what = "the header is not the canonical one of its tensors, so it may hold other bytes"
        yield Finding(rule="header-bytes", file=file.name, what=what, offset=at)
    end = file.base
    for info in file.tensors:
        if info.start > end:
            what = f"{info.start - end} bytes before {info.name} belong to no tensor"
            yield Finding(rule="gap-bytes", file=file.name, what=what, offset=end)
        elif info.start < end:
            what = f"the bytes of {info.name} belong to the tensor before it too"
            yield Finding(rule="gap-bytes", file=file.name, what=what, offset=info.start)
        end = max(end, info.stop)
    if end > file.size:
        what = f"is cut short: {end} bytes are promised, {file.size} there"
        yield Finding(rule="weights-damaged", file=file.name, what=what, offset=file.size)
    elif end < file.size:
        what = f"{file.size - end} bytes follow the last tensor"
        yield Finding(rule="trailing-bytes", file=file.name, what=what, offset=end)


def wrong_index(folder: Path, files: tuple[WeightFile, ...]) -> Iterator[Finding]:
    """Yield what is wrong with the index: it is there just where there are shards, and is the one that we write."""
    path = folder / INDEX
    needed = [file.name for file in files] != [SINGLE]
    if not path.is_file() or path.is_symlink():
        if needed:
            yield Finding(rule="index", file=INDEX, what=f"is missing, though the weights are not in {SINGLE} alone")
        return
    right = index([Shard(file.name, tuple(map(_written, file.tensors))) for file in files]) if needed else b""
    at = first_difference(path.read_bytes(), right)
    if at is not None:
        yield Finding(
            rule="index", file=INDEX, what="is not the canonical one of the tensors that are there", offset=at
        )


def by_name(files: Iterable[WeightFile]) -> tuple[dict[str, TensorInfo], list[Finding]]:
    """Return every tensor by name, and a finding for each that is there twice."""
    found: dict[str, TensorInfo] = {}
    twice = []
    for info in (info for file in files for info in file.tensors):
        if info.name in found:
            what = f"{info.name} is also in {found[info.name].file}"
            twice.append(Finding(rule="tensor-twice", file=info.file, what=what, offset=info.start))
        found.setdefault(info.name, info)
    return found, twice


def wrong_totals(tensors: Mapping[str, TensorInfo], kept: Totals) -> Iterator[Finding]:
    """Yield a finding where the tensors do not add up to what the manifest says was kept."""
    infos = tensors.values()
    found = Totals(tensors=len(infos), parameters=sum(i.numel for i in infos), bytes=sum(i.nbytes for i in infos))
    if found != kept:
        what = f"{found.tensors} tensors of {found.bytes} bytes, but collapse.json kept {kept.tensors} of {kept.bytes}"
        yield Finding(rule="totals", file=SINGLE if len({i.file for i in infos}) < 2 else INDEX, what=what)


def compare(
    folder: Path, reader: SourceReader, expected: Iterable[OutputTensor], tensors: Mapping[str, TensorInfo]
) -> tuple[dict[str, list[Span]], list[Finding]]:
    """Compare every kept tensor with the source's bytes, and replaced ones with their digest.

    Returns, by file, the spans that hold just what plan and source put there, and a finding for each tensor that
    differs. Tensors of another form, and a second one of the same name, own no span.
    """
    equal: dict[str, list[Span]] = {}
    findings: list[Finding] = []
    for tensor in expected:
        info = tensors.get(tensor.name)
        if info is None or not same_form(tensor, info):
            continue
        if tensor.digest is not None:
            wrong = replaced_finding(folder, tensor.name, info, tensor.digest)
            findings += wrong
            equal.setdefault(info.file, []).extend([] if wrong else [(info.start, info.stop)])
            continue
        unlike = [
            (info.start + a, info.start + b) for a, b in differences(folder / info.file, info, reader.chunks(tensor))
        ]
        equal.setdefault(info.file, []).extend(without((info.start, info.stop), unlike))
        if unlike:
            origin = "the placeholder's zeros" if tensor.is_placeholder else "the source"
            what = f"{tensor.name}: differs from {origin}"
            findings.append(Finding(rule="tensor-bytes", file=info.file, what=what, offset=unlike[0][0]))
    return equal, findings


def replaced_finding(folder: Path, name: str, info: TensorInfo, digest: str) -> tuple[Finding, ...]:
    """Return a finding where the data of a replaced tensor are not those with the digest in the plan."""
    if data_digest(folder / info.file, info) == digest:
        return ()
    return (Finding(rule="tensor-values", file=info.file, what=f"{name}: {OTHER_VALUES}", offset=info.start),)


def without(whole: Span, holes: Iterable[Span]) -> list[Span]:
    """Return the parts of `whole` that are in none of `holes`, which may overlap and come in any order."""
    rest, end = [], whole[0]
    for start, stop in sorted(holes):
        if start > end:
            rest.append((end, min(start, whole[1])))
        end = max(end, stop)
    if end < whole[1]:
        rest.append((end, whole[1]))
    return rest


def _written(info: TensorInfo) -> OutputTensor:
    return OutputTensor(info.name, info.dtype, info.shape, None)
