"""A Hugging Face checkpoint on disk, read lazily: headers first, tensor bytes only when asked for.

Nothing here runs code from the model folder, opens a pickle, or follows an index out of the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from collapse.canonical import digest
from collapse.errors import CheckpointError
from collapse.hashing import file_digests
from collapse.quantised import Group, Quantisation, quantisation, scheme_of
from collapse.search_path import PATH_FILE
from collapse.untrusted import check_config, loads, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100_000_000  # the limit of the safetensors library itself
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
MAX_RANK = 64
TWIN = re.compile(r"(pytorch_model|adapter_model|model|consolidated)([._-].*)?\.(bin|pt|pth|ckpt)", re.I | re.S)
SIDE_SUFFIXES = (".json", ".jinja", ".model", ".txt")
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
OWN_FILES = ("collapse.json", "report.json", PATH_FILE)
FOREIGN_WEIGHTS = (*PICKLED, ".h5", ".msgpack", ".onnx", ".pt2", ".gguf")


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `start` and `stop` are byte offsets in `file`, a name relative to the root."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return self.stop - self.start

    @property
    def numel(self) -> int:
        """Number of elements."""
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True)
class Checkpoint:
    """A local checkpoint directory.

    `config` is config.json as it stands; `tensors` maps every tensor name in the safetensors files to its
    place, in the order of (file, offset). `label` is how reports call it: never a path of this machine.
    """

    root: Path
    label: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @cached_property
    def weight_files(self) -> tuple[str, ...]:
        """Names of the safetensors files, sorted."""
        return tuple(sorted({info.file for info in self.tensors.values()}))

    @cached_property
    def file_digests(self) -> Mapping[str, str]:
        """SHA-256 of every file that defines the model: weights, config, tokenizer, templates."""
        names = (*self.weight_files, *self.side_files)
        return dict(zip(names, file_digests([self.root / name for name in names]), strict=True))

    @cached_property
    def side_files(self) -> tuple[str, ...]:
        """Names of the non-weight files that travel with the model, sorted."""
        names = []
        for path in sorted(self.root.iterdir()):
            if path.is_file() and path.suffix in SIDE_SUFFIXES and not _is_index(path.name):
                names.append(path.name)
        return tuple(name for name in names if name not in OWN_FILES)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the names and digests of all files that define the model."""
        return digest(dict(self.file_digests))

    @cached_property
    def quantisation(self) -> Quantisation | None:
        """How the weights are quantised, and which tensors are one weight; None where they are not."""
        return quantisation(scheme_of(self.config), self.tensors)

    def group(self, name: str) -> Group | None:
        """Return the quantised weight that tensor `name` is part of, None where it is none."""
        return self.quantisation.by_tensor.get(name) if self.quantisation else None

    def is_weight(self, name: str) -> bool:
        """Whether tensor `name` stands for a weight in plans: the main one of a quantised weight, not a companion."""
        group = self.group(name)
        return group is None or name == group.main

    def parameters(self, names: Iterable[str]) -> int:
        """Return how many parameters the tensors hold; a quantised weight counts by its own elements, once."""
        groups = {name: self.group(name) for name in names}
        plain = sum(self.tensors[name].numel for name, group in groups.items() if group is None)
        return plain + sum(group.numel for name, group in groups.items() if group is not None and name == group.main)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors, without headers."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def model_type(self) -> str:
        """The `model_type` of config.json."""
        return str(self.config["model_type"])

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return a side file as JSON, or None where there is none."""
        path = self.root / name
        return read_json(path) if path.is_file() else None

    def read_bytes(self, name: str) -> bytes:
        """Return the data of tensor `name`."""
        info = self.tensors[name]
        with (self.root / info.file).open("rb") as stream:
            stream.seek(info.start)
            return stream.read(info.nbytes)

    @classmethod
    def open(cls, spec: str | Path) -> Checkpoint:
        """Open a checkpoint directory; raises `CheckpointError` naming the file and what is wrong with it.

        GGUF files and hub ids are resolved to a local directory by `collapse.sources.resolve`.
        """
        root = Path(spec)
        if not root.is_dir():
            raise CheckpointError("no such model directory", where=str(spec), fix="give a directory with config.json")
        if not (root / "config.json").is_file():
            raise CheckpointError("no config.json", where=str(spec), fix="give the directory of a Hugging Face model")
        _refuse_links(root)
        config = read_json(root / "config.json")
        check_config(config, str(spec))
        if not isinstance(config.get("model_type"), str):
            raise CheckpointError("config.json has no model_type", where=str(spec), fix="give a transformers config")
        scheme_of(config)  # refused before anything is read
        found = cls(root, root.resolve().name, config, _read_headers(root))
        _ = found.quantisation
        return found


def _read_headers(root: Path) -> dict[str, TensorInfo]:
    indexed = root / INDEX
    if indexed.is_file():
        weight_map = read_json(indexed, MAX_HEADER).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(map(_is_name, weight_map.values())):
            raise CheckpointError("no weight_map of names to files", where=str(indexed), fix="fetch the index again")
        files = sorted({_safe_name(root, name, indexed) for name in set(weight_map.values())})
    elif (root / SINGLE).is_file():
        weight_map, files = None, [_safe_name(root, SINGLE, root)]
    else:
        raise _no_weights(root)
    _refuse_strays(root, files)
    tensors: dict[str, TensorInfo] = {}
    for name in files:
        for info in read_header(root / name, name):
            if info.name in tensors:
                raise CheckpointError(f"tensor {info.name} is also in {tensors[info.name].file}", where=name)
            tensors[info.name] = info
    for tensor, name in (weight_map or {}).items():
        if tensor not in tensors or tensors[tensor].file != name:
            raise CheckpointError(f"the index promises {tensor}, which is not there", where=str(name))
    return tensors


def _no_weights(root: Path) -> CheckpointError:
    others = sorted(p.name for p in root.iterdir() if p.suffix in FOREIGN_WEIGHTS or p.suffix == ".safetensors")
    if any(name.endswith(PICKLED) for name in others):
        return CheckpointError(
            f"only pickled weights ({others[0]}), which can run code when opened",
            where=str(root),
            fix="convert them to safetensors first",
        )
    return CheckpointError(f"no {SINGLE} and no {INDEX}", where=str(root), fix="give a safetensors checkpoint")


def _safe_name(root: Path, name: str, where: Path) -> str:
    """Return `name` if it is a plain file right inside `root`; symlinks may lead to a hub cache's blobs."""
    pure = PurePosixPath(name)
    if "\0" in name or "\\" in name or pure.is_absolute() or len(pure.parts) != 1 or name in {".", ".."}:
        raise CheckpointError(f"names a file outside the model: {name!r}", where=str(where), fix="do not trust it")
    path = root / name
    if not path.is_file():
        raise CheckpointError(f"the weight file {name} is missing or no plain file", where=str(root))
    if path.is_symlink() and not _within_cache(path, root):
        raise CheckpointError(f"the weight file {name} is a link out of the model", where=str(root))
    return name


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_index(name: str) -> bool:
    """Whether a file says which weight files there are: ours is written anew, and others' would be of other files."""
    return name.endswith(".index.json") or (".index." in name and name.endswith(".json"))


