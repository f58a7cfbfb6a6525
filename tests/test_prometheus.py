"""Metrics of the probe: the text format, its escapes, and one step from old to new."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from collapse.checkpoint import Checkpoint
from collapse.errors import OutputError
from collapse.probe import Probe
from collapse.replace import replace_file
from collapse.report.prometheus import HELP, to_prometheus
from tests.command import Command
from tests.exported import EMBEDDING

ERASED = Probe(status="ERASED", reason="gone")
ACTIVE = Probe(status="ACTIVE", reason="there", alive=("a", "b", "c"))
SAMPLE = re.compile(r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+)\} (\d+)')
LABEL = re.compile(r'([a-z]+)="((?:[^"\\\n]|\\["\\n])*)"')
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], int]


def unescaped(text: str) -> str:
    return re.sub(r'\\(["\\n])', lambda match: "\n" if match[1] == "n" else match[1], text)


def read_metrics(text: str) -> Samples:
    """Read the text exposition format, version 0.0.4; each metric has its HELP and TYPE right before its samples."""
    assert text.endswith("\n")
    found: Samples = {}
    helped = typed = ""
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# HELP "):
            helped, words = line.split(" ", 3)[2:]
            assert words
        elif line.startswith("# TYPE "):
            _, _, typed, kind = line.split(" ")
            assert (typed, kind) == (helped, "gauge")
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert match[1] == typed
            labels = tuple((name, unescaped(value)) for name, value in LABEL.findall(match[2]))
            assert (match[1], labels) not in found
            found[match[1], labels] = int(match[3])
    return found


def key(name: str, **more: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return name, (("model", "served"), ("site", "*bias*"), *more.items())


def test_an_erased_site() -> None:
    assert read_metrics(to_prometheus(ERASED, model="served", site="*bias*")) == {
        key("collapse_probe_success"): 1,
        key("collapse_site_erased"): 1,
        key("collapse_site_status", status="ERASED"): 1,
        key("collapse_site_status", status="ZEROED"): 0,
        key("collapse_site_status", status="ACTIVE"): 0,
        key("collapse_site_alive_tensors"): 0,
    }


def test_a_site_that_is_back() -> None:
    found = read_metrics(to_prometheus(ACTIVE, model="served", site="*bias*"))
    assert (found[key("collapse_site_erased")], found[key("collapse_site_alive_tensors")]) == (0, 3)
    assert found[key("collapse_site_status", status="ACTIVE")] == 1


def test_a_probe_that_failed_claims_nothing_about_the_site() -> None:
    assert read_metrics(to_prometheus(None, model="served", site="*bias*")) == {key("collapse_probe_success"): 0}


@pytest.mark.parametrize("text", ['a"b', "a\\b", "a\nb", 'x"} 1\ny{z="', "\\n", "ä ß"])
def test_labels_come_back_as_they_were(text: str) -> None:
    found = read_metrics(to_prometheus(ERASED, model=text, site=text))
    assert {labels[:2] for _, labels in found} == {(("model", text), ("site", text))}


def test_helps_are_single_lines() -> None:
    assert [text for text in HELP.values() if "\n" in text or "\\" in text] == []


def test_the_command_writes_metrics_beside_its_answer(command: Command, out: Path, tmp_path: Path) -> None:
    path = tmp_path / "collapse.prom"
    for site, code, erased in (("old.bias", 0, 1), (EMBEDDING, 1, 0)):
        plain = command("probe", out, "--site", site)
        found = command("probe", out, "--site", site, "--prometheus", path)
        assert (found.code, found.out) == (plain.code, plain.out)
        assert found.code == code
        metrics = read_metrics(path.read_text())
        assert metrics["collapse_site_erased", (("model", "out"), ("site", site))] == erased
    assert sorted(found.name for found in tmp_path.iterdir()) == ["collapse.prom", "out"], "no draft is left"


@pytest.mark.parametrize("place", ["out", "nowhere"])
def test_a_failed_probe_replaces_what_an_earlier_one_said(
    command: Command, out: Path, tmp_path: Path, place: str
) -> None:
    path = tmp_path / "collapse.prom"
    command("probe", out, "--site", "old.bias", "--prometheus", path)
    found = command("probe", tmp_path / place, "--site", "no.such", "--prometheus", path)
    assert (found.code, found.out, len(found.err.splitlines())) == (2, "", 1)
    assert read_metrics(path.read_text()) == {("collapse_probe_success", (("model", place), ("site", "no.such"))): 0}


def test_without_the_option_nothing_is_written(command: Command, llama: Checkpoint, out: Path) -> None:
    before = sorted(out.parent.rglob("*"))
    command("probe", out, "--site", "old.bias")
    assert sorted(out.parent.rglob("*")) == before


def test_a_file_is_replaced_in_one_step_and_can_be_read_by_others(tmp_path: Path) -> None:
    path = tmp_path / "x.prom"
    path.write_text("old")
    with path.open() as reader:
        replace_file(path, b"new")
        assert reader.read() == "old", "whoever has it open reads on"
    assert path.read_text() == "new"
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    (tmp_path / "link").symlink_to(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (pipe, tmp_path / "link"):  # /dev/stdout is such a link
        replace_file(path, b"new")
        assert os.read(reader, 9) == b"new"
    os.close(reader)
    assert pipe.is_fifo() and (tmp_path / "link").is_symlink()


def test_a_link_stays_and_its_file_gets_the_content(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for content in (b"first", b"second"):
        replace_file(tmp_path / "link", content)
        assert (tmp_path / "file").read_bytes() == content
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("place", ["file/x", "nowhere/x", "folder"])
def test_what_cannot_be_written_is_one_error_and_leaves_nothing(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputError, match="cannot be written"):
        replace_file(tmp_path / place, b"x")
    assert sorted(tmp_path.rglob("*")) == before
