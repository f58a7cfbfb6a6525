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

from collapse import staging
from collapse.checkpoint import INDEX, Checkpoint
from collapse.errors import CheckpointError, OutputError, PlanError
from collapse.manifest import file_names, load_manifest, record_of
from collapse.passes.unread_weights import UnreadWeights
from collapse.plan import DropLayers, IndexSet, Narrow
from collapse.program import Program
from collapse.schema import InputSchema
from collapse.trace import trace
from tests.architectures import save_tiny, tiny_config
from tests.contexts import context_of
from tests.tiny import PROVED, VOCABULARY, erase, export, listing, plan_for, state, tiny_llama, vocabulary

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
    assert {name: record_of(out.root / name) for name in file_names(out.root)} == load_manifest(out.root).files
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


@pytest.mark.parametrize(
    "name",
    ["model-00009-of-00009.safetensors", "backup.safetensors", "pytorch_model.bin", "consolidated.00.safetensors"],
)
def test_b12_a_weight_file_beside_an_earlier_output_is_neither_kept_nor_deleted(
    llama: Checkpoint, tmp_path: Path, name: str
) -> None:
    out = export(llama, plan_for(llama), tmp_path / "out", max_shard_size=20_000).root
    (out / name).write_bytes(b"somebody's weights")
    before = listing(tmp_path)
    with pytest.raises(OutputError, match=f"holds {name}, which collapse did not write"):
        export(llama, plan_for(llama, erase("old.bias")), out, force=True)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EIO])
def test_b13_a_disk_that_fails_at_any_file_leaves_the_old_output(
    llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    out = export(llama, plan_for(llama), tmp_path / "out", max_shard_size=20_000)
    before, fsync, left = listing(tmp_path), os.fsync, [0]

    def failing(descriptor: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    for at in range(1, 2 * len(before) + 3):  # each file when it is written and when all are published; two folders
        left[0] = at
        with pytest.raises(OutputError, match="cannot be (written|put in place)"):
            export(llama, plan_for(llama, erase("old.bias")), out.root, force=True, max_shard_size=20_000)
        assert listing(tmp_path) == before
    assert at == 2 * len(before) + 2, "every call was hit"


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


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "model.ckpt", "pytorch_model-00001-of-00002.bin"])
def test_b17_weights_of_any_pickled_kind_are_refused_by_name(tmp_path: Path, name: str) -> None:
    root = tiny_llama(tmp_path / "model").root
    (root / "model.safetensors").rename(root / name)
    with pytest.raises(CheckpointError, match=f"only pickled weights .{name}.*convert them to safetensors first"):
        Checkpoint.open(root)


TWINS = (
    "pytorch_model.bin", "PyTorch_Model.BIN", "pytorch_model.fp16.bin", "pytorch_model-00001-of-00002.bin",
    "pytorch_model_fsdp.bin", "adapter_model.bin", "model.bin", "model.pt", "model-00001-of-00002.pth", "model.ckpt",
    "consolidated.00.pth", "consolidated.pth",
)  # fmt: skip
HARMLESS = (
    "training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth",
    "rng_state_0.pth", "modelcard.bin", "tf_model.h5",
)  # fmt: skip


