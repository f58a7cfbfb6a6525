"""Checks of the files alone, without torch: everything in the output is derived again from plan and source.

The manifest is not trusted about tensors: names, shapes and bytes are compared with the source's rows, so that
a manifest edited to fit tampered files is caught.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from collapse.canonical import printable
from collapse.checkpoint import INDEX, SINGLE, Checkpoint, TensorInfo, read_header
from collapse.erase import side_files
from collapse.errors import CollapseError
from collapse.manifest import SIGNATURE, Manifest, file_names, is_report, load_manifest, record_of
from collapse.plan import Plan
from collapse.rewrite.bytes import SourceReader, differences
from collapse.rewrite.layout import header
from collapse.rewrite.tensors import OutputTensor, erased_names, output_tensors
from collapse.rewrite.values import data_digest
from collapse.signing import read_signature
from collapse.untrusted import read_json
from collapse.verdict import Check
from collapse.verify.ids import id_problems

OTHER_VALUES = "has other data than those that the plan computed"
SHOWN = 20  # failures listed of one kind; the rest are counted
Kind = Literal["erased", "unplanned", "form", "missing", "side"]


@dataclass(frozen=True)
class Problem:
    """What is wrong with one file, at a byte offset where that is known; `kind` is for programs."""

    kind: Kind
    file: str
    what: str
    offset: int | None = None

    def __str__(self) -> str:
        return f"{self.file}: {self.what}" if self.file else self.what


def static_checks(output: Path, source: Checkpoint | None, plan: Plan | None = None) -> tuple[Check, ...]:
    """Return the outcome of every check of the files in `output`.

    With `plan` the output must be of exactly that plan. Without `source` only its inner consistency can be
    checked, and the checks against the source are reported as not run.
    """
    try:
        manifest = load_manifest(output)
    except CollapseError as error:
        return (Check(name="manifest", passed=False, detail=str(error)),)
    checks = [*_manifest_checks(manifest, plan), *_file_checks(output, manifest)]
    tensors, broken = read_tensors(output)
    checks += broken
    if source is None:
        reason = "no source was given, so nothing but the output's own digests was checked"
        return (*checks, Check(name="source", passed=None, detail=reason))
    return (*checks, *_source_checks(output, source, manifest, tensors))


def read_tensors(output: Path) -> tuple[dict[str, TensorInfo], list[Check]]:
    """Return the tensors of every safetensors file of the directory, and failed checks for damaged or strange ones."""
    found: dict[str, TensorInfo] = {}
    failures: list[Check] = []
    for path in sorted(output.rglob("*.safetensors")):
        name = path.relative_to(output).as_posix()
        try:
            infos = read_header(path, name) if path.is_file() else ()
        except (CollapseError, OSError) as error:
            failures.append(Check(name="weight file", passed=False, detail=str(error)))
            continue
        for info in infos:
            if info.name in found:
                detail = f"{name}: tensor {info.name} is also in {found[info.name].file}"
                failures.append(Check(name="weight file", passed=False, detail=detail))
            found.setdefault(info.name, info)
    return found, failures


def _manifest_checks(manifest: Manifest, plan: Plan | None) -> Iterator[Check]:
    matches = manifest.plan.digest == manifest.plan_digest
    detail = "the plan's digest matches" if matches else "collapse.json: the plan was edited, its digest does not match"
    yield Check(name="plan digest", passed=matches, detail=detail)
    if plan is not None:
        same = manifest.plan.digest == plan.digest
        yield Check(
            name="expected plan",
            passed=same,
            detail="the plan is the expected one" if same else "collapse.json: the plan is another than the expected",
        )


def _file_checks(output: Path, manifest: Manifest) -> Iterator[Check]:
    names = file_names(output)
    problems = [f"{name}: listed in collapse.json, but missing" for name in manifest.files if name not in names]
    for name in names:
        path = output / name
        if name not in manifest.files:
            problems.append(f"{name}: not listed in collapse.json")
        elif path.is_symlink() or not path.is_file():
            problems.append(f"{name}: no plain file")
        elif record_of(path) != manifest.files[name]:
            problems.append(f"{name}: size or sha256 differs from collapse.json")
    if (output / SIGNATURE).is_symlink() or (output / SIGNATURE).exists():
        try:
            read_signature(output)
        except CollapseError as error:
            problems.append(str(error))
    yield from _summed("files", problems, f"{len(manifest.files)} files have their recorded size and sha256")


def _source_checks(
    output: Path, source: Checkpoint, manifest: Manifest, tensors: Mapping[str, TensorInfo]
) -> Iterator[Check]:
    fits = source.digest == manifest.plan.source == manifest.source.digest
    detail = "the source is the one that was collapsed" if fits else "the source is another than the plan's"
    yield Check(name="source", passed=fits, detail=detail)
    try:
        expected = output_tensors(source, manifest.plan)
        sides = side_files(source, manifest.plan)
    except CollapseError as error:
        yield Check(name="plan", passed=False, detail=f"the plan does not fit the source: {error}")
        return
    gone = erased_names(manifest.plan)[0]
    yield from _summed("tensors", list(tensor_problems(expected, tensors, gone)), _tensors_detail(expected, gone))
    whole = [t for t in expected if t.name in tensors and same_form(t, tensors[t.name])]
    survivors = [tensor for tensor in whole if tensor.digest is None]
    compared = sum(tensor.nbytes for tensor in survivors)
    unequal = list(_byte_problems(output, source, survivors, tensors))
    yield from _summed("tensor bytes", unequal, f"{compared} bytes equal the source's", bytes=compared)
    if any(tensor.digest is not None for tensor in expected):
        yield from _replaced_check(output, [tensor for tensor in whole if tensor.digest is not None], tensors)
    damaged = list(_header_problems(output, expected, tensors))
    yield from _summed("headers", damaged, "each weight file is its canonical header and these tensors, no more")
    altered = list(side_problems(output, source, sides))
    yield from _summed("side files", altered, f"{len(sides)} config and tokenizer files are as the plan makes them")
    foreign = list(id_problems(output, source, manifest.plan))
    yield from _summed("token ids", foreign, "every token id of the config files names the source's token")


def _summed(name: str, problems: Sequence[object], good: str, **figures: int) -> Iterator[Check]:
    """Yield one passed check, or one failed check a problem."""
    if not problems:
        yield Check(name=name, passed=True, detail=good, figures=dict(figures))
    for problem in problems[:SHOWN]:
        yield Check(name=name, passed=False, detail=printable(str(problem)))
    if len(problems) > SHOWN:
        yield Check(name=name, passed=False, detail=f"and {len(problems) - SHOWN} more")


def _tensors_detail(expected: tuple[OutputTensor, ...], gone: frozenset[str]) -> str:
    return f"{len(expected)} tensors are there with their dtype and shape, {len(gone)} erased ones are not"


def same_form(tensor: OutputTensor, info: TensorInfo) -> bool:
    """Whether a tensor of the files has the dtype and shape that the plan gives it."""
    return (tensor.dtype, tensor.shape) == (info.dtype, info.shape)


def tensor_problems(
    expected: tuple[OutputTensor, ...], tensors: Mapping[str, TensorInfo], gone: frozenset[str]
) -> Iterator[Problem]:
    """Yield what is wrong with the names and forms of `tensors`; `gone` are the names that the plan erases."""
    wanted = {tensor.name: tensor for tensor in expected}
    for name, info in tensors.items():
        if name not in wanted:
            kind: Kind = "erased" if name in gone else "unplanned"
            what = "the erased tensor is in the file" if name in gone else "a tensor that the plan does not keep"
            yield Problem(kind, info.file, f"{name}: {what}", info.start)
        elif not same_form(wanted[name], info):
            form = f"{info.dtype} {list(info.shape)}, should be {wanted[name].dtype} {list(wanted[name].shape)}"
            back = "the erased tensor is in the file: " if wanted[name].is_placeholder else ""
            kind = "erased" if back else "form"
            yield Problem(kind, info.file, f"{name}: {back}{form}", info.start)
    for name in sorted(wanted.keys() - tensors.keys()):
        yield Problem("missing", "", f"{name}: a tensor that must survive is missing")


def _byte_problems(
    output: Path, source: Checkpoint, survivors: list[OutputTensor], tensors: Mapping[str, TensorInfo]
) -> Iterator[str]:
    with SourceReader(source, survivors) as reader:
        for tensor in survivors:
            info = tensors[tensor.name]
            first = next(differences(output / info.file, info, reader.chunks(tensor)), None)
            if first is not None:
                origin = "placeholder's zeros" if tensor.is_placeholder else "source"
                yield f"{info.file}: {tensor.name}: byte {first[0]} differs from the {origin}"


def _replaced_check(
    output: Path, replaced: Sequence[OutputTensor], tensors: Mapping[str, TensorInfo]
) -> Iterator[Check]:
    wrong = [tensor.name for tensor in replaced if not has_digest(output, tensor, tensors[tensor.name])]
    problems = [f"{tensors[name].file}: {name}: {OTHER_VALUES}" for name in wrong]
    good = f"{len(replaced)} tensors have the computed data whose SHA-256 the plan has"
    yield from _summed("replaced tensors", problems, good, replaced=len(replaced))


def has_digest(output: Path, tensor: OutputTensor, info: TensorInfo) -> bool:
    """Whether a replaced tensor of the output, found at `info`, has the data whose digest is in the plan."""
    return data_digest(output / info.file, info) == tensor.digest


def _header_problems(
    output: Path, expected: tuple[OutputTensor, ...], tensors: Mapping[str, TensorInfo]
) -> Iterator[str]:
    """A header may hold nothing but the tensors: metadata and padding are places to hide bytes in."""
    wanted = {tensor.name: tensor for tensor in expected}
    weight_map = {name: info.file for name, info in tensors.items()}
    for file in sorted(set(weight_map.values())):
        inside = [wanted[name] for name, place in weight_map.items() if place == file and name in wanted]
        right = header(inside)
        with (output / file).open("rb") as stream:
            if stream.read(len(right)) != right:
                yield f"{file}: the header is not the canonical one of its tensors"
    yield from _index_problems(output, weight_map)


def _index_problems(output: Path, weight_map: Mapping[str, str]) -> Iterator[str]:
    files = set(weight_map.values())
    for path in sorted(output.rglob("*.safetensors")):
        if path.relative_to(output).as_posix() not in files:
            yield f"{path.name}: a weight file without tensors"
    if not (output / INDEX).is_file():
        if files != {SINGLE}:
            yield f"{INDEX}: missing, though the weights are not in {SINGLE} alone"
        return
    try:
        listed = read_json(output / INDEX).get("weight_map")
    except CollapseError as error:
        listed = str(error)
    if listed != weight_map:
        yield f"{INDEX}: does not list the tensors that are there"


def side_problems(output: Path, source: Checkpoint, sides: Mapping[str, bytes | None]) -> Iterator[Problem]:
    """Yield which side files are not what plan and source make of them, and which files nothing accounts for."""
    for name, content in sides.items():
        right = (source.root / name).read_bytes() if content is None else content
        path = output / name
        if not path.is_file():
            yield Problem("missing", name, "missing")
        elif (there := path.read_bytes()) != right:
            at = next((i for i, pair in enumerate(zip(there, right, strict=False)) if pair[0] != pair[1]), None)
            what = "differs from what source and plan make of it"
            yield Problem("side", name, what, min(len(there), len(right)) if at is None else at)
    for name in file_names(output):
        known = name in sides or name == INDEX or name.endswith(".safetensors")
        if not known and not is_report(name):
            yield Problem("unplanned", name, "a file that neither the source nor the report accounts for")
