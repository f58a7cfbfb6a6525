"""The tensor interpreter: what every tensor of the output is, as byte ranges of the source.

No tensor is computed here: each byte of the output's weights is a byte of the source, belongs to a placeholder of
zeros, or to data whose SHA-256 the plan has. Writer and verifier both follow these pieces, and neither needs torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

from collapse.checkpoint import DTYPE_BITS, Checkpoint, TensorInfo
from collapse.errors import PlanError
from collapse.plan import DropLayers, Erase, IndexSet, Narrow, Plan, Reroot, ShortCircuit, StandIn, is_free
from collapse.rewrite.config import config_edits
from collapse.rewrite.free import added_tensors
from collapse.rewrite.module_lists import require_modules
from collapse.rewrite.quantised import narrow_rows, require_whole_groups
from collapse.rewrite.replaced import replaced_digests

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
PLACEHOLDER_DTYPE, PLACEHOLDER_SHAPE, PLACEHOLDER = "F32", (4,), bytes(16)


@dataclass(frozen=True)
class Piece:
    """Bytes `[start, stop)` of `file`: a weight file of the source, or the absolute path of a values file."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the output.

    `source` is the tensor that it is cut from, None for a placeholder and for an added one; `kept` maps a narrowed
    dimension to the rows that stay. A replaced tensor has the source's name and dtype but none of its bytes: `digest`
    is the SHA-256 (hex) of its data, as it is of an added one, `values` its name in the values file, and no row is
    `kept`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: TensorInfo | None
    kept: Mapping[int, IndexSet] = field(default_factory=dict)
    digest: str | None = None
    values: str | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return self.numel * DTYPE_BITS[self.dtype] // 8

    @property
    def is_placeholder(self) -> bool:
        """Whether the tensor only stands in for one that is gone."""
        return self.source is None and self.digest is None

    def pieces(self) -> Iterator[Piece | bytes]:
        """Yield what the data consists of, in order: ranges of the source, or literal bytes.

        Of a replaced or added tensor that is nothing: its bytes are in a values file.
        """
        if self.is_placeholder:
            yield PLACEHOLDER
        if self.source is None or self.digest is not None:
            return
        bits = DTYPE_BITS[self.dtype]
        for start, stop in _coalesced(_element_runs(self.source.shape, self.kept)):
            yield Piece(self.source.file, self.source.start + start * bits // 8, self.source.start + stop * bits // 8)


def output_tensors(checkpoint: Checkpoint, plan: Plan) -> tuple[OutputTensor, ...]:
    """Return every tensor of the output, in the source's order, then those that the plan adds.

    Raises `PlanError` where the plan does not fit the checkpoint.
    """
    erased, placeholders = _erased(checkpoint, plan)
    require_whole_groups(checkpoint, erased, placeholders, partial(output_name, plan))
    narrowed = _narrowed(checkpoint, plan)
    dropped = {name for rewrite in plan.of_kind(DropLayers) for name in rewrite.tensors}
    for name in narrowed:
        if name in erased - dropped:  # rows are narrowed in every layer, also in one that goes as a whole
            raise PlanError(f"tensor {name} is both erased and narrowed", where="plan", fix="make a new plan")
    replaced = replaced_digests(checkpoint, plan, erased)
    survivors = tuple(
        _output(info, output_name(plan, name), narrowed.get(name, {}), name in placeholders, replaced.get(name))
        for name, info in checkpoint.tensors.items()
        if name not in erased or name in placeholders
    )
    added = tuple(
        OutputTensor(output_name(plan, name), tensor.dtype, tensor.shape, None, {}, tensor.sha256, name)
        for name, tensor in added_tensors(plan).items()
    )
    found = (*survivors, *added)
    _require_distinct(found)
    names = {tensor.source.name: tensor.name for tensor in survivors if tensor.source is not None}
    edited = config_edits(checkpoint.config, plan) if checkpoint.quantisation else {}
    require_modules(checkpoint, edited, names, plan.of_kind(DropLayers), plan.of_kind(Reroot))
    _require_even(found, plan)
    return found


def parameters_of(checkpoint: Checkpoint, tensors: Sequence[OutputTensor]) -> int:
    """Return how many parameters the output holds; a quantised weight counts by its own elements, once."""
    total = 0
    for tensor in tensors:
        group = None if tensor.source is None else checkpoint.group(tensor.source.name)
        if group is None or tensor.source is None:
            total += tensor.numel
        elif tensor.source.name == group.main:
            total += group.numel * tensor.numel // tensor.source.numel
    return total


def output_name(plan: Plan, name: str) -> str:
    """Return what the output calls the source's tensor `name`: layers are renumbered, then names re-rooted."""
    renumbered = sorted((_renumbered(dropped, name) for dropped in plan.of_kind(DropLayers)), reverse=True)
    for start, stop, number in renumbered:  # prefixes are the source's, so that later numbers are replaced first
        name = name[:start] + number + name[stop:]
    for rooted in plan.of_kind(Reroot):
        left, right = next((pair for pair in rooted.names if name.startswith(pair[0])), ("", ""))
        name = right + name[len(left) :]
    return name


def layer_number(dropped: DropLayers, name: str) -> int | None:
    """Return the number of the block that a tensor of the files belongs to, None for one outside the list."""
    number, dot, _ = name.removeprefix(dropped.prefix).partition(".")
    inside = name.startswith(dropped.prefix) and dot and number.isdecimal()
    return int(number) if inside else None


def _renumbered(dropped: DropLayers, name: str) -> tuple[int, int, str]:
    """Return where in the name the block's number stands, and the new one; an empty place where it has none."""
    number = layer_number(dropped, name)
    if number is None or number not in dropped.kept:
        return 0, 0, ""
    start = len(dropped.prefix)
    return start, start + len(str(number)), str(list(dropped.kept).index(number))


def erased_names(plan: Plan) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the tensors that the plan takes out of the file, and of those that leave a placeholder."""
    erased = {
        name
        for kind in (Erase, DropLayers, Reroot, StandIn)
        for rewrite in plan.of_kind(kind)
        for name in rewrite.tensors
    }
    shorted = [rewrite for rewrite in plan.of_kind(ShortCircuit) if rewrite.stage == "erase"]
    erased |= {name for rewrite in shorted for name in rewrite.tensors}
    placeholders = {name for rewrite in shorted if rewrite.placeholder for name in rewrite.tensors}
    return frozenset(erased), frozenset(placeholders)


def token_narrow(plan: Plan) -> Narrow | None:
    """Return the rewrite that renumbers the token ids, if there is one; two would contradict each other."""
    found = [rewrite for rewrite in plan.of_kind(Narrow) if rewrite.relabels == "tokens"]
    if len(found) > 1:
        raise PlanError("token ids are renumbered twice", where=found[1].site, fix="make a new plan")
    return found[0] if found else None


def _output(
    info: TensorInfo, name: str, kept: Mapping[int, IndexSet], placeholder: bool, digest: str | None
) -> OutputTensor:
    if placeholder:
        return OutputTensor(name, PLACEHOLDER_DTYPE, PLACEHOLDER_SHAPE, None)
    shape = tuple(len(kept[dim]) if dim in kept else size for dim, size in enumerate(info.shape))
    _require_whole_bytes(info, kept)
    if digest is not None:
        return OutputTensor(name, info.dtype, shape, info, {}, digest, info.name)
    return OutputTensor(name, info.dtype, shape, info, kept)


def _erased(checkpoint: Checkpoint, plan: Plan) -> tuple[frozenset[str], frozenset[str]]:
    token_narrow(plan)
    for kind in (Erase, ShortCircuit, DropLayers, Reroot, StandIn):
        for rewrite in plan.of_kind(kind):
            for name in rewrite.tensors:
                _require_tensor(checkpoint, name, rewrite.site)
    _require_plain(checkpoint, plan)
    for dropped in plan.of_kind(DropLayers):
        _require_whole_blocks(checkpoint, dropped)
    return erased_names(plan)


def _require_plain(checkpoint: Checkpoint, plan: Plan) -> None:
    """Refuse the free layout of quantised weights, and maps in place of modules that would leave tensors behind."""
    free = [rewrite for rewrite in plan.rewrites if is_free(rewrite)]
    if free and checkpoint.quantisation is not None:
        raise PlanError("a quantised model has no free layout", where=free[0].site, fix="plan with --layout native")
    gone = erased_names(plan)[0]
    for rewrite in plan.of_kind(StandIn):
        left = [name for name in checkpoint.tensors if name.startswith(rewrite.prefix) and name not in gone]
        strange = [name for name in rewrite.tensors if not name.startswith(rewrite.prefix)]
        for name in (*left, *strange):
            reason = "belongs to the module and stays" if name in left else "goes, but does not belong to the module"
            raise PlanError(f"the tensor {name} {reason}", where=rewrite.site, fix="make a new plan")


def _require_whole_blocks(checkpoint: Checkpoint, dropped: DropLayers) -> None:
    """A dropped block goes with all its tensors, and nothing goes with it that is not its own."""
    _require_rows(dropped)
    if set(dropped.tensors) != {name for name in checkpoint.tensors if _goes(dropped, name)}:
        raise PlanError("does not list just the tensors of its blocks", where=dropped.site, fix="make a new plan")


def _goes(dropped: DropLayers, name: str) -> bool:
    number = layer_number(dropped, name)
    return number is not None and number < dropped.size and number not in dropped.kept


def _require_distinct(tensors: Sequence[OutputTensor]) -> None:
    names = Counter(tensor.name for tensor in tensors)
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:
        raise PlanError("two tensors would get one name", where=twice, fix="make a new plan")


def _require_even(tensors: Sequence[OutputTensor], plan: Plan) -> None:
    """Refuse counts that differ between layers that were alike: no config of plain transformers can say so.

    A rewrite whose config edits lead into a list, an element for each layer, says it; so does the free layout, where a
    module has fields of its own.
    """
    for dropped in plan.of_kind(DropLayers):
        counts = {(other.size, len(other.kept)) for other in plan.of_kind(DropLayers) if _alike(other, dropped)}
        whole = {_list_of(dropped, tensor.name) for tensor in tensors} - {None, dropped.prefix}
        if len(counts) > 1 or whole - {other.prefix for other in plan.of_kind(DropLayers)}:
            raise PlanError("the lists of other layers keep another number", where=dropped.site, fix="make a new plan")
    local = {rewrite.site for rewrite in plan.of_kind(Narrow) if rewrite.local}
    said = [rewrite for rewrite in plan.of_kind(Narrow) if rewrite.site in local or _by_layer(rewrite)]
    listed = {axis.tensor for rewrite in said for axis in rewrite.axes}
    shapes: dict[tuple[str, tuple[int, ...]], OutputTensor] = {}
    for tensor in tensors:
        if tensor.source is None or tensor.source.name in listed:
            continue
        first = shapes.setdefault((_without_numbers(tensor.name), tensor.source.shape), tensor)
        if first.shape != tensor.shape:
            message = f"keeps {list(tensor.shape)}, {first.name} keeps {list(first.shape)}"
            raise PlanError(message, where=tensor.name, fix="narrow all layers alike")


def _without_numbers(name: str) -> str:
    return NUMBER.sub("#", name)


def _alike(left: DropLayers, right: DropLayers) -> bool:
    return _without_numbers(left.prefix) == _without_numbers(right.prefix)


def _list_of(dropped: DropLayers, name: str) -> str | None:
    """Return the prefix of the list like that of `dropped`, in whatever layer, to which a tensor belongs."""
    depth = dropped.prefix.count(".")
    prefix = "".join(f"{part}." for part in name.split(".")[:depth])
    return prefix if _without_numbers(prefix) == _without_numbers(dropped.prefix) else None


def _by_layer(rewrite: Narrow) -> bool:
    return any(part.isdecimal() for path in rewrite.config for part in path.split("."))


def _narrowed(checkpoint: Checkpoint, plan: Plan) -> dict[str, dict[int, IndexSet]]:
    kept: dict[str, dict[int, IndexSet]] = {}
    for rewrite in plan.of_kind(Narrow):
        _require_rows(rewrite)
        for axis in rewrite.axes:
            _require_tensor(checkpoint, axis.tensor, rewrite.site)
            for name, rows in narrow_rows(checkpoint, rewrite, axis.tensor, axis.dim).items():
                dims = kept.setdefault(name, {})
                if dims.keys() & rows.keys():
                    raise PlanError("narrowed twice", where=f"{axis.tensor} dim {axis.dim}", fix="make a new plan")
                dims.update(rows)
    return kept


def _require_tensor(checkpoint: Checkpoint, name: str, site: str) -> TensorInfo:
    info = checkpoint.tensors.get(name)
    if info is None:
        raise PlanError(f"the checkpoint has no tensor {name}", where=site, fix="make a new plan for this source")
    return info


def _require_rows(rewrite: Narrow | DropLayers) -> None:
    if not rewrite.kept.runs:
        raise PlanError("no row is kept", where=rewrite.site, fix="make a new plan")
    if rewrite.kept.runs[-1][1] > rewrite.size or rewrite.kept.runs[0][0] < 0:
        wrong = f"row range {list(rewrite.kept.runs[-1])} is out of range for {rewrite.size} rows"
        raise PlanError(wrong, where=rewrite.site, fix="make a new plan")


def _require_whole_bytes(info: TensorInfo, kept: Mapping[int, IndexSet]) -> None:
    """Refuse to cut a tensor of 4- or 6-bit elements in the middle of a byte."""
    bits = DTYPE_BITS[info.dtype]
    if bits % 8 and kept and prod(info.shape[max(kept) + 1 :]) * bits % 8:
        raise PlanError(f"a row of {info.dtype} elements ends within a byte", where=info.name, fix="keep it whole")


def _element_runs(
    shape: tuple[int, ...], kept: Mapping[int, IndexSet], dim: int = 0, base: int = 0
) -> Iterator[tuple[int, int]]:
    """Yield the runs of element numbers that stay, of the part of the tensor from `base` at depth `dim`."""
    if dim == len(shape):
        yield base, base + 1
        return
    inner = prod(shape[dim + 1 :])
    if not any(later > dim for later in kept):
        for start, stop in kept[dim].runs if dim in kept else ((0, shape[dim]),):
            yield base + start * inner, base + stop * inner
        return
    for row in kept[dim] if dim in kept else range(shape[dim]):
        yield from _element_runs(shape, kept, dim + 1, base + row * inner)


def _coalesced(runs: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Join runs that touch, and drop empty ones."""
    current: tuple[int, int] | None = None
    for start, stop in runs:
        if current and current[1] == start:
            current = (current[0], stop)
        elif stop > start:
            if current:
                yield current
            current = (start, stop)
    if current:
        yield current
