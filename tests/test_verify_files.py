"""Tampering with the files: the verifier refutes each fault, and names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from collapse.checkpoint import Checkpoint
from collapse.manifest import MANIFEST, file_names, record_of
from collapse.plan import Plan
from collapse.verify import verify
from tests.exported import EMBEDDING, KEPT, WEIGHTS, details
from tests.tiny import (
    tiny_gpt2,
)

# Tampering: each fault is refuted, and named.


def put_back(out: Path, value: torch.Tensor) -> None:
    save_file(load_file(out / WEIGHTS) | {"old.bias": value}, out / WEIGHTS, {"format": "pt"})


def flip(out: Path, name: str = EMBEDDING) -> None:
    info = Checkpoint.open(out).tensors[name]
    raw = bytearray((out / WEIGHTS).read_bytes())
    raw[info.start + 5] ^= 1
    (out / WEIGHTS).write_bytes(raw)


def edit(out: Path, file: str, **values: object) -> None:
    value = json.loads((out / file).read_bytes()) | values
    (out / file).write_text(json.dumps(value, indent=2))


def swap_rows(out: Path, first: int, second: int) -> None:
    tensors = load_file(out / WEIGHTS)
    tensors[EMBEDDING][[first, second]] = tensors[EMBEDDING][[second, first]]
    save_file(tensors, out / WEIGHTS, {"format": "pt"})


def link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def hide_in_metadata(out: Path) -> None:
    save_file(load_file(out / WEIGHTS), out / WEIGHTS, {"format": "pt", "old.bias": "AACAPwAAAEA="})


FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    # what is done, what says so with the old manifest, what says so with a manifest edited to fit
    "erased tensor back": (
        lambda out: put_back(out, torch.arange(1.0, 6.0)), f"{WEIGHTS}: old.bias: the erased tensor is in the file", ""
    ),
    "erased tensor zeroed": (
        lambda out: put_back(out, torch.zeros(5)), f"{WEIGHTS}: old.bias: the erased tensor is in the file", ""
    ),
    "stale shard": (
        lambda out: save_file({"old.bias": torch.ones(5)}, out / "model-00002-of-00002.safetensors"),
        "model-00002-of-00002.safetensors: not listed", "old.bias: the erased tensor is in the file",
    ),
    "empty shard": (
        lambda out: save_file({}, out / "model-extra.safetensors"), "not listed", "a weight file without tensors"
    ),
    "bin twin": (
        lambda out: (out / "pytorch_model.bin").write_bytes(b"weights"),
        "pytorch_model.bin: not listed", "pytorch_model.bin: a file that neither",
    ),
    "hidden in a folder": (
        lambda out: ((out / "old").mkdir(), save_file({"old.bias": torch.ones(5)}, out / "old" / WEIGHTS)),
        f"old/{WEIGHTS}: not listed", f"old/{WEIGHTS}: old.bias: the erased tensor",
    ),
    "hidden in metadata": (hide_in_metadata, f"{WEIGHTS}: the header is not the canonical one", ""),
    "byte flipped": (flip, f"{WEIGHTS}: size or sha256 differs", f"{WEIGHTS}: {EMBEDDING}: byte 5 differs"),
    "norm flipped": (
        lambda out: flip(out, "model.norm.weight"), f"{WEIGHTS}: size or sha256 differs",
        f"{WEIGHTS}: model.norm.weight: byte 5 differs",
    ),
    "rows swapped": (lambda out: swap_rows(out, 7, 9), "sha256 differs", f"{EMBEDDING}: byte {7 * 128} differs"),
    "truncated": (
        lambda out: (out / WEIGHTS).write_bytes((out / WEIGHTS).read_bytes()[:-4]), "sha256 differs", "cut short"
    ),
    "survivor missing": (
        lambda out: save_file({k: v for k, v in load_file(out / WEIGHTS).items() if "norm" not in k}, out / WEIGHTS),
        "model.norm.weight: a tensor that must survive is missing", "",
    ),
    "survivor cast": (
        lambda out: save_file({k: v.half() for k, v in load_file(out / WEIGHTS).items()}, out / WEIGHTS),
        f"{EMBEDDING}: F16 [{len(KEPT)}, 32], should be F32", "",
    ),
    "weights gone": (
        lambda out: (out / WEIGHTS).unlink(), f"{WEIGHTS}: listed in collapse.json, but missing",
        "must survive is missing",
    ),
    "config edited": (
        lambda out: edit(out, "config.json", rms_norm_eps=0.1), "config.json: size or sha256", "config.json: differs"
    ),
    "file linked": (lambda out: link(out / "config.json"), "config.json: no plain file", ""),
    "index to elsewhere": (
        lambda out: (out / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../x.safetensors"}}'),
        "model.safetensors.index.json: not listed", "does not list the tensors",
    ),
}  # fmt: skip


def refit_manifest(out: Path) -> None:
    """Edit the manifest so that it fits the files as they are now."""
    manifest = json.loads((out / MANIFEST).read_bytes())
    manifest["files"] = {name: record_of(out / name).model_dump() for name in file_names(out)}
    (out / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("fault", FAULTS)
def test_tampering_is_refuted_by_name(llama: Checkpoint, out: Path, fault: str) -> None:
    tamper, message, _ = FAULTS[fault]
    tamper(out)
    verdict = verify(out, llama, static_only=True)
    assert (verdict.status, verdict.exit_code) == ("refuted", 1)
    assert message in details(verdict)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_manifest_edited_to_fit_hides_nothing(llama: Checkpoint, out: Path, fault: str) -> None:
    tamper, message, refitted = FAULTS[fault]
    tamper(out)
    refit_manifest(out)
    verdict = verify(out, llama, static_only=True)
    assert (verdict.status, verdict.exit_code) == ("refuted", 1)
    assert (refitted or message) in details(verdict)


@pytest.mark.parametrize("fault", ["erased tensor back", "stale shard", "byte flipped", "bin twin", "file linked"])
def test_without_the_source_digests_still_tell(out: Path, fault: str) -> None:
    FAULTS[fault][0](out)
    assert verify(out, None).status == "refuted"


def test_an_edited_manifest_is_refuted(llama: Checkpoint, out: Path, plan: Plan) -> None:
    manifest = json.loads((out / MANIFEST).read_bytes())
    manifest["plan"]["rewrites"] = manifest["plan"]["rewrites"][1:]
    (out / MANIFEST).write_text(json.dumps(manifest))
    assert "plan digest: collapse.json: the plan was edited" in details(verify(out, llama, static_only=True))
    manifest["plan_digest"] = Plan.model_validate(manifest["plan"]).digest
    (out / MANIFEST).write_text(json.dumps(manifest))
    assert "old.bias: a tensor that must survive is missing" in details(verify(out, llama, static_only=True))
    put_back(out, torch.arange(1.0, 6.0))
    refit_manifest(out)
    assert verify(out, llama, static_only=True).status == "verified", "an honest output of another plan"
    assert "expected plan: collapse.json" in details(verify(out, llama, plan=plan, static_only=True))


@pytest.mark.parametrize("text", ["", "{}", "[1", '{"format": "collapse-manifest/9"}'])
def test_a_broken_manifest_is_refuted(llama: Checkpoint, out: Path, text: str) -> None:
    (out / MANIFEST).write_text(text)
    verdict = verify(out, llama, samples=[[1]])
    assert [found.name for found in verdict.failures] == ["manifest"]


def test_another_source_is_refuted(out: Path, tmp_path: Path) -> None:
    other = tiny_gpt2(tmp_path / "other")
    assert "the source is another than the plan's" in details(verify(out, other, static_only=True))


def test_what_was_not_run_is_not_verified(llama: Checkpoint, out: Path) -> None:
    assert (verify(out, None).status, verify(out, None).exit_code) == ("inconclusive", 2)
    assert verify(out, llama).status == "inconclusive"
    assert verify(out, llama, static_only=True).status == "verified"