@pytest.mark.parametrize("name", TWINS)
def test_b17_a_pickled_twin_beside_the_weights_is_refused_unopened(tmp_path: Path, name: str) -> None:
    root = tiny_llama(tmp_path / "model").root
    torch.save({"x": Payload(tmp_path / "opened")}, root / name)
    with pytest.raises(CheckpointError) as raised:
        Checkpoint.open(root)
    assert str(raised.value) == (
        f"{root}: pickled weights ({name}) beside the safetensors: never opened here, but another loader may take "
        "them; delete them, or give a directory without them"
    )
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_b17_a_pickled_twin_is_refused_whatever_it_is(tmp_path: Path, kind: str) -> None:
    root = tiny_llama(tmp_path / "model").root
    make = {"link": lambda path: path.symlink_to("nowhere"), "folder": Path.mkdir, "fifo": os.mkfifo}
    make[kind](root / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickled weights \(pytorch_model\.bin\) beside the safetensors"):
        Checkpoint.open(root)


@pytest.mark.parametrize("name", [*HARMLESS, "pytorch_model.bin.index.json", "original"])
def test_b17_what_is_no_weights_by_its_name_is_ignored_and_stays_behind(tmp_path: Path, name: str) -> None:
    root = tiny_llama(tmp_path / "model").root
    before = Checkpoint.open(root)
    if name == "original":
        (root / name).mkdir()
        torch.save({"x": Payload(tmp_path / "opened")}, root / name / "consolidated.00.pth")
    else:
        torch.save({"x": Payload(tmp_path / "opened")}, root / name)
    found = Checkpoint.open(root)
    assert (found.side_files, found.digest) == (before.side_files, before.digest)
    out = export(found, plan_for(found), tmp_path / "out").root
    assert not (out / name).exists() and not (tmp_path / "opened").exists()


def test_b17_ten_rows_of_a_table_take_the_space_of_ten_rows(llama: Checkpoint, tmp_path: Path) -> None:
    for name in HARMLESS:
        (llama.root / name).write_bytes(b"what a trainer leaves")
    try:
        source = Checkpoint.open(llama.root)
        out = export(source, plan_for(source, vocabulary(range(10), EMBEDDING)), tmp_path / "out")
    finally:
        for name in HARMLESS:
            (llama.root / name).unlink()
    assert llama.weight_bytes - out.weight_bytes == (VOCABULARY - 10) * 32 * 4
    assert out.read_bytes(EMBEDDING) == llama.read_bytes(EMBEDDING)[: 10 * 32 * 4]
    assert not [path for path in out.root.rglob("*") if path.suffix in {".bin", ".pt", ".pth", ".pt2"}]
    table = llama.read_bytes(EMBEDDING)
    erased = [table[128 * number : 128 * (number + 1)] for number in range(10, VOCABULARY)]
    assert not [name for name, raw in listing(out.root).items() if any(row in raw for row in erased)]


# B19: experts, in one tensor for all of a layer and in a tensor each.

FUSED, ROUTER = "model.layers.{}.mlp.experts.gate_up_proj", "model.layers.{}.mlp.gate.weight"
PER_EXPERT = "model.layers.{}.mlp.experts.{}.w"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Two layers of four experts, of which a token takes two; both layouts, since nothing is run."""
    root = tmp_path_factory.mktemp("mixture") / "source"
    root.mkdir()
    tensors = {FUSED.format(layer): torch.rand(4, 6, 5) for layer in (0, 1)}
    tensors |= {ROUTER.format(layer): torch.rand(4, 5) for layer in (0, 1)}
    tensors |= {PER_EXPERT.format(layer, expert): torch.rand(3) for layer in (0, 1) for expert in range(4)}
    save_file(tensors, root / "model.safetensors", {"format": "pt"})
    config = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    (root / "config.json").write_text(json.dumps(config))
    return Checkpoint.open(root)


def experts(kept: list[int], *layers: int) -> Narrow:
    names = [name.format(layer) for layer in layers for name in (FUSED, ROUTER)]
    config = {"num_local_experts": len(kept)}
    return vocabulary(kept, *names, **{"pass": "experts"}, site="experts", size=4, relabels="channels", config=config)


def expert_list(kept: list[int], layer: int) -> DropLayers:
    gone = tuple(PER_EXPERT.format(layer, number) for number in range(4) if number not in kept)
    return DropLayers(
        **{"pass": "experts"}, site=f"model.layers.{layer}.mlp.experts", evidence=PROVED, size=4,
        prefix=f"model.layers.{layer}.mlp.experts.", kept=IndexSet.of(kept), tensors=gone,
        config={"num_local_experts": len(kept)},
    )  # fmt: skip


def test_b19_router_and_experts_of_either_layout_keep_the_same_rows(mixture: Checkpoint, tmp_path: Path) -> None:
    plan = plan_for(mixture, experts([0, 2, 3], 0, 1), expert_list([0, 2, 3], 0), expert_list([0, 2, 3], 1))
    out = export(mixture, plan, tmp_path / "out")
    before, after = (load_file(one.root / "model.safetensors") for one in (mixture, out))
    for layer in (0, 1):
        for name in (FUSED.format(layer), ROUTER.format(layer)):
            assert torch.equal(after[name], before[name][[0, 2, 3]])
        for new, old in enumerate((0, 2, 3)):
            assert torch.equal(after[PER_EXPERT.format(layer, new)], before[PER_EXPERT.format(layer, old)])
        assert PER_EXPERT.format(layer, 3) not in after
    assert out.config["num_local_experts"] == 3


@pytest.mark.parametrize(
    ("rewrites", "message"),
    [
        ([experts([0, 1, 2], 0)], r"keeps \[4, .*narrow all layers alike"),
        ([experts([0, 1, 2], 0), experts([0, 1], 1)], r"keeps \[2, .*narrow all layers alike"),
        ([expert_list([0, 1, 2], 0)], "the lists of other layers keep another number"),
        ([expert_list([0, 1, 2], 0), expert_list([0, 1], 1)], "the lists of other layers keep another number"),
        ([experts([3], 0, 1)], "1 experts would stay, and a token takes 2"),
    ],
)
def test_b19_counts_that_no_config_can_say_are_refused(
    mixture: Checkpoint, tmp_path: Path, rewrites: list[Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        export(mixture, plan_for(mixture, *rewrites), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_b19_a_config_with_a_number_for_each_layer_may_differ_between_layers(
    mixture: Checkpoint, tmp_path: Path
) -> None:
    first = experts([0, 1, 2], 0).model_copy(update={"config": {"experts_of.0": 3}})
    (root := tmp_path / "source").mkdir()
    for name, raw in listing(mixture.root).items():
        (root / name).write_bytes(raw)
    (root / "config.json").write_text(json.dumps({"model_type": "mixtral", "experts_of": [4, 4]}))
    source = Checkpoint.open(root)
    assert export(source, plan_for(source, first), tmp_path / "out").config["experts_of"] == [3, 4]


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
