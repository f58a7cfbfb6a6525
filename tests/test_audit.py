"""The audit: quiet on what the writer makes, and loud, with file and offset, on anything besides."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from collapse.audit import Audit, audit
from collapse.audit import streams as audit_streams
from collapse.audit.erased import erased_tensors, probes
from collapse.checkpoint import INDEX, Checkpoint
from collapse.errors import CheckpointError
from collapse.manifest import MANIFEST, file_names, load_manifest, record_of
from collapse.plan import Plan
from collapse.verify import verify
from tests.audit_cases import awkward_tensors, dropped, random_plan, random_source
from tests.exported import EMBEDDING, KEPT, WEIGHTS
from tests.tiny import erase, export, plan_for, tiny_gpt2, tiny_llama, vocabulary

ROW = 32 * 4  # bytes of a row of the embedding
GONE = 41  # a row that the shared plan narrows away


def row(source: Checkpoint, number: int = GONE) -> bytes:
    return source.read_bytes(EMBEDDING)[number * ROW : (number + 1) * ROW]


def rules(found: Audit) -> set[str]:
    return {finding.rule for finding in found.findings}


def place(found: Audit, rule: str) -> tuple[str, int | None]:
    (finding,) = [finding for finding in found.findings if finding.rule == rule]
    return finding.file, finding.offset


def refit(out: Path) -> None:
    """Make the manifest fit the files as they are now, as somebody would who hides something."""
    manifest = json.loads((out / MANIFEST).read_bytes())
    manifest["files"] = {name: record_of(out / name).model_dump() for name in file_names(out)}
    (out / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def rebuilt(out: Path, header: dict[str, object], data: bytes) -> int:
    """Write a weight file by hand; return where its data begin."""
    body = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    body += b" " * (-len(body) % 8)
    (out / WEIGHTS).write_bytes(len(body).to_bytes(8, "little") + body + data)
    return 8 + len(body)


def parts(out: Path) -> tuple[dict[str, object], bytes]:
    raw = (out / WEIGHTS).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


# Must be quiet.


@pytest.mark.parametrize("seed", range(50))
def test_a_clean_export_is_clean(seed: int, tmp_path: Path) -> None:
    print(f"seed {seed}")
    source = random_source(tmp_path / "source", seed)
    size = random.Random(seed).choice([10_000, 40_000, 10**9])
    out = export(source, random_plan(source, seed), tmp_path / "out", max_shard_size=size).root
    for found in (audit(out, source), audit(out)):
        assert (found.findings, found.undecided, found.status, found.exit_code) == ((), (), "clean", 0)
        counted = found.figures["header_bytes"] + found.figures["tensor_bytes"] + found.figures["other_file_bytes"]
        assert counted == found.figures["bytes"] == sum(path.stat().st_size for path in out.iterdir())


def test_rows_that_survive_as_another_row_are_accounted_for(tmp_path: Path) -> None:
    """Row 2 goes and is equal to row 0, which stays right at the start and at the end of the data."""
    table = torch.randn(1, 64, generator=torch.Generator().manual_seed(1)).repeat(4, 1)
    source = tiny_llama(tmp_path / "source", extra={"a.table": table, "z.table": table.clone()})
    kept = vocabulary([0, 1, 3], "a.table", size=4, relabels="channels", config={})
    out = export(source, plan_for(source, kept, erase("z.table")), tmp_path / "out").root
    found = audit(out, source)
    assert (found.findings, found.figures["rows_searched"]) == ((), 5)
    planted = table[0].numpy().tobytes()
    (out / "notes.txt").write_bytes(b"x" + planted)
    assert place(audit(out, source), "erased-bytes") == ("notes.txt", 1), "at no place of its own"


@pytest.mark.parametrize("dead", [EMBEDDING, "lm_head.weight"])
def test_the_dead_name_of_a_tie_is_no_find(tmp_path: Path, dead: str) -> None:
    source = tiny_llama(tmp_path / "source", both_names=True)
    out = export(source, plan_for(source, erase(dead)), tmp_path / "out").root
    assert audit(out, source).findings == ()


def test_constant_and_tiny_rows_give_no_alarm_and_are_counted(tmp_path: Path) -> None:
    names = ("awkward.zeros", "awkward.constant", "awkward.three", "awkward.scalar")
    source = tiny_llama(tmp_path / "source", extra=awkward_tensors(0))
    out = export(source, plan_for(source, erase(*names)), tmp_path / "out").root
    (out / "notes.txt").write_bytes(bytes(4096) + torch.full((64,), 0.02).numpy().tobytes())
    found = audit(out, source)
    assert rules(found) == {"file-unlisted"}
    assert (found.figures["rows_searched"], found.figures["rows_mute"]) == (0, 8 + 5 + 2)
    assert found.notes == ("15 erased rows are constant or shorter than 16 bytes, so they were not searched for",)


def test_without_the_source_the_audit_says_what_it_did_not_do(out: Path) -> None:
    found = audit(out)
    assert (found.status, found.searched) == ("clean", False)
    assert found.notes == ("without --source, tensors were not compared and bytes of erased rows not searched for",)


def test_an_output_of_nothing_erased_is_clean(llama: Checkpoint, tmp_path: Path) -> None:
    out = export(llama, plan_for(llama), tmp_path / "out").root
    assert audit(out, llama).figures["rows_searched"] == 0
    assert audit(out, llama).status == "clean"


def test_kept_rows_in_a_text_are_no_erased_rows(llama: Checkpoint, out: Path) -> None:
    (out / "notes.txt").write_bytes(b"".join(row(llama, number) for number in KEPT))
    assert rules(audit(out, llama)) == {"file-unlisted"}


@pytest.mark.parametrize("length", [0x0280, 0x8B1F, 0x088B1F])
def test_a_header_length_that_looks_like_another_format_is_none(length: int, tmp_path: Path) -> None:
    """The first bytes of a weight file are the header's length: 0x0280 begins like a pickle, 0x8b1f like gzip."""
    source = tiny_llama(tmp_path / "source", extra={"x": torch.ones(4)})
    out = export(source, plan_for(source), tmp_path / "out").root
    raw = (out / WEIGHTS).read_bytes()
    raw = length.to_bytes(8, "little") + b"{" + raw[9:]
    (out / WEIGHTS).write_bytes(raw)
    assert "foreign-weights" not in rules(audit(out, source))
    assert audit(out, source).undecided == ()