def _refuse_links(root: Path) -> None:
    """Refuse files that travel with a model and lie elsewhere: a copy would carry off what may be anybody's."""
    for path in sorted(root.iterdir()):
        if path.suffix not in SIDE_SUFFIXES:
            continue
        if path.is_symlink() and not _within_cache(path, root):
            raise CheckpointError(f"{path.name} is a link out of the model", where=str(root), fix="do not trust it")
        if not path.is_file():
            raise CheckpointError(f"{path.name} is missing or no plain file", where=str(root), fix="remove it")


def _within_cache(path: Path, root: Path) -> bool:
    """A hub cache links `snapshots/<revision>/<name>` to `blobs/<digest>` two levels up; nothing else is followed."""
    target, home = path.resolve(), root.resolve()
    cached = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    return cached or target.is_relative_to(home)


def _refuse_strays(root: Path, files: list[str]) -> None:
    strays = sorted(p.name for p in root.iterdir() if p.suffix == ".safetensors" and p.name not in files)
    if strays:
        raise CheckpointError(
            f"weight file {strays[0]} is not part of the model",
            where=str(root),
            fix="move it out of the directory",
        )
    twins = sorted(path.name for path in root.iterdir() if is_pickled_twin(path.name))
    if twins:
        raise CheckpointError(
            f"pickled weights ({twins[0]}) beside the safetensors: never opened here, but another loader may take them",
            where=str(root),
            fix="delete them, or give a directory without them",
        )


