"""What only the source can tell: whether kept tensors have its bytes, and whether erased rows are anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from collapse.audit.erased import Probes, erased_tensors, probes, window_span
from collapse.audit.findings import SEARCH, Finding
from collapse.audit.search import OVERLAP, Hit, Hits, batches, search
from collapse.audit.streams import Part, Unread, file_parts, packed_parts
from collapse.audit.weights import Span, compare, without
from collapse.canonical import printable
from collapse.checkpoint import Checkpoint, TensorInfo
from collapse.erase import side_files
from collapse.errors import CollapseError
from collapse.manifest import MANIFEST
from collapse.plan import Plan
from collapse.rewrite.bytes import SourceReader
from collapse.rewrite.tensors import OutputTensor, erased_names, output_tensors
from collapse.verify.static import Kind, side_problems, tensor_problems

SHOWN = 8  # row numbers listed in a finding
TENSOR_RULES: Mapping[Kind, str] = {
    "erased": "tensor-erased", "unplanned": "tensor-unplanned", "form": "tensor-form", "missing": "tensor-missing",
}  # fmt: skip
SIDE_RULES: Mapping[Kind, str] = {"missing": "file-missing", "side": "side-file", "unplanned": "file-unlisted"}


@dataclass(frozen=True)
class Comparison:
    """What the comparison found; `undecided` are archives that were not read to their end."""

    findings: tuple[Finding, ...]
    undecided: tuple[str, ...]
    figures: Mapping[str, int]


def against_source(
    folder: Path, source: Checkpoint, plan: Plan, tensors: Mapping[str, TensorInfo], files: tuple[str, ...]
) -> Comparison:
    """Compare the output in `folder` with the source that `plan` was made for.

    `tensors` are those of its weight files, `files` all files in which erased rows are searched for.
    """
    try:
        expected, sides = output_tensors(source, plan), side_files(source, plan)
    except CollapseError as error:
        found = Finding(rule="plan-edited", file=MANIFEST, what=f"the plan does not fit the source: {error}")
        return Comparison((found,), (), {})
    findings = list(_of_tensors(expected, tensors, erased_names(plan)[0]))
    for problem in side_problems(folder, source, sides):
        findings.append(
            Finding(rule=SIDE_RULES[problem.kind], file=problem.file, what=problem.what, offset=problem.offset)
        )
    with SourceReader(source, expected) as reader:
        equal, unlike = compare(folder, reader, expected, tensors)
    hits, undecided, figures = _search(folder, source, plan, files, equal)
    return Comparison((*findings, *unlike, *map(_finding, hits)), undecided, figures)


def _of_tensors(
    expected: tuple[OutputTensor, ...], tensors: Mapping[str, TensorInfo], gone: frozenset[str]
) -> Iterator[Finding]:
    for problem in tensor_problems(expected, tensors, gone):
        file = problem.file or MANIFEST  # what is missing is in no file; the plan has it
        yield Finding(rule=TENSOR_RULES[problem.kind], file=file, what=problem.what, offset=problem.offset)


def _search(
    folder: Path, source: Checkpoint, plan: Plan, files: tuple[str, ...], equal: Mapping[str, list[Span]]
) -> tuple[Iterable[Hit], tuple[str, ...], Mapping[str, int]]:
    """Search every byte that is not a kept tensor's own for every erased row."""
    figures = {"rows_searched": 0, "rows_mute": 0}

    def counted() -> Iterator[Probes]:
        for one in chain.from_iterable(probes(source.root, tensor) for tensor in erased_tensors(source, plan)):
            figures["rows_searched"] += len(one.prints)
            figures["rows_mute"] += one.mute
            yield one

    hits: Hits = {}
    undecided: dict[str, None] = {}
    for batch in batches(counted()):
        for file in files:
            search(source.root, batch, _parts(folder, file, equal.get(file, []), undecided), hits)
    ordered = sorted(hits.values(), key=lambda hit: (hit.file, hit.member or "", hit.first, hit.tensor.info.name))
    return ordered, tuple(undecided), figures


def _parts(folder: Path, file: str, equal: list[Span], undecided: dict[str, None]) -> Iterator[Part]:
    size = (folder / file).stat().st_size
    spans = [window_span(span, size) for span in without((0, size), equal)]
    yield from file_parts(folder, file, spans, OVERLAP)
    for part in packed_parts(folder, file, OVERLAP):
        if isinstance(part, Unread):
            undecided[printable(f"{part.file}: {part.reason}")] = None
        else:
            yield part


def _finding(hit: Hit) -> Finding:
    info = hit.tensor.info
    whole = hit.tensor.kept is None and (len(info.shape) < 2 or len(hit.rows) == info.numel // info.shape[-1])
    rows = sorted(hit.rows)
    listed = ", ".join(map(str, rows[:SHOWN])) + (f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else "")
    named = info.name if whole else f"{'row' if len(rows) == 1 else 'rows'} {listed} of {info.name}"
    what = f"holds the bytes of {named}, which the plan {'replaces' if hit.tensor.replaced else 'erases'}"
    return Finding(rule=SEARCH, file=hit.file, what=what, offset=hit.first, member=hit.member)