def test_four_bytes_like_the_end_of_an_archive_are_none(tmp_path: Path) -> None:
    tail = torch.frombuffer(bytearray(b"PK\x05\x06" + bytes(range(100, 160))), dtype=torch.uint8)
    source = tiny_llama(tmp_path / "source", extra={"zz.tail": tail})
    out = export(source, plan_for(source), tmp_path / "out").root
    assert (out / WEIGHTS).read_bytes().endswith(bytes(range(100, 160)))
    assert audit(out, source).status == "clean"


def test_the_audit_changes_nothing(llama: Checkpoint, out: Path) -> None:
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()}
    audit(out, llama)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()} == before


# Hidden rows are found, wherever they are.


def in_metadata(out: Path, hidden: bytes) -> None:
    header, data = parts(out)
    header["__metadata__"] = {"format": "pt", "note": "|here|"}
    rebuilt(out, header, data)
    raw = (out / WEIGHTS).read_bytes().replace(b"|here|", hidden)  # no text, so the header is damaged as well
    (out / WEIGHTS).write_bytes((int.from_bytes(raw[:8], "little") + len(hidden) - 6).to_bytes(8, "little") + raw[8:])


def in_a_gap(out: Path, hidden: bytes) -> None:
    header, data = parts(out)
    last = max((key for key in header if key != "__metadata__"), key=lambda key: header[key]["data_offsets"])  # type: ignore[index]
    start, stop = header[last]["data_offsets"]  # type: ignore[index]
    header[last]["data_offsets"] = [start + len(hidden), stop + len(hidden)]  # type: ignore[index]
    rebuilt(out, header, data[:start] + hidden + data[start:])


def in_the_padding(out: Path, hidden: bytes) -> None:
    header, data = parts(out)
    body = json.dumps(header, separators=(",", ":")).encode()
    body += b" " * 8 + hidden
    (out / WEIGHTS).write_bytes(len(body).to_bytes(8, "little") + body + data)


def over_a_kept_row(out: Path, hidden: bytes) -> None:
    info = Checkpoint.open(out).tensors[EMBEDDING]
    raw = bytearray((out / WEIGHTS).read_bytes())
    raw[info.start + 5 * ROW : info.start + 6 * ROW] = hidden
    (out / WEIGHTS).write_bytes(raw)


def archive(out: Path, hidden: bytes, name: str, method: int) -> None:
    with zipfile.ZipFile(out / name, "w", method) as made:
        made.writestr("archive/data/0", b"0123456789" + hidden + bytes(3000))


def appended(name: str) -> Callable[[Path, bytes], object]:
    return lambda out, hidden: (out / name).write_bytes((out / name).read_bytes() + hidden)


