"""Writes the collapsed checkpoint into a folder: bytes of the source, copied and hashed in constant memory."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from collapse.canonical import chunks
from collapse.checkpoint import INDEX, Checkpoint
from collapse.manifest import FileRecord
from collapse.plan import Plan, Reroot
from collapse.rewrite.bytes import SourceReader
from collapse.rewrite.config import config_edits
from collapse.rewrite.layout import Shard, header, index, shards
from collapse.rewrite.tensors import output_tensors, token_narrow

MAX_SHARD_SIZE = 5_000_000_000  # bytes; transformers' own default is of this order
CONFIG = "config.json"
Progress = Callable[[int], None]


def write_checkpoint(
    checkpoint: Checkpoint,
    plan: Plan,
    folder: Path,
    *,
    max_shard_size: int = MAX_SHARD_SIZE,
    progress: Progress | None = None,
) -> Mapping[str, FileRecord]:
    """Write weights, index and side files into the existing, empty `folder`; return what was written.

    Each file keeps the mode of its source. `progress` is told the number of bytes after each write. Raises
    `PlanError` where the plan does not fit, `OSError` where the disk does not take it.
    """
    tensors = output_tensors(checkpoint, plan)
    sides = side_files(checkpoint, plan)
    files = shards(tensors, max_shard_size)
    told = progress or (lambda count: None)
    written: dict[str, FileRecord] = {}
    weights_mode = _mode(checkpoint, checkpoint.weight_files[0]) if checkpoint.weight_files else 0o644
    with SourceReader(checkpoint) as reader:
        for shard in files:
            written[shard.file] = _write(folder / shard.file, _shard_bytes(reader, shard), weights_mode, told)
    if len(files) > 1:
        written[INDEX] = _write(folder / INDEX, [index(files)], _mode(checkpoint, CONFIG), told)
    for name, content in sides.items():
        data = chunks(checkpoint.root / name) if content is None else [content]
        written[name] = _write(folder / name, data, _mode(checkpoint, name), told)
    return written


def side_files(checkpoint: Checkpoint, plan: Plan) -> Mapping[str, bytes | None]:
    """Return the content of every side file of the output by name; None where it is the source's, untouched.

    Token ids are renumbered first, then config.json is edited; it keeps the order of its fields.
    """
    dropped = {name for rewrite in plan.of_kind(Reroot) for name in rewrite.files}
    sides: dict[str, bytes | None] = {name: None for name in checkpoint.side_files if name not in dropped}
    narrow = token_narrow(plan)
    if narrow is not None:
        from collapse.rewrite.tokenizer import narrow_side_files  # only models with renumbered ids need it

        originals = {name: (checkpoint.root / name).read_bytes() for name in sides}
        rewritten = narrow_side_files(originals, narrow.kept, narrow.size)
        sides = {name: None if data == originals.get(name) else data for name, data in rewritten.items()}
    current = sides[CONFIG]
    config = json.loads(current) if current is not None else dict(checkpoint.config)
    edited = config_edits(config, plan)
    if edited != config:
        sides[CONFIG] = (json.dumps(edited, indent=2, ensure_ascii=False) + "\n").encode()
    return dict(sorted(sides.items()))


def _shard_bytes(reader: SourceReader, shard: Shard) -> Iterator[bytes]:
    yield header(shard.tensors)
    for tensor in shard.tensors:
        yield from reader.chunks(tensor)


def _mode(checkpoint: Checkpoint, name: str) -> int:
    return stat.S_IMODE((checkpoint.root / name).stat().st_mode) if (checkpoint.root / name).exists() else 0o644


def _write(path: Path, data: Iterable[bytes], mode: int, progress: Progress) -> FileRecord:
    """Write a new file and force it to the disk; its digest is taken on the way."""
    total = hashlib.sha256()
    with path.open("xb", buffering=0) as stream:
        _keep_mode(stream.fileno(), mode)
        for part in data:
            view = memoryview(part)
            while view:
                view = view[stream.write(view) :]
            total.update(part)
            progress(len(part))
        os.fsync(stream.fileno())
        return FileRecord(sha256=total.hexdigest(), bytes=stream.tell())


def _keep_mode(descriptor: int, mode: int) -> None:
    """File systems without modes refuse to set them; the content matters more."""
    try:
        os.fchmod(descriptor, mode)
    except OSError as error:
        if error.errno not in {errno.EPERM, errno.ENOTSUP, errno.EINVAL}:
            raise