def is_pickled_twin(name: str) -> bool:
    """Whether a file beside the safetensors is by its name a pickled copy of the weights.

    The rule is by the names that loaders look for: transformers' `pytorch_model` and peft's `adapter_model`, `model`
    of many trainers, and `consolidated` of the first release of Llama and Mistral; then perhaps a variant or a number
    after `.`, `-` or `_`, and an ending of pickles. What a trainer leaves beside them (`training_args.bin`,
    `optimizer.pt`, `scheduler.pt`, `rng_state.pth`) is no weights by that rule; it stays behind, as all pickles do.
    """
    return TWIN.fullmatch(name) is not None


def read_header(path: Path, name: str) -> tuple[TensorInfo, ...]:
    """Read and check the header of one safetensors file; the tensors come in order of offset.

    Raises `CheckpointError` as `header_entries` does, and on bytes that overlap or that no tensor owns.
    """
    end, infos = header_entries(path, name)
    for info in infos:
        if info.start != end:
            kind = "overlap" if info.start < end else "leave a gap"
            raise CheckpointError(f"the bytes of {info.name} {kind}", where=name, fix="fetch it again")
        end = info.stop
    size = path.stat().st_size
    if end != size:
        what = f"cut short: {end} bytes promised, {size} there" if end > size else f"{size - end} bytes after the data"
        raise CheckpointError(what, where=name, fix="fetch it again")
    return infos


def header_entries(path: Path, name: str) -> tuple[int, tuple[TensorInfo, ...]]:
    """Return where the header of a safetensors file ends, and the tensors that it lists, in order of offset.

    Whether they cover the rest of the file is not looked at. Raises `CheckpointError` on a header that is cut
    short, bad JSON, duplicate names, and a size that does not match dtype and shape.
    """
    if not path.is_file():  # opening a named pipe would wait for ever
        raise CheckpointError("is no plain file", where=name, fix="remove it")
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > MAX_HEADER or 8 + length > size:
            raise CheckpointError("the safetensors header is damaged or cut short", where=name, fix="fetch it again")
        raw = stream.read(length)
    try:
        header = loads(raw, unique=True)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the safetensors header is damaged ({error})", where=name, fix="fetch it again"
        ) from None
    metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("the safetensors header is no map of tensors", where=name, fix="fetch it again")
    base = 8 + length
    infos = (_tensor_info(key, entry, name, base) for key, entry in header.items())
    return base, tuple(sorted(infos, key=lambda info: (info.start, info.stop)))


def _tensor_info(name: str, entry: Any, file: str, base: int) -> TensorInfo:
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, start, stop)) and DTYPE_BITS[dtype] > 0
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise CheckpointError(
            f"the entry of {name} is damaged or of an unknown dtype", where=file, fix="fetch it again"
        )
    info = TensorInfo(name, dtype, shape, file, base + start, base + stop)
    if _overflows(shape) or info.numel * DTYPE_BITS[dtype] != info.nbytes * 8:
        raise CheckpointError(
            f"the size of {name} does not match its dtype and shape", where=file, fix="fetch it again"
        )
    return info


def _overflows(shape: tuple[int, ...]) -> bool:
    """Whether a library that counts elements in 64 bits would lose count, even where a size is 0."""
    return len(shape) > MAX_RANK or prod(size for size in shape if size) >= 1 << 63


def same_file(left: Path, right: Path) -> bool:
    """Whether both paths name the same existing file or directory."""
    return left.exists() and right.exists() and left.samefile(right)