def written(name: str, prefix: bytes = b"{") -> Callable[[Path, bytes], object]:
    def write(out: Path, hidden: bytes) -> None:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(prefix + hidden)

    return write


HIDING: dict[str, tuple[Callable[[Path, bytes], object], str, str]] = {  # what is done; file and rule beside the find
    "metadata": (in_metadata, WEIGHTS, "weights-damaged"),
    "padding": (in_the_padding, WEIGHTS, "weights-damaged"),
    "gap": (in_a_gap, WEIGHTS, "gap-bytes"),
    "after the end": (appended(WEIGHTS), WEIGHTS, "trailing-bytes"),
    "over a kept row": (over_a_kept_row, WEIGHTS, "tensor-bytes"),
    "in the config": (appended("config.json"), "config.json", "side-file"),
    "in the manifest's end": (appended(MANIFEST), MANIFEST, "manifest-damaged"),
    "a text": (written("notes.txt", b"abc"), "notes.txt", "file-unlisted"),
    "another JSON": (written("old.json"), "old.json", "file-unlisted"),
    "any name": (written("LICENSE", b"x" * 4097), "LICENSE", "file-unlisted"),
    "a folder": (written("old/x", b""), "old/x", "file-unlisted"),
    "over a border of what is read at once": (written("big", b"x" * ((1 << 20) - 60)), "big", "file-unlisted"),
    "a report": (written("graph.svg", b"<svg/>"), "graph.svg", "file-unlisted"),
    "bin twin": (written("pytorch_model.bin"), "pytorch_model.bin", "foreign-weights"),
    "stored in a pt2": (
        lambda out, hidden: archive(out, hidden, "model.pt2", zipfile.ZIP_STORED), "model.pt2", "foreign-weights"
    ),
    "deflated in a pt2": (
        lambda out, hidden: archive(out, hidden, "model.pt2", zipfile.ZIP_DEFLATED), "model.pt2", "foreign-weights"
    ),
    "deflated in a text": (
        lambda out, hidden: archive(out, hidden, "notes.txt", zipfile.ZIP_DEFLATED), "notes.txt", "foreign-weights"
    ),
    "gzip": (
        lambda out, hidden: (out / "log.gz").write_bytes(gzip.compress(b"x" * 99 + hidden + bytes(999))),
        "log.gz", "foreign-weights",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HIDING)
def test_a_hidden_row_is_found(llama: Checkpoint, out: Path, case: str) -> None:
    hide, file, beside = HIDING[case]
    hide(out, row(llama))
    found = audit(out, llama)
    assert (found.status, found.exit_code) == ("refuted", 1)
    assert (beside, file) in {(finding.rule, finding.file) for finding in found.findings}
    if case == "in the manifest's end":
        return  # a manifest that is no JSON says nothing about rows
    (hit,) = [finding for finding in found.findings if finding.rule == "erased-bytes"]
    assert (hit.file, hit.what) == (file, f"holds the bytes of row {GONE} of {EMBEDDING}, which the plan erases")
    whole = (out / file).read_bytes()
    if hit.member is None and case != "gzip":
        assert hit.offset == whole.index(row(llama))


@pytest.mark.parametrize("case", [case for case in HIDING if "manifest" not in case])
def test_a_manifest_edited_to_fit_hides_no_row(llama: Checkpoint, out: Path, case: str) -> None:
    HIDING[case][0](out, row(llama))
    refit(out)
    assert "erased-bytes" in rules(audit(out, llama))


def test_offsets_in_archives_are_those_of_the_expanded_member(llama: Checkpoint, out: Path) -> None:
    archive(out, row(llama), "model.pt2", zipfile.ZIP_DEFLATED)
    (hit,) = [finding for finding in audit(out, llama).findings if finding.rule == "erased-bytes"]
    assert (hit.member, hit.offset, hit.place) == ("archive/data/0", 10, "model.pt2!archive/data/0:10")


@pytest.mark.parametrize("seed", range(12))
def test_every_row_of_any_plan_is_found_at_any_offset(seed: int, tmp_path: Path) -> None:
    print(f"seed {seed}")
    source = random_source(tmp_path / "source", seed)
    plan = random_plan(source, seed)
    out = export(source, plan, tmp_path / "out").root
    drawn = random.Random(seed)
    for tensor in erased_tensors(source, plan):
        data = source.read_bytes(tensor.info.name)
        offsets = [int(at) for one in probes(source.root, tensor) for at in one.offsets]
        for at in drawn.sample(offsets, min(3, len(offsets))):
            start = max(min(at - 8, len(data) - 32), 0)
            prefix = drawn.randrange(40)
            (out / "planted").write_bytes(b"\xfe" * prefix + data[start : start + 32])
            hits = [finding for finding in audit(out, source).findings if finding.rule == "erased-bytes"]
            assert [(hit.file, hit.offset in {prefix - 1, prefix}) for hit in hits[:1]] == [("planted", True)], (
                seed, tensor.info.name, at,
            )  # fmt: skip


def test_a_whole_erased_tensor_is_named_without_rows(llama: Checkpoint, out: Path) -> None:
    (out / "notes.txt").write_bytes(llama.read_bytes("old.bias"))
    (hit,) = [finding for finding in audit(out, llama).findings if finding.rule == "erased-bytes"]
    assert hit.what == "holds the bytes of old.bias, which the plan erases"


# Everything else that should not be there.


def stale_shard(out: Path) -> None:
    save_file({"old.bias": torch.arange(1.0, 6.0)}, out / "model-00002-of-00002.safetensors", {"format": "pt"})


def link(out: Path) -> None:
    shutil.move(out / "config.json", out.parent / "elsewhere")
    (out / "config.json").symlink_to(out.parent / "elsewhere")


def flipped(out: Path) -> None:
    raw = bytearray((out / WEIGHTS).read_bytes())
    raw[-3] ^= 1
    (out / WEIGHTS).write_bytes(raw)


FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "stale shard": (stale_shard, "stale-weights", "model-00002-of-00002.safetensors"),
    "backup": (lambda out: shutil.copy(out / WEIGHTS, out / f"{WEIGHTS}.bak"), "stale-weights", f"{WEIGHTS}.bak"),
    "link": (link, "file-special", "config.json"),
    "pipe": (lambda out: os.mkfifo(out / "pipe"), "file-special", "pipe"),
    "config gone": (lambda out: (out / "config.json").unlink(), "file-missing", "config.json"),
    "byte flipped": (flipped, "file-changed", WEIGHTS),
    "cut short": (
        lambda out: (out / WEIGHTS).write_bytes((out / WEIGHTS).read_bytes()[:-9]), "weights-damaged", WEIGHTS
    ),
    "index": (lambda out: (out / INDEX).write_text('{"weight_map": {}}'), "index", INDEX),
    "tensor back": (
        lambda out: save_file(load_file(out / WEIGHTS) | {"old.bias": torch.ones(5)}, out / WEIGHTS, {"format": "pt"}),
        "tensor-erased", WEIGHTS,
    ),
    "metadata": (
        lambda out: save_file(load_file(out / WEIGHTS), out / WEIGHTS, {"format": "pt", "x": "y"}),
        "header-bytes", WEIGHTS,
    ),
    "plan edited": (
        lambda out: (out / MANIFEST).write_text((out / MANIFEST).read_text().replace("it is so", "it was so", 1)),
        "plan-edited", MANIFEST,
    ),
    "manifest spaced": (
        lambda out: (out / MANIFEST).write_text((out / MANIFEST).read_text().replace(": ", ":  ", 1)),
        "manifest-damaged", MANIFEST,
    ),
}  # fmt: skip
TWINS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".pt2", ".gguf", ".npz", ".zip", ".tar.gz", ".PT")
MAGIC = {"gguf": b"GGUF\x03", "hdf5": b"\x89HDF\r\n", "pickle": b"\x80\x04", "xz": b"\xfd7zXZ\x00"}


