"""Writes the collapsed checkpoint into a folder: bytes of the source or of a values file, in constant memory."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collapse.canonical import chunks
from collapse.checkpoint import INDEX, Checkpoint
from collapse.disk import fits_cache, new_file, uncache, uncache_file, write_new
from collapse.errors import PlanError
from collapse.plan import Plan, Reroot
from collapse.rewrite.bytes import SourceReader, Stretch
from collapse.rewrite.config import config_edits
from collapse.rewrite.layout import Shard, header, index, shards
from collapse.rewrite.tensors import output_tensors, token_narrow
from collapse.rewrite.values import Values, require_values
from collapse.untrusted import MAX_TOKENIZER, read_bounded, too_few_experts
from collapse.writing import WritingBehind

MAX_SHARD_SIZE = 5_000_000_000  # bytes; transformers' own default is of this order
CONFIG = "config.json"
Progress = Callable[[int], None]


def write_checkpoint(
    checkpoint: Checkpoint,
    plan: Plan,
    folder: Path,
    *,
    values: Values | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
    progress: Progress | None = None,
) -> None:
    """Write weights, index and side files into the existing, empty `folder`.

    Each file keeps the mode of its source. `values` has the data of replaced tensors. `progress` is told the number of
    bytes after each write. Raises `PlanError`, before anything is written, where plan or values do not fit, `OSError`
    where the disk does not take it.
    """
    tensors = output_tensors(checkpoint, plan)
    require_values(tensors, values)
    sides = side_files(checkpoint, plan)
    files = shards(tensors, max_shard_size)
    told = progress or (lambda count: None)
    _write_weights(checkpoint, files, folder, values, told)
    if len(files) > 1:
        _write_side(folder / INDEX, [index(files)], _mode(checkpoint, CONFIG), told)
    for name, content in sides.items():
        data = chunks(checkpoint.root / name) if content is None else [content]
        _write_side(folder / name, data, _mode(checkpoint, name), told)


def side_files(checkpoint: Checkpoint, plan: Plan) -> Mapping[str, bytes | None]:
    """Return the content of every side file of the output by name; None where it is the source's, untouched.

    Token ids are renumbered first, then config.json is edited; it keeps the order of its fields.
    """
    dropped = {name for rewrite in plan.of_kind(Reroot) for name in rewrite.files}
    sides: dict[str, bytes | None] = {name: None for name in checkpoint.side_files if name not in dropped}
    narrow = token_narrow(plan)
    if narrow is not None:
        from collapse.rewrite.tokenizer import narrow_side_files  # only models with renumbered ids need it

        originals = {name: _edited_bytes(checkpoint.root / name) for name in sides}
        rewritten = narrow_side_files(originals, narrow.kept, narrow.size)
        sides = {name: None if data == originals.get(name) else data for name, data in rewritten.items()}
    current = sides[CONFIG]
    config = json.loads(current) if current is not None else dict(checkpoint.config)
    edited = config_edits(config, plan)
    if edited != config and (few := too_few_experts(edited)):
        message = f"{few[0]} experts would stay, and a token takes {few[1]}"
        raise PlanError(message, where="config.json", fix="make a new plan")
    if edited != config:
        sides[CONFIG] = (json.dumps(edited, indent=2, ensure_ascii=False) + "\n").encode()
    return dict(sorted(sides.items()))


def _edited_bytes(path: Path) -> bytes:
    """Return what a cut of the vocabulary may change; other files may be of any size, and stay as they are."""
    return read_bounded(path, MAX_TOKENIZER) if path.suffix == ".json" else b""


def _write_weights(
    checkpoint: Checkpoint, files: Sequence[Shard], folder: Path, values: Values | None, progress: Progress
) -> None:
    tensors = [tensor for shard in files for tensor in shard.tensors]
    total = sum(tensor.nbytes for tensor in tensors)
    mode = _mode(checkpoint, checkpoint.weight_files[0]) if checkpoint.weight_files else 0o644
    keep_cached = fits_cache(checkpoint.weight_bytes + total)
    with SourceReader(checkpoint, tensors, values=values) as reader:
        for shard in files:
            with new_file(folder / shard.file, mode) as descriptor, WritingBehind(descriptor) as writing:
                _ShardCopy(reader, writing, keep_cached, progress).run(shard)
            if not keep_cached:
                uncache_file(folder / shard.file)


@dataclass(frozen=True)
class _ShardCopy:
    """How one shard is filled: each byte is read once, into a small buffer, and written from there.

    `keep_cached` says that source and output fit in the page cache.
    """

    reader: SourceReader
    writing: WritingBehind
    keep_cached: bool
    progress: Progress

    def run(self, shard: Shard) -> None:
        self._put(header(shard.tensors))
        for tensor in shard.tensors:
            for part in self.reader.parts(tensor):
                if isinstance(part, Stretch):
                    self._copy(part)
                else:
                    self._put(part)

    def _copy(self, part: Stretch) -> None:
        position = part.start
        while position < part.stop:
            buffer = self.writing.buffer()
            count = part.read_into(buffer, position)
            self._write(buffer, count)
            position += count
        if not self.keep_cached:
            uncache(part.descriptor, part.start, part.stop - part.start)

    def _put(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            buffer = self.writing.buffer()
            count = min(len(buffer), len(view))
            buffer[:count] = view[:count]
            self._write(buffer, count)
            view = view[count:]

    def _write(self, buffer: memoryview, count: int) -> None:
        self.writing.add(buffer, count)
        self.progress(count)


def _mode(checkpoint: Checkpoint, name: str) -> int:
    """Return the permissions of the source's file; a link's are those of what it leads to."""
    path = checkpoint.root / name
    return stat.S_IMODE(path.stat().st_mode) & 0o777 if path.exists() else 0o644


def _write_side(path: Path, data: Iterable[bytes], mode: int, progress: Progress) -> None:
    def told() -> Iterator[bytes]:
        for part in data:
            yield part
            progress(len(part))

    write_new(path, told(), mode)
