"""Says from the files alone whether the weights of a site are gone; quick, and without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from collapse.canonical import CHUNK, chunks
from collapse.checkpoint import FOREIGN_WEIGHTS, TensorInfo, read_header
from collapse.errors import CheckpointError
from collapse.manifest import MANIFEST, load_manifest
from collapse.plan import DropLayers, Plan, Record, ShortCircuit, StandIn
from collapse.rewrite.free import added_tensors
from collapse.rewrite.origin import source_name
from collapse.rewrite.tensors import PLACEHOLDER_DTYPE, PLACEHOLDER_SHAPE, erased_names, layer_number

Status = Literal["ERASED", "ZEROED", "ACTIVE"]


class Probe(Record):
    """The answer. `alive` lists the tensors of the site that hold anything but zeros."""

    status: Status
    reason: str
    alive: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Present:
    """A tensor of the files, and what the source calls it: a layer that stays may have another number now."""

    name: str
    info: TensorInfo

    @property
    def shown(self) -> str:
        return self.name if self.name == self.info.name else f"{self.name} (here {self.info.name})"


@dataclass(frozen=True)
class _Site:
    """What matches a pattern: in the plan, and in the files. All names are the source's."""

    pattern: str
    erased: tuple[str, ...]
    placeholders: frozenset[str]
    switches: tuple[str, ...]
    present: tuple[_Present, ...]


def probe(folder: Path, pattern: str) -> Probe:
    """Say what became of the tensors that `pattern` matches.

    `pattern` is a glob on tensor names and on the module paths that lead to them; both are the source's, also in an
    output whose layers were renumbered or whose tensors were renamed. ERASED: the plan took them out
    and no file has them, but for placeholders of 16 zero bytes. ZEROED: they are there, all bytes zero. ACTIVE:
    at least one holds something else. Raises `CheckpointError` where the directory is none of a model, and where
    the pattern matches nothing at all: a typing error must not pass as ERASED.
    """
    site = _find(folder, pattern)
    if not (site.erased or site.switches or site.present):
        message = f"no tensor or module matches {pattern!r}, in the plan or in the files"
        raise CheckpointError(message, where=str(folder), fix="check the pattern, for instance '*.mlp.*'")
    stands_in = {tensor.name for tensor in site.present if _is_placeholder(folder, tensor, site)}
    rest = [tensor for tensor in site.present if tensor.name not in stands_in]
    alive = tuple(tensor.shown for tensor in rest if not _is_zero(folder, tensor.info))
    if alive:
        reason = f"{len(alive)} tensors hold weights: {_listed(alive)}"
        return Probe(status="ACTIVE", reason=reason, alive=alive)
    if rest:
        names = [tensor.shown for tensor in rest]
        return Probe(status="ZEROED", reason=f"{len(names)} tensors are in the files, all zero: {_listed(names)}")
    twin = _named_elsewhere(folder, (*site.erased, *stands_in))
    if twin:
        reason = f"{twin[1]} is named in {twin[0]}, which transformers might load"
        return Probe(status="ACTIVE", reason=reason, alive=(twin[1],))
    return Probe(status="ERASED", reason=_erased_reason(site, stands_in))


def _find(folder: Path, pattern: str) -> _Site:
    if not folder.is_dir():
        raise CheckpointError("no such directory", where=str(folder), fix="give the directory of a model")
    files = sorted(folder.rglob("*.safetensors"))
    plan = load_manifest(folder).plan if (folder / MANIFEST).is_file() else None
    if not files and plan is None:
        raise CheckpointError(f"neither weights nor {MANIFEST}", where=str(folder), fix="give the directory of a model")
    infos = [info for path in files for info in read_header(path, path.relative_to(folder).as_posix())]
    tensors = [_Present(source_name(plan, info.name) if plan else info.name, info) for info in infos]
    added = added_tensors(plan) if plan else {}  # a map in place of a module is not what was there
    present = tuple(tensor for tensor in tensors if _matches(tensor.name, pattern) and tensor.name not in added)
    if plan is None:
        return _Site(pattern, (), frozenset(), (), present)
    switches = tuple(site for site in _gone_sites(plan) if _matches(site, pattern))
    cut = (*plan.of_kind(ShortCircuit), *plan.of_kind(StandIn))
    by_site = {name for rewrite in cut if rewrite.site in switches for name in rewrite.tensors}
    by_site |= {name for site, name in _dropped(plan) if site in switches}
    erased, placeholders = erased_names(plan)
    gone = sorted(name for name in erased if name in by_site or _matches(name, pattern))
    named = tuple(t for t in tensors if t.name in gone and t not in present and t.name not in added)
    return _Site(pattern, tuple(gone), placeholders, switches, (*present, *named))


def _gone_sites(plan: Plan) -> Iterator[str]:
    """Yield the modules that the plan takes out for good; a specialised config takes none."""
    yield from (rewrite.site for rewrite in plan.of_kind(ShortCircuit) if rewrite.stage == "erase")
    yield from (rewrite.site for rewrite in plan.of_kind(StandIn))
    yield from dict.fromkeys(site for site, _ in _dropped(plan))


def _dropped(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield (module path, tensor) of every dropped block."""
    for rewrite in plan.of_kind(DropLayers):
        yield from ((f"{rewrite.site}.{layer_number(rewrite, name)}", name) for name in rewrite.tensors)


def _matches(name: str, pattern: str) -> bool:
    """Whether the glob matches the name, or a module path that leads to it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _is_placeholder(folder: Path, tensor: _Present, site: _Site) -> bool:
    form = (tensor.info.dtype, tensor.info.shape) == (PLACEHOLDER_DTYPE, PLACEHOLDER_SHAPE)
    return form and tensor.name in site.placeholders and _is_zero(folder, tensor.info)


def _is_zero(folder: Path, info: TensorInfo) -> bool:
    with (folder / info.file).open("rb") as stream:
        stream.seek(info.start)
        left = info.nbytes
        while left > 0:
            piece = stream.read(min(CHUNK, left))
            if piece.count(0) != len(piece):
                return False
            left -= len(piece)
    return True


def _named_elsewhere(folder: Path, names: Iterable[str]) -> tuple[str, str] | None:
    """Look through every byte of other weight formats for an erased name; return (file, name)."""
    wanted = [(name, name.encode()) for name in names]
    for path in sorted(folder.rglob("*")):
        if path.suffix not in FOREIGN_WEIGHTS or not path.is_file():
            continue
        tail = b""
        for piece in chunks(path):
            window = tail + piece
            found = next((name for name, raw in wanted if raw in window), None)
            if found is not None:
                return path.relative_to(folder).as_posix(), found
            tail = window[-max((len(raw) for _, raw in wanted), default=1) :]
    return None


def _erased_reason(site: _Site, stands_in: set[str]) -> str:
    if not site.erased:
        return f"switched off in config.json at {_listed(site.switches)}; no file has such a tensor"
    reason = f"the plan erases {len(site.erased)} tensors that match, and no file has them"
    return f"{reason}, but for {len(stands_in)} placeholders of 16 zero bytes" if stands_in else reason


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