def foreign(name: str, content: bytes) -> tuple[Callable[[Path], object], str, str]:
    return lambda out: (out / name).write_bytes(content), "foreign-weights", name


FAULTS |= {f"twin{suffix}": foreign(f"model{suffix}", b"weights") for suffix in TWINS}
FAULTS |= {f"disguised {kind}": foreign("notes.txt", raw + bytes(64)) for kind, raw in MAGIC.items()}


@pytest.mark.parametrize("with_source", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_with_and_without_the_source(
    llama: Checkpoint, out: Path, fault: str, with_source: bool
) -> None:
    tamper, rule, file = FAULTS[fault]
    tamper(out)
    found = audit(out, llama if with_source else None)
    assert (rule, file) in {(finding.rule, finding.file) for finding in found.findings}
    assert found.exit_code == 1
    assert all(finding.fix for finding in found.findings)


def test_a_file_is_called_unlisted_once(llama: Checkpoint, out: Path) -> None:
    (out / "notes.txt").write_text("hello")
    assert [(finding.rule, finding.file) for finding in audit(out, llama).findings] == [("file-unlisted", "notes.txt")]


@pytest.mark.parametrize("layer", [0, 1])
def test_names_of_a_plan_that_renumbers_layers_are_no_find(tmp_path: Path, layer: int) -> None:
    """Of two layers one goes, and the other has the number 0 then; what is called 1 is too much."""
    source = tiny_llama(tmp_path / "source")
    out = export(source, plan_for(source, dropped(source, layer)), tmp_path / "out").root
    assert audit(out).findings == ()
    name = "model.layers.{}.mlp.up_proj.weight"
    assert {name.format(0)} == {name.format(0), name.format(1)} & set(Checkpoint.open(out).tensors)
    save_file(load_file(out / WEIGHTS) | {name.format(1): torch.ones(2)}, out / WEIGHTS, {"format": "pt"})
    refit(out)
    assert rules(audit(out)) == ({"tensor-erased", "totals"} if layer == 1 else {"totals"})
    assert "tensor-unplanned" in rules(audit(out, source)) or layer == 1


# Not decided, and bounded.


def test_another_source_is_not_decided(out: Path, tmp_path: Path) -> None:
    found = audit(out, tiny_gpt2(tmp_path / "other"))
    assert (found.findings, found.status, found.exit_code, found.searched) == ((), "undecided", 2, False)
    assert "the source is not the model that was collapsed" in found.undecided[0]


def test_a_zip_bomb_is_read_within_bounds(llama: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_streams, "FREE", 1 << 20)
    with zipfile.ZipFile(out / "model.pt2", "w", zipfile.ZIP_DEFLATED) as made:
        for number in range(3):
            made.writestr(f"data/{number}", bytes(40 << 20))
    size = (out / "model.pt2").stat().st_size
    expanded = [
        len(part.data)
        for part in audit_streams.packed_parts(out, "model.pt2", 64)
        if isinstance(part, audit_streams.Part)
    ]
    assert sum(expanded) <= 64 * size + (1 << 20) + 64 * len(expanded)
    found = audit(out, llama)
    assert (found.exit_code, rules(found)) == (1, {"foreign-weights"})
    assert found.undecided == (
        "model.pt2: expands to more than 64 times its size and 1048576 bytes, and was not read to its end",
    )


@pytest.mark.parametrize("kind", ["nested", "lzma", "damaged"])
def test_archives_that_are_not_expanded_are_named(llama: Checkpoint, out: Path, kind: str) -> None:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("x", bytes(99))
    method = zipfile.ZIP_LZMA if kind == "lzma" else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(out / "model.pt2", "w", method) as made:
        made.writestr("inner", inner.getvalue() if kind == "nested" else bytes(range(256)) * 9)
    if kind == "damaged":
        raw = bytearray((out / "model.pt2").read_bytes())
        raw[40:44] = b"\xff\xff\xff\xff"
        (out / "model.pt2").write_bytes(raw)
    expected = {"nested": "archive within an archive", "lzma": "in a way that is not", "damaged": "cannot be expanded"}
    assert expected[kind] in audit(out, llama).undecided[0]


def test_a_plan_that_does_not_fit_its_source_is_refuted(llama: Checkpoint, out: Path) -> None:
    manifest = load_manifest(out)
    plan = Plan.model_validate(manifest.plan.to_json() | {"rewrites": (erase("no.such"),)})
    edited = manifest.model_copy(update={"plan": plan, "plan_digest": plan.digest})
    (out / MANIFEST).write_text(
        json.dumps(edited.model_dump(mode="json", by_alias=True), indent=2, sort_keys=True) + "\n"
    )
    assert place(audit(out, llama), "plan-edited") == (MANIFEST, None)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_manifest_with_what_is_no_number_is_refuted(llama: Checkpoint, out: Path, number: str) -> None:
    text = (out / MANIFEST).read_text().replace('"figures": {}', f'"figures": {{"x": {number}}}', 1)
    (out / MANIFEST).write_text(text)
    assert place(audit(out), "manifest-damaged")[0] == MANIFEST
    assert verify(out, llama, static_only=True).status == "refuted"


@pytest.mark.parametrize("text", ["", "{}", "[1", '{"format": "collapse-manifest/9"}'])
def test_a_broken_manifest_is_refuted(out: Path, text: str) -> None:
    (out / MANIFEST).write_text(text)
    assert place(audit(out), "manifest-damaged") == (MANIFEST, None)


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_what_claims_nothing_is_bad_input(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError):
        audit(tmp_path / name)


def test_a_manifest_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(CheckpointError, match="no plain file"):
        audit(tmp_path)
