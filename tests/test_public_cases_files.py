"""Reported faults of tools that do this job, those about files; the number is that of the collected case."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from collapse import erase as writer
from collapse import staging
from collapse.checkpoint import INDEX, Checkpoint
from collapse.errors import CheckpointError, OutputError
from collapse.passes.unread_weights import UnreadWeights
from collapse.program import Program
from collapse.schema import InputSchema
from collapse.trace import trace
from tests.architectures import save_tiny, tiny_config
from tests.contexts import context_of
from tests.tiny import VOCABULARY, erase, export, listing, plan_for, state, tiny_llama, vocabulary

EMBEDDING = "model.embed_tokens.weight"
KEPT = [0, 1, 2, *range(5, 40), 63]
DEAD = torch.arange(1.0, 6.0)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "source", extra={"old.bias": DEAD})


@pytest.fixture(scope="module")
def program() -> Program:
    """A trace at fixed sizes, which takes a fraction of the time of a dynamic one."""
    return trace(tiny_config("llama", num_hidden_layers=1), dynamic=False, batch=1, new=17, past=36)


@pytest.fixture(autouse=True)
def source_untouched(llama: Checkpoint) -> Iterator[None]:
    before = listing(llama.root)
    yield
    assert listing(llama.root) == before


def loaded(checkpoint: Checkpoint) -> PreTrainedModel:
    model, info = AutoModelForCausalLM.from_pretrained(checkpoint.root, output_loading_info=True)
    assert not (info["missing_keys"] or info["mismatched_keys"])
    return model.eval()


def test_b10_a_tie_is_written_once_and_lives_as_long_as_one_of_its_names(tmp_path: Path, program: Program) -> None:
    root = save_tiny("llama", tmp_path / "source", num_hidden_layers=1)
    path = root / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"lm_head.weight": weights[EMBEDDING].clone()}, path, {"format": "pt"})
    schema = InputSchema(type="text", tokens=tuple(range(48)), max_tokens=16)
    (dead,) = UnreadWeights().propose(context_of(root, schema, program=program)).rewrites
    assert dead.tensors == ("lm_head.weight",)
    source = Checkpoint.open(root)
    out = export(source, plan_for(source, dead), tmp_path / "out")
    assert set(out.tensors) == set(source.tensors) - {"lm_head.weight"}
    assert out.weight_bytes == source.weight_bytes - 48 * 16 * 4
    assert out.read_bytes(EMBEDDING) == source.read_bytes(EMBEDDING)
    model = loaded(out)
    assert out.config["tie_word_embeddings"] and model.lm_head.weight is model.model.embed_tokens.weight


def test_b11_the_source_that_is_read_lazily_is_never_the_file_that_is_written(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "model", extra={"old.bias": DEAD})
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in source.root.iterdir()}
    for force in (False, True):
        with pytest.raises(OutputError, match="overlaps the source"):
            export(source, plan_for(source, erase("old.bias")), source.root, force=force)
    out = export(source, plan_for(source, erase("old.bias")), tmp_path / "out")
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in source.root.iterdir()} == before
    assert state(out) == {name: value for name, value in state(source).items() if name != "old.bias"}


@pytest.mark.parametrize(("old", "new"), [(10**9, 9_000), (9_000, 10**9)])
def test_b12_stale_files_never_shadow_the_output(llama: Checkpoint, tmp_path: Path, old: int, new: int) -> None:
    export(llama, plan_for(llama), tmp_path / "out", max_shard_size=old)
    plan = plan_for(llama, erase("old.bias"), vocabulary(KEPT, EMBEDDING))
    out = export(llama, plan, tmp_path / "out", force=True, max_shard_size=new)
    files = {path.name for path in out.root.rglob("*.safetensors")}
    index = out.read_json(INDEX)
    assert files == (set(index["weight_map"].values()) if index else {"model.safetensors"}) == set(out.weight_files)
    row = llama.tensors[EMBEDDING].nbytes // VOCABULARY
    table = llama.read_bytes(EMBEDDING)
    gone = [table[row * number : row * (number + 1)] for number in range(VOCABULARY) if number not in KEPT]
    for raw in listing(out.root).values():
        assert not any(rows in raw for rows in (*gone, DEAD.numpy().tobytes()))


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "backup.safetensors", "consolidated.safetensors"])
def test_b12_a_weight_file_that_no_index_names_is_refused(tmp_path: Path, name: str) -> None:
    root = tiny_llama(tmp_path / "model").root
    save_file({"old.bias": DEAD}, root / name)
    with pytest.raises(CheckpointError, match=f"{name} is not part of the model"):
        Checkpoint.open(root)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EIO])
def test_b13_a_disk_that_fails_at_any_file_leaves_the_old_output(
    llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    out = export(llama, plan_for(llama), tmp_path / "out", max_shard_size=20_000)
    before, write, left = listing(tmp_path), writer._write, [0]

    def failing(path: Path, *rest: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            path.write_bytes(b"half")
            raise OSError(code, os.strerror(code), str(path))
        return write(path, *rest)

    monkeypatch.setattr(writer, "_write", failing)
    for at in range(1, len(before)):  # all files but the manifest
        left[0] = at
        with pytest.raises(OutputError, match="cannot be written"):
            export(llama, plan_for(llama, erase("old.bias")), out.root, force=True, max_shard_size=20_000)
        assert listing(tmp_path) == before


def test_a_file_system_without_rename_is_one_clear_error_and_keeps_the_old_output(
    llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = export(llama, plan_for(llama), tmp_path / "out").root
    before = listing(tmp_path)

    def refusing(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), str(self))

    monkeypatch.setattr(staging, "_exchange", lambda left, right: False)
    monkeypatch.setattr(Path, "rename", refusing)
    with pytest.raises(OutputError, match="cannot be put in place"):
        export(llama, plan_for(llama, erase("old.bias")), out, force=True)
    assert listing(tmp_path) == before


WAYS_OUT = ("../x.safetensors", "ABSOLUTE", "a/../../x.safetensors", "..\\x.safetensors", "x\0.safetensors",
            "link.safetensors", "folder.safetensors", "fifo.safetensors")  # fmt: skip


@pytest.mark.parametrize("name", WAYS_OUT)
def test_b15_an_index_cannot_lead_out_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    root = tiny_llama(tmp_path / "model").root
    outside = Path(shutil.copy(root / "model.safetensors", tmp_path / "x.safetensors"))
    (root / "model.safetensors").unlink()
    (root / "link.safetensors").symlink_to(outside)
    (root / "folder.safetensors").mkdir()
    os.mkfifo(root / "fifo.safetensors")
    target = str(outside) if name == "ABSOLUTE" else name
    (root / INDEX).write_text(json.dumps({"weight_map": {EMBEDDING: target}}))
    monkeypatch.setattr("collapse.checkpoint.read_header", lambda *_: pytest.fail("a weight file was opened"))
    with pytest.raises(CheckpointError, match="outside the model|link out of the model|no plain file"):
        Checkpoint.open(root)


def test_b15_shard_names_of_the_source_never_become_names_of_the_output(tmp_path: Path) -> None:
    root = tiny_llama(tmp_path / "model").root
    (root / "model.safetensors").rename(root / ".config.json.safetensors")
    source_names = load_file(root / ".config.json.safetensors")
    (root / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(source_names, ".config.json.safetensors")}))
    source = Checkpoint.open(root)
    out = export(source, plan_for(source), tmp_path / "out")
    assert out.weight_files == ("model.safetensors",)
    assert state(out) == state(source)


class Payload:
    """Makes a pickle that touches a file when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_b17_pickled_weights_are_refused_unopened(tmp_path: Path) -> None:
    root = tiny_llama(tmp_path / "model").root
    (root / "model.safetensors").unlink()
    torch.save({"x": Payload(tmp_path / "opened")}, root / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        Checkpoint.open(root)
    assert not (tmp_path / "opened").exists()


def test_b17_ten_rows_of_a_table_take_the_space_of_ten_rows(llama: Checkpoint, tmp_path: Path) -> None:
    (llama.root / "pytorch_model.bin").write_bytes(b"twin")
    try:
        out = export(llama, plan_for(llama, vocabulary(range(10), EMBEDDING)), tmp_path / "out")
    finally:
        (llama.root / "pytorch_model.bin").unlink()
    assert llama.weight_bytes - out.weight_bytes == (VOCABULARY - 10) * 32 * 4
    assert out.read_bytes(EMBEDDING) == llama.read_bytes(EMBEDDING)[: 10 * 32 * 4]
    assert not [path for path in out.root.rglob("*") if path.suffix in {".bin", ".pt", ".pth", ".pt2"}]


def test_b26_each_survivor_keeps_its_own_dtype_and_bytes(tmp_path: Path) -> None:
    norm = torch.linspace(0.5, 1.5, 32)
    extra = {"old.bias": DEAD, "model.norm.weight": norm}
    source = tiny_llama(tmp_path / "source", dtype=torch.bfloat16, extra=extra)
    out = export(source, plan_for(source, erase("old.bias")), tmp_path / "out")
    assert {out.tensors[name].dtype for name in out.tensors} == {"BF16", "F32"}
    assert state(out) == {name: value for name, value in state(source).items() if name != "old.bias"}
    assert out.read_bytes("model.norm.weight") == norm.numpy().tobytes()
    assert out.config["dtype"] == source.config["dtype"] == "bfloat16"
    assert source.weight_bytes - out.weight_bytes == DEAD.numel() * 4


def test_weights_say_that_they_are_pytorchs_in_every_shard(llama: Checkpoint, tmp_path: Path) -> None:
    out = export(llama, plan_for(llama), tmp_path / "out", max_shard_size=20_000)
    assert len(out.weight_files) > 1
    for name in out.weight_files:
        with safe_open(out.root / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_mode_bits_are_the_sources(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source")
    modes = {"model.safetensors": 0o440, "config.json": 0o664, "generation_config.json": 0o600}
    for name, mode in modes.items():
        (source.root / name).chmod(mode)
    out = export(source, plan_for(source), tmp_path / "out").root
    assert {name: (out / name).stat().st_mode & 0o7777 for name in modes} == modes


def test_weights_saved_without_the_outer_prefix_are_all_found_on_reload(tmp_path: Path) -> None:
    root = tiny_llama(tmp_path / "source").root
    weights = load_file(root / "model.safetensors")
    inner = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(inner | {"old.bias": DEAD}, root / "model.safetensors", {"format": "pt"})
    source = Checkpoint.open(root)
    plan = plan_for(source, erase("old.bias"), vocabulary(KEPT, "embed_tokens.weight"))
    out = export(source, plan, tmp_path / "out")
    model, info = AutoModelForCausalLM.from_pretrained(out.root, output_loading_info=True)
    assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"])
    assert torch.equal(model.model.embed_tokens.weight, weights[EMBEDDING][KEPT])
