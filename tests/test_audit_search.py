"""The parts of the search, each against the plain way of doing the same."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collapse.audit import against_source, erased
from collapse.audit import search as searching
from collapse.audit.erased import (
    WINDOW,
    erased_masks,
    erased_tensors,
    fingerprints,
    probes,
    row_bytes,
    window_span,
)
from collapse.audit.run import audit
from collapse.audit.search import OVERLAP, Hits, batches, search
from collapse.audit.streams import Part, file_parts, packed_parts
from collapse.audit.weights import without
from collapse.checkpoint import Checkpoint, TensorInfo
from collapse.rewrite.tensors import Piece
from tests.audit_cases import random_plan, random_source
from tests.exported import EMBEDDING
from tests.tiny import erase, export, plan_for, tiny_llama


def print_of(window: bytes) -> int:
    first, second = (int.from_bytes(half, "little") for half in (window[:8], window[8:]))
    return (first * 0x9E3779B97F4A7C15 + second * 0xC2B2AE3D27D4EB4F) % 2**64


@given(data=st.binary(max_size=90))
def test_fingerprints_are_those_of_each_window(data: bytes) -> None:
    found = fingerprints(np.frombuffer(data, np.uint8))
    assert found.tolist() == [print_of(data[at : at + WINDOW]) for at in range(len(data) - WINDOW + 1)]


@given(size=st.integers(1, 60), holes=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=6))
def test_without_is_the_difference_of_sets(size: int, holes: list[tuple[int, int]]) -> None:
    inside = [(min(a, b, size), min(max(a, b), size)) for a, b in holes]
    found = without((0, size), inside)
    assert {at for start, stop in found for at in range(start, stop)} == set(range(size)) - {
        at for start, stop in inside for at in range(start, stop)
    }
    assert all(start < stop for start, stop in found) and all(a[1] <= b[0] for a, b in pairwise(found))


@given(start=st.integers(0, 80), length=st.integers(1, 40), size=st.integers(1, 120))
def test_a_span_is_widened_to_the_windows_that_touch_it(start: int, length: int, size: int) -> None:
    stop = min(start + length, size)
    if start >= stop:
        return
    begin, end = window_span((start, stop), size)
    touching = [at for at in range(size - WINDOW + 1) if at < stop and at + WINDOW > start]
    assert list(range(begin, end - WINDOW + 1)) == touching or (not touching and end - begin < WINDOW)


@pytest.mark.parametrize("seed", range(8))
def test_masks_mark_what_no_piece_keeps(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed {seed}")
    monkeypatch.setattr(erased, "CHUNK", random.Random(seed).choice([1, 100, 700, 1 << 22]))
    source = random_source(tmp_path / "source", seed)
    for tensor in erased_tensors(source, random_plan(source, seed)):
        right = np.ones(tensor.info.nbytes, bool)
        for piece in tensor.kept.pieces() if tensor.kept else ():
            assert isinstance(piece, Piece)
            right[piece.start - tensor.info.start : piece.stop - tensor.info.start] = False
        chunks = list(erased_masks(tensor, 32))
        assert np.array_equal(np.concatenate([mask for _, mask in chunks]), right)
        assert [start for start, _ in chunks] == [0, *np.cumsum([len(mask) for _, mask in chunks])[:-1].tolist()]


@pytest.mark.parametrize("seed", range(8))
def test_every_row_with_erased_bytes_has_a_probe_or_is_mute(seed: int, tmp_path: Path) -> None:
    print(f"seed {seed}")
    source = random_source(tmp_path / "source", seed)
    for tensor in erased_tensors(source, random_plan(source, seed)):
        row = row_bytes(tensor.info)
        if row < erased.SHORTEST_ROW or row > erased.LONGEST_ROW:
            continue
        mask = np.concatenate([mask for _, mask in erased_masks(tensor, row)])
        rows = {int(at) // row for at in np.flatnonzero(mask)}
        found = list(probes(source.root, tensor))
        offsets = [int(at) for one in found for at in one.offsets]
        assert {at // row for at in offsets} <= rows
        assert len(offsets) + sum(one.mute for one in found) == len(rows)
        assert all(mask[at : at + WINDOW].any() for at in offsets), "a probe has an erased byte"


@pytest.mark.parametrize(("shape", "dtype", "expected"), [((5, 32), "F32", 128), ((40,), "BF16", 80), ((), "F64", 8)])
def test_a_row_is_the_last_dimension(shape: tuple[int, ...], dtype: str, expected: int) -> None:
    assert row_bytes(TensorInfo("t", dtype, shape, "f", 0, 0)) == expected


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 300), chunk=st.integers(70, 200))
def test_parts_of_a_file_overlap_and_leave_nothing_out(
    tmp_path_factory: pytest.TempPathFactory, size: int, chunk: int
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    data = random.Random(size).randbytes(size)
    (folder / "x").write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("collapse.audit.streams.CHUNK", chunk)
        parts = list(file_parts(folder, "x", [(0, size)], OVERLAP))
    assert all(data[part.start : part.start + len(part.data)] == part.data for part in parts)
    assert all(b.start == a.start + len(a.data) - min(OVERLAP, len(a.data)) for a, b in pairwise(parts))
    assert parts[-1].start + len(parts[-1].data) == size


@pytest.mark.parametrize("at_once", [1, 7, 2_000_000])
def test_many_passes_find_what_one_finds(
    llama: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(searching, "AT_ONCE", at_once)
    (out / "notes.txt").write_bytes(llama.read_bytes("old.bias") + b"--" + llama.read_bytes(EMBEDDING))
    found = [finding for finding in audit(out, llama).findings if finding.rule == "erased-bytes"]
    dropped = "3, 4, 40, 41, 42, 43, 44, 45 and 17 more"
    assert [(finding.offset, finding.what) for finding in found] == [
        (0, "holds the bytes of old.bias, which the plan erases"),
        (22, f"holds the bytes of rows {dropped} of {EMBEDDING}, which the plan erases"),
    ]


@pytest.mark.parametrize("alike", [4, 5, 8, 60])
def test_rows_that_begin_alike_and_go_on_differently_are_told_apart(tmp_path: Path, alike: int) -> None:
    """The window of row 0 is that of row 1; only the bytes after it tell which of the two is there."""
    table = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    table[1, :alike] = table[0, :alike]
    source = tiny_llama(tmp_path / "source", extra={"a.table": table})
    out = export(source, plan_for(source, erase("a.table")), tmp_path / "out").root
    for row in (0, 1):
        (out / "notes.txt").write_bytes(table[row].numpy().tobytes())
        hits = [finding.what for finding in audit(out, source).findings if finding.rule == "erased-bytes"]
        assert hits == [f"holds the bytes of row {row} of a.table, which the plan erases"]


def test_sixteen_equal_bytes_alone_are_no_find(llama: Checkpoint, out: Path) -> None:
    row = llama.read_bytes(EMBEDDING)[41 * 128 : 42 * 128]
    for size, expected in ((WINDOW, 0), (31, 0), (32, 1), (64, 1)):
        (out / "notes.txt").write_bytes(b"\xfe" * 50 + row[:size] + b"\xfe" * 50)
        hits = [finding for finding in audit(out, llama).findings if finding.rule == "erased-bytes"]
        assert len(hits) == expected, size


def test_random_bytes_are_no_find(llama: Checkpoint, out: Path) -> None:
    (out / "noise").write_bytes(random.Random(7).randbytes(3 << 20))
    assert [finding.rule for finding in audit(out, llama).findings] == ["file-unlisted"]


def test_no_kept_byte_is_searched(llama: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What equals the source at its own place is accounted for; only headers and other files are left to search."""
    searched: dict[str, int] = {}
    original = against_source.file_parts

    def counting(folder: Path, file: str, spans: list[tuple[int, int]], overlap: int):  # type: ignore[no-untyped-def]
        searched[file] = sum(stop - start for start, stop in spans)
        return original(folder, file, spans, overlap)

    monkeypatch.setattr(against_source, "file_parts", counting)
    found = audit(out, llama)
    sizes = {path.name: path.stat().st_size for path in out.iterdir()}
    assert searched == sizes | {"model.safetensors": found.figures["header_bytes"] + WINDOW - 1}


def test_a_plain_file_is_not_expanded(tmp_path: Path) -> None:
    for name, content in {"a.txt": b"hello", "b.json": b"{}", "c": b"", "d": b"PK"}.items():
        (tmp_path / name).write_bytes(content)
        assert list(packed_parts(tmp_path, name, OVERLAP)) == []


def test_a_search_without_probes_finds_nothing(llama: Checkpoint) -> None:
    hits: Hits = {}
    for batch in batches([]):
        search(llama.root, batch, [Part("x", None, 0, bytes(100))], hits)
    assert hits == {}
