"""Which files an output has: all of the manifest, nothing else, plain files of known formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from collapse.audit.findings import Finding
from collapse.checkpoint import FOREIGN_WEIGHTS
from collapse.manifest import FileRecord, file_names, record_of

WEIGHTS = ".safetensors"
OTHER_WEIGHTS = (*FOREIGN_WEIGHTS, ".npz", ".npy", ".pkl", ".pickle", ".tflite", ".pb", ".mlpackage", ".engine")
ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar", ".lz4")
MAGIC: Mapping[bytes, str] = {
    b"PK\x03\x04": "a zip archive, as .pt, .pt2 and .npz files are",
    b"PK\x05\x06": "an empty zip archive",
    b"GGUF": "a GGUF file",
    b"\x89HDF\r\n": "an HDF5 file",
    b"\x93NUMPY": "a NumPy array",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"\x1f\x8b": "gzip data",
    b"BZh": "bzip2 data",
    b"\xfd7zXZ\x00": "xz data",
    b"\x28\xb5\x2f\xfd": "zstd data",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!": "a rar archive",
}


def plain_files(folder: Path) -> tuple[str, ...]:
    """Return the names of the regular files below `folder`, manifest and signature left out; links are none."""
    return tuple(name for name in file_names(folder) if _is_plain(folder / name))


def is_safetensors(name: str, start: bytes) -> bool:
    """Whether a file is a weight file of ours, of which the first bytes are a length, and so can look like anything."""
    return name.endswith(WEIGHTS) and start[8:9] == b"{"


def inventory(folder: Path, listed: Mapping[str, FileRecord]) -> Iterator[Finding]:
    """Yield what is wrong with the set of files, compared with those that the manifest lists.

    Raises `OSError` where a file cannot be read.
    """
    names = file_names(folder)
    there = set(names)
    for name in listed:
        if name not in there:
            yield Finding(rule="file-missing", file=name, what="is listed in collapse.json, but missing")
    for name in names:
        yield from _file(folder, name, listed.get(name))


def _file(folder: Path, name: str, record: FileRecord | None) -> Iterator[Finding]:
    path = folder / name
    if not _is_plain(path):
        kind = "a link" if path.is_symlink() else "no plain file"
        yield Finding(rule="file-special", file=name, what=f"is {kind}")
        return
    foreign = _foreign(path)
    if foreign:
        yield Finding(rule="foreign-weights", file=name, what=foreign, offset=0)
    if record is None:
        rule, what = _unlisted(name)
        if not foreign:
            yield Finding(rule=rule, file=name, what=what)
    elif record_of(path) != record:
        size = path.stat().st_size
        what = f"has {size} bytes instead of {record.bytes}" if size != record.bytes else "has another SHA-256"
        yield Finding(rule="file-changed", file=name, what=f"{what}, says collapse.json")


def _is_plain(path: Path) -> bool:
    return not path.is_symlink() and path.is_file()


def _unlisted(name: str) -> tuple[str, str]:
    if WEIGHTS in (suffix.lower() for suffix in PurePosixPath(name).suffixes):
        return "stale-weights", "is a weight file that collapse.json does not list"
    return "file-unlisted", "is not listed in collapse.json"


def _foreign(path: Path) -> str | None:
    """Say what foreign format a file is of, by any part of its name or by its first bytes; None for all others.

    JSON is text whatever else its name says: `pytorch_model.bin.index.json` holds no weights.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    known = next((suffix for suffix in suffixes if suffix in (*OTHER_WEIGHTS, *ARCHIVES)), None)
    if known and suffixes[-1] != ".json":
        kind = "weights in another format" if known in OTHER_WEIGHTS else "an archive"
        return f"is named {known}: {kind}"
    with path.open("rb") as stream:
        start = stream.read(512)
    if is_safetensors(path.name, start):
        return None
    found = next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)
    if found is None and start[257:262] == b"ustar":
        found = "a tar archive"
    return f"begins like {found}" if found else None
