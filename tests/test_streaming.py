"""How the writer reads and copies: in constant memory, in the kernel where it can, and what it does where it cannot."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.synthetic import half_plan, shape_of, write_checkpoint
from collapse import disk
from collapse.checkpoint import DTYPE_BITS, Checkpoint, TensorInfo
from collapse.disk import Flushing, new_file
from collapse.errors import CheckpointError, PlanError
from collapse.plan import IndexSet
from collapse.rewrite import bytes as source_bytes
from collapse.rewrite import gather
from collapse.rewrite.bytes import SourceReader
from collapse.rewrite.layout import shards
from collapse.rewrite.tensors import OutputTensor, Piece, output_tensors
from tests.exported import EMBEDDING, KEPT
from tests.tiny import erase, export, listing, plan_for, state, vocabulary

# Reading.


def pieces_of(tensor: OutputTensor, raw: bytes) -> bytes:
    return b"".join(raw[piece.start : piece.stop] for piece in tensor.pieces() if isinstance(piece, Piece))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_rows_cut_in_memory_are_those_of_the_pieces(data: st.DataObject, tmp_path_factory: Any) -> None:
    dtype = data.draw(st.sampled_from(["U8", "BF16", "F32", "C64", "F4"]))
    shape = (*data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)), *([8] if dtype == "F4" else []))
    dims = data.draw(st.sets(st.integers(0, len(shape) - (2 if dtype == "F4" else 1)), min_size=1))
    kept = {d: IndexSet.of(data.draw(st.sets(st.integers(0, shape[d] - 1), min_size=1))) for d in sorted(dims)}
    size = DTYPE_BITS[dtype]
    for length in shape:
        size *= length
    raw = bytes(number % 251 for number in range(8 + size // 8))
    info = TensorInfo("t", dtype, shape, "t.bin", 8, len(raw))
    whole = tuple(len(kept[dim]) if dim in kept else length for dim, length in enumerate(shape))
    tensor = OutputTensor("t", dtype, whole, info, kept)
    folder = tmp_path_factory.mktemp("gather")
    (folder / "t.bin").write_bytes(raw)
    checkpoint = Checkpoint(folder, "t", {}, {"t": info})
    for block in (1, 16, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gather, "BLOCK", block)
            patch.setattr(source_bytes, "LONG", data.draw(st.sampled_from([1, 1 << 16])))
            with SourceReader(checkpoint) as reader:
                assert b"".join(map(bytes, reader.chunks(tensor))) == pieces_of(tensor, raw)


def test_few_rows_of_a_large_table_are_read_alone_and_many_with_all_between() -> None:
    info = TensorInfo("t", "F32", (100_000, 1024), "f", 0, 100_000 * 4096)

    def narrowed(rows: range) -> OutputTensor:
        return OutputTensor("t", "F32", (len(rows), 1024), info, {0: IndexSet.of(rows)})

    assert not gather.scattered(narrowed(range(0, 100_000, 10_000)))
    assert not gather.scattered(narrowed(range(50_000)))
    assert gather.scattered(narrowed(range(0, 100_000, 2)))


# Copying.


def test_a_source_cut_short_after_it_was_opened_is_an_error(llama: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for name, raw in listing(llama.root).items():
        (folder / name).write_bytes(raw)
    source = Checkpoint.open(folder)
    os.truncate(folder / "model.safetensors", 20_000)
    for plan in (plan_for(llama), plan_for(llama, vocabulary(KEPT, EMBEDDING))):
        with pytest.raises(CheckpointError, match="cut short while it was read"):
            export(source, plan, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_a_new_file_never_follows_a_link_nor_takes_an_old_place(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"mine")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    (tmp_path / "dangling").symlink_to(tmp_path / "made")
    for name in ("precious", "link", "dangling"):
        with pytest.raises(FileExistsError), new_file(tmp_path / name):
            pytest.fail("it was opened")
    assert (tmp_path / "precious").read_bytes() == b"mine"
    assert not (tmp_path / "made").exists()


# Reading ahead.


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """What the kernel was asked for, as (descriptor, start, count)."""
    calls: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: calls.append(given[:3]))
    monkeypatch.setattr(disk, "AHEAD", 100)
    monkeypatch.setattr(disk, "ASKED", 40)
    return calls


def test_what_is_read_next_is_asked_for_once_in_order_and_not_too_early(asked: list[tuple[int, int, int]]) -> None:
    ranges = [(3, 1000, 1250), (3, 5000, 5010), (4, 0, 0), (4, 7, 300)]
    whole = [(descriptor, byte) for descriptor, start, stop in ranges for byte in range(start, stop)]
    ahead = disk.ReadAhead(iter(ranges))
    assert not asked
    for read in range(0, len(whole), 10):
        ahead.read(min(10, len(whole) - read))
        bytes_asked = [(descriptor, start + n) for descriptor, start, count in asked for n in range(count)]
        assert bytes_asked == whole[: len(bytes_asked)]
        assert min(read + 100, len(whole)) <= len(bytes_asked) <= read + 10 + 100 + 40
    assert bytes_asked == whole
    assert max(count for _, _, count in asked) == 40


def test_a_kernel_that_does_not_take_advice_is_no_problem(
    llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*given: object) -> None:
        raise OSError(22, "Invalid argument")

    whole = listing(export(llama, plan_for(llama), tmp_path / "usual").root)
    monkeypatch.setattr(os, "posix_fadvise", refusing)
    disk.ReadAhead([(0, 0, 1000)]).read(1)
    assert listing(export(llama, plan_for(llama), tmp_path / "refused").root) == whole
    monkeypatch.delattr(os, "posix_fadvise")
    assert listing(export(llama, plan_for(llama), tmp_path / "without").root) == whole


@pytest.mark.parametrize("long", [1, 1 << 16])
def test_what_is_asked_for_is_what_is_read_and_both_ways_give_the_same_bytes(
    llama: Checkpoint, asked: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch, long: int
) -> None:
    monkeypatch.setattr(source_bytes, "LONG", long)
    monkeypatch.setattr(disk, "AHEAD", 0)  # what is not said to be read is not asked for
    monkeypatch.setattr(disk, "ASKED", 4)
    monkeypatch.setattr(gather, "BLOCK", 512)  # four rows, so that there are blocks of which nothing stays
    for plan in (plan_for(llama), plan_for(llama, vocabulary((5, 7, 40), EMBEDDING))):
        tensors = output_tensors(llama, plan)
        with SourceReader(llama) as reader:
            unexpected = [b"".join(map(bytes, reader.chunks(tensor))) for tensor in tensors]
        assert not asked
        with SourceReader(llama, tensors) as reader:
            assert [b"".join(map(bytes, reader.chunks(tensor))) for tensor in tensors] == unexpected
        scattered = [t for t in tensors if t.source is not None and gather.scattered(t)]
        extra = sum(t.source.nbytes - t.nbytes for t in scattered if t.source is not None)
        assert sum(count for _, _, count in asked) == sum(tensor.nbytes for tensor in tensors) + extra
        assert bool(scattered) == (plan.rewrites != ())
        asked.clear()


def test_tensors_that_come_in_another_order_are_read_all_the_same(llama: Checkpoint) -> None:
    tensors = output_tensors(llama, plan_for(llama))
    with SourceReader(llama, tensors[::2]) as reader:
        for tensor in reversed(tensors):
            assert b"".join(map(bytes, reader.chunks(tensor))) == llama.read_bytes(tensor.name)


# Flushing.


def test_what_is_flushed_ascends_and_overlaps_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, int, int]] = []
    monkeypatch.setattr(disk, "SYNC_FILE_RANGE", lambda *given: calls.append(given) or -1)
    monkeypatch.setattr(disk, "FLUSHED", 100)
    flushing = Flushing(7)
    for count in (99, 1, 250, 30, 30, 30, 30, 10):
        flushing.wrote(count)
    assert calls == [(7, 0, 100, 2), (7, 100, 250, 2), (7, 350, 120, 2)]


def test_where_the_system_cannot_flush_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "SYNC_FILE_RANGE", None)
    monkeypatch.setattr(disk, "FLUSHED", 1)
    Flushing(-1).wrote(1000)


def test_flushing_a_file_changes_no_byte(llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = listing(export(llama, plan_for(llama), tmp_path / "usual").root)
    monkeypatch.setattr(disk, "FLUSHED", 1)
    assert listing(export(llama, plan_for(llama), tmp_path / "flushed").root) == whole


# The page cache.


def test_what_does_not_fit_in_the_page_cache_is_forgotten_after_its_digest(
    llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[str] = []
    advise = os.posix_fadvise

    def noted(descriptor: int, start: int, count: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            forgotten.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        advise(descriptor, start, count, advice)

    monkeypatch.setattr(os, "posix_fadvise", noted)
    small = export(llama, plan_for(llama), tmp_path / "small", max_shard_size=20_000)
    assert not forgotten
    monkeypatch.setattr("collapse.erase.fits_cache", lambda size: False)
    monkeypatch.setattr(source_bytes, "LONG", 1)
    large = export(llama, plan_for(llama), tmp_path / "large", max_shard_size=20_000)
    assert set(forgotten) == {"model.safetensors", *large.weight_files}
    assert listing(large.root) == listing(small.root)


# Sizes.


@pytest.fixture(scope="module")
def nominal(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint of 100 GB by its headers, which takes no room: its files are holes."""
    return write_checkpoint(tmp_path_factory.mktemp("large") / "m", shape_of(10**11), shard_size=5 * 10**9, sparse=True)


