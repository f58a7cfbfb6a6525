"""The thread that writes a file while its caller reads."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from collapse import writing
from collapse.disk import new_file
from collapse.writing import BUFFER, BUFFERS, WritingBehind


def put(behind: WritingBehind, data: bytes) -> None:
    buffer = behind.buffer()
    buffer[: len(data)] = data
    behind.add(buffer, len(data))


def test_bytes_come_in_the_order_in_which_they_were_added(tmp_path: Path) -> None:
    parts = [os.urandom(size) for size in (1, BUFFER, 77, 0, 5)] * BUFFERS
    with new_file(tmp_path / "f") as descriptor, WritingBehind(descriptor) as behind:
        for part in parts:
            put(behind, part)
    assert (tmp_path / "f").read_bytes() == b"".join(parts)


def test_a_short_write_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[: (len(data) + 1) // 2]))
    with new_file(tmp_path / "f") as descriptor, WritingBehind(descriptor) as behind:
        put(behind, bytes(range(256)) * 64)
    assert (tmp_path / "f").read_bytes() == bytes(range(256)) * 64


@pytest.mark.parametrize("parts", [1, BUFFERS, 5 * BUFFERS])
def test_what_the_disk_refuses_is_raised_and_nothing_is_written_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    calls: list[int] = []

    def full(descriptor: int, data: memoryview) -> int:
        calls.append(descriptor)
        raise OSError(errno.ENOSPC, "no room")

    before = threading.active_count()
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="no room"), new_file(tmp_path / "f") as descriptor:
        with WritingBehind(descriptor) as behind:
            for _ in range(parts):
                put(behind, b"x")
        pytest.fail("it was closed as if all were well")
    assert len(calls) <= BUFFERS
    assert threading.active_count() == before


def test_after_an_error_of_the_caller_no_write_meets_the_closed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state: list[str] = []
    slow = threading.Event()

    def recorded(descriptor: int, data: memoryview) -> None:
        slow.wait(5)
        state.append("written")

    monkeypatch.setattr(writing, "write_all", recorded)
    with pytest.raises(ZeroDivisionError), WritingBehind(0) as behind:
        for _ in range(BUFFERS):
            put(behind, b"x")
        threading.Timer(0.05, slow.set).start()
        _ = 1 / 0
    count = len(state)
    assert count <= 1  # the one under way, which was waited for
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("writing")]
    assert len(state) == count
