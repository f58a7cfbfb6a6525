"""Computed data of tensors, which no byte of the source is: the values file that stands beside a plan.

`plan.json` has the SHA-256 of the data, `plan.safetensors` the data, under the source's names and in the shape that
the tensors have in the output. The file may come from elsewhere, and is checked like a weight file. Nothing here
needs torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collapse.canonical import CHUNK
from collapse.checkpoint import TensorInfo, read_header
from collapse.errors import CheckpointError, PlanError
from collapse.plan import Plan, Replace
from collapse.rewrite.free import added_tensors
from collapse.rewrite.layout import header, stored
from collapse.rewrite.tensors import OutputTensor, Piece, output_name

SUFFIX = ".safetensors"
AGAIN = "make a new plan, and keep both of its files together"


@dataclass(frozen=True)
class Values:
    """The new data of tensors, by the source's name, in safetensors files below `root`, an absolute path.

    Only headers are in memory. What `tensors` says of a file was checked when it was opened, the data were not.
    """

    root: Path
    tensors: Mapping[str, TensorInfo]

    def piece(self, name: str) -> Piece:
        """Return where the data of `name` lie; raises `PlanError` where there are none."""
        info = self._info(name)
        return Piece(str(self.root / info.file), info.start, info.stop)

    def place(self, name: str) -> tuple[Path, str]:
        """Return the safetensors file that has the data of `name`, and what it calls them; raises `PlanError`."""
        info = self._info(name)
        return self.root / info.file, info.name

    def digest(self, name: str) -> str:
        """Return the SHA-256 (hex) of the data of `name`, read in constant memory; raises `PlanError`."""
        info = self._info(name)
        return data_digest(self.root / info.file, info)

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise PlanError("no values are given for the tensor, which the plan computes", where=name, fix=AGAIN)
        return self.tensors[name]


def data_chunks(path: Path, info: TensorInfo) -> Iterator[bytes]:
    """Yield the data of a tensor of the file at `path` in pieces of at most 4 MiB; fewer where it is cut short."""
    with path.open("rb") as stream:
        stream.seek(info.start)
        left = info.nbytes
        while left > 0 and (piece := stream.read(min(CHUNK, left))):
            yield piece
            left -= len(piece)


def data_digest(path: Path, info: TensorInfo) -> str:
    """Return the SHA-256 (hex) of the data of a tensor of the file at `path`, read in constant memory."""
    total = hashlib.sha256()
    for piece in data_chunks(path, info):
        total.update(piece)
    return total.hexdigest()


def open_values(path: Path) -> Values:
    """Return what the values file at `path` holds; raises `PlanError` where it is missing or damaged."""
    try:
        infos = read_header(path, path.name)
    except CheckpointError as error:
        reason = error.what if path.exists() else "the values file of the plan is missing"
        raise PlanError(reason, where=str(path), fix=AGAIN) from None
    except OSError as error:
        raise PlanError(f"cannot be read ({error.strerror})", where=str(path), fix=AGAIN) from None
    return Values(path.parent.absolute(), {info.name: info for info in infos})


def values_path(plan_path: Path) -> Path:
    """Return where the values of a plan file stand: `plan.json` has them in `plan.safetensors`."""
    if plan_path.suffix == SUFFIX:
        raise PlanError("a plan of that name leaves none for its values", where=str(plan_path), fix="name it .json")
    return plan_path.with_suffix(SUFFIX)


def save_plan(plan: Plan, values: Values | None, path: Path) -> None:
    """Write `plan` to `path` and, where it computes tensors, their values beside it.

    Raises `PlanError`, before anything is written, where `values` are not those of the plan.
    """
    digests = plan_digests(plan)
    require_digests(values, digests)
    if values is not None and digests:
        place = values_path(path)
        draft = place.with_name(f".{place.name}.tmp")  # the values may be those of an earlier plan of the same name
        try:
            _write(draft, values, digests)
            draft.replace(place)
        finally:
            draft.unlink(missing_ok=True)
    plan.save(path)


def _write(path: Path, values: Values, names: Iterable[str]) -> None:
    forms = {name: values.tensors[name] for name in names}
    tensors = stored([OutputTensor(name, info.dtype, info.shape, None) for name, info in forms.items()])
    with path.open("wb") as stream:
        stream.write(header(tensors))
        for tensor in tensors:
            info = forms[tensor.name]
            stream.writelines(data_chunks(values.root / info.file, info))


def load_values(plan: Plan, path: Path) -> Values | None:
    """Return the values of the plan at `path`; None where it computes nothing, and no file is looked for.

    Raises `PlanError` where the file is missing or damaged, has a tensor too many or too few, or other data.
    """
    digests = plan_digests(plan)
    if not digests:
        return None
    place = values_path(path)
    values = open_values(place)
    for name in sorted(values.tensors.keys() - digests.keys()):
        raise PlanError(f"has a tensor {name}, which the plan does not compute", where=str(place), fix=AGAIN)
    require_digests(values, digests)
    return values


def values_of(output: Path, tensors: Iterable[TensorInfo], plan: Plan) -> Values:
    """Return the computed ones among the `tensors` of an output directory; whether their data are right is not said."""
    places = {info.name: info for info in tensors}
    names = ((name, output_name(plan, name)) for name in plan_digests(plan))
    return Values(output.absolute(), {name: places[new] for name, new in names if new in places})


def plan_digests(plan: Plan) -> dict[str, str]:
    """Return the SHA-256 (hex) of the data of every tensor that the plan replaces or adds, by its name in the values.

    That of a replaced one is the source's. Raises `PlanError` for a tensor that is added twice.
    """
    replaced = {name: digest for rewrite in plan.of_kind(Replace) for name, digest in rewrite.tensors.items()}
    return replaced | {name: added.sha256 for name, added in added_tensors(plan).items()}


def require_values(expected: Sequence[OutputTensor], values: Values | None) -> None:
    """Raise `PlanError` where a computed tensor of the output has no values, or ones of another form or digest."""
    digests: dict[str, str] = {}
    for tensor in expected:
        if tensor.values is None or tensor.digest is None:
            continue
        digests[tensor.values] = tensor.digest
        found = values.tensors.get(tensor.values) if values else None
        if found is not None and (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
            wrong = f"the values are {found.dtype} {list(found.shape)}, the output needs {tensor.dtype}"
            raise PlanError(f"{wrong} {list(tensor.shape)}", where=tensor.values, fix=AGAIN)
    require_digests(values, digests)


def require_digests(values: Values | None, digests: Mapping[str, str]) -> None:
    """Raise `PlanError` where the values of a tensor are missing, or other data than those of the plan."""
    for name, digest in digests.items():
        if values is None:
            raise PlanError("the plan computes the tensor, but no values are given", where=name, fix=AGAIN)
        found = values.digest(name)
        if found != digest:
            wrong = f"the values have the SHA-256 {found[:12]}, the plan says {digest[:12]}"
            raise PlanError(wrong, where=name, fix=AGAIN)