def test_a_checkpoint_of_100_gb_is_planned_from_its_headers(
    nominal: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = [0]

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any) -> Any:
            found = call(*given)
            read[0] += found if isinstance(found, int) else len(found)
            return found

        return wrapped

    for name in ("pread", "preadv", "read"):
        monkeypatch.setattr(os, name, counting(getattr(os, name)))
    monkeypatch.setattr("collapse.checkpoint.file_digests", lambda paths: pytest.fail("all data was read"))
    source = Checkpoint.open(nominal.root)
    assert source.weight_bytes >= 10**11 and len(source.weight_files) > 20
    shape = shape_of(10**11)
    tensors = output_tensors(source, half_plan(shape))
    files = shards(tensors, 5 * 10**9)
    kept = sum(tensor.nbytes for shard in files for tensor in shard.tensors)
    assert abs(kept - source.weight_bytes / 2) < 0.01 * source.weight_bytes
    assert {tensor.name.split(".")[2] for tensor in tensors if ".layers." in tensor.name} == {
        str(number) for number in range((shape.layers + 1) // 2)
    }
    assert read[0] == 0


def test_what_no_library_computes_with_is_copied_all_the_same(tmp_path: Path) -> None:
    rows, width = 64, 16
    types = sorted(DTYPE_BITS)
    tensors = tuple(OutputTensor(f"t.{dtype}", dtype, (rows, width), None) for dtype in types)
    from collapse.rewrite.layout import header, stored

    ordered = stored(tensors)
    (tmp_path / "m").mkdir()
    data = os.urandom(sum(tensor.nbytes for tensor in ordered))
    (tmp_path / "m" / "model.safetensors").write_bytes(header(ordered) + data)
    (tmp_path / "m" / "config.json").write_text('{"model_type": "llama", "vocab_size": 64}')
    source = Checkpoint.open(tmp_path / "m")
    names = [f"t.{dtype}" for dtype in types if dtype not in {"U8", "F4"}]
    plan = plan_for(source, vocabulary(KEPT, *names), erase("t.U8"))
    out = export(source, plan, tmp_path / "out", max_shard_size=2_000)
    assert out.tensors["t.F4"].shape == (rows, width)
    for name, (dtype, shape, raw) in state(out).items():
        whole = source.read_bytes(name)
        row = len(whole) // rows
        expected = whole if name == "t.F4" else b"".join(whole[row * number :][:row] for number in KEPT)
        assert (dtype, raw) == (name.removeprefix("t."), expected), name
        assert shape == ((rows if name == "t.F4" else len(KEPT)), width)
    odd = OutputTensor("x", "F4", (4, 3), TensorInfo("x", "F4", (4, 3), "f", 0, 6), {})
    assert odd.nbytes == 6
    with pytest.raises(PlanError, match="ends within a byte"):
        info = TensorInfo("x", "F4", (64, 3), "model.safetensors", 0, 96)
        output_tensors(Checkpoint(tmp_path, "x", {}, {"x": info}), plan_for(source, vocabulary(KEPT, "x")))
