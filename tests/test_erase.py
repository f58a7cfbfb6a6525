"""Writing an output: which bytes it has, where it may go, and what is left when it fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from collapse.checkpoint import INDEX, Checkpoint, TensorInfo
from collapse.errors import PlanError
from collapse.manifest import load_manifest
from collapse.plan import Axis, IndexSet, Narrow, Plan, ShortCircuit, Specialise
from collapse.rewrite.config import config_edits
from collapse.rewrite.tensors import OutputTensor, Piece, output_tensors
from tests.exported import EMBEDDING, KEPT
from tests.tiny import (
    CONTEXT,
    PROVED,
    erase,
    export,
    listing,
    plan_for,
    positions,
    state,
    tiny_gpt2,
    tiny_llama,
    vocabulary,
)


@pytest.fixture(autouse=True)
def source_untouched(llama: Checkpoint) -> Iterator[None]:
    before = listing(llama.root)
    yield
    assert listing(llama.root) == before


# Which bytes.


def test_survivors_are_the_sources_bytes_and_the_erased_tensor_is_gone(llama: Checkpoint, tmp_path: Path) -> None:
    out = export(llama, plan_for(llama, erase("old.bias")), tmp_path / "out")
    expected = state(llama)
    del expected["old.bias"]
    assert state(out) == expected
    raw = (out.root / "model.safetensors").read_bytes()
    assert b"old.bias" not in raw
    assert llama.read_bytes("old.bias") not in raw


def test_output_bytes_are_source_bytes_less_erased_bytes(llama: Checkpoint, tmp_path: Path) -> None:
    out = export(llama, plan_for(llama, erase("old.bias"), vocabulary(KEPT, EMBEDDING)), tmp_path / "out")
    assert out.weight_bytes == llama.weight_bytes - 5 * 4 - (64 - len(KEPT)) * 32 * 4
    manifest = load_manifest(out.root)
    assert manifest.kept.bytes == out.weight_bytes
    assert manifest.erased.model_dump() == {"tensors": 1, "parameters": 5 + 25 * 32, "bytes": 20 + 25 * 128}


def test_narrowed_rows_are_the_kept_rows_in_order(llama: Checkpoint, tmp_path: Path) -> None:
    out = export(llama, plan_for(llama, vocabulary(KEPT, EMBEDDING)), tmp_path / "out")
    before, after = load_file(llama.root / "model.safetensors"), load_file(out.root / "model.safetensors")
    assert torch.equal(after[EMBEDDING], before[EMBEDDING][KEPT])
    assert out.config["vocab_size"] == len(KEPT)
    raw = (out.root / "model.safetensors").read_bytes()
    rows = {row: before[EMBEDDING][row].numpy().tobytes() for row in range(64)}
    assert [row for row in rows if rows[row] in raw] == KEPT, "a scan of every byte finds no dropped row"


def test_file_is_what_the_safetensors_library_writes(llama: Checkpoint, tmp_path: Path) -> None:
    extra = {"b": torch.arange(3, dtype=torch.uint8), "a": torch.ones(2, 2, dtype=torch.bfloat16), "é": torch.ones(1)}
    source = tiny_llama(tmp_path / "source", extra=extra)
    out = export(source, plan_for(source), tmp_path / "out")
    save_file(load_file(source.root / "model.safetensors"), tmp_path / "theirs", {"format": "pt"})
    assert (out.root / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_every_dtype_survives_byte_for_byte(tmp_path: Path) -> None:
    extra = {
        "f8": torch.arange(-8.0, 8.0).reshape(4, 4).to(torch.float8_e4m3fn),
        "norm32": torch.rand(7, dtype=torch.float32),
        "nan": torch.tensor([float("nan"), -0.0]),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
    }
    source = tiny_llama(tmp_path / "source", dtype=torch.bfloat16, extra=extra)
    out = export(source, plan_for(source, vocabulary(KEPT, EMBEDDING)), tmp_path / "out")
    before, after = state(source), state(out)
    assert {name: entry for name, entry in after.items() if name != EMBEDDING} == {
        name: entry for name, entry in before.items() if name != EMBEDDING
    }
    assert {entry[0] for entry in after.values()} == {"BF16", "F8_E4M3", "F32", "BOOL", "F64"}
    assert out.config["dtype"] == "bfloat16"


def test_shards_are_balanced_anew_and_the_index_adds_up(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source", shard_size=9_000)
    assert len(source.weight_files) > 3
    one = export(source, plan_for(source), tmp_path / "one")
    assert one.weight_files == ("model.safetensors",)
    assert not (one.root / INDEX).exists()
    many = export(source, plan_for(source), tmp_path / "many", max_shard_size=20_000)
    index = json.loads((many.root / INDEX).read_bytes())
    assert index["metadata"] == {
        "total_size": source.weight_bytes, "total_parameters": sum(i.numel for i in source.tensors.values())
    }  # fmt: skip
    count = len(many.weight_files)
    assert many.weight_files == tuple(f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1))
    assert all(sum(i.nbytes for i in many.tensors.values() if i.file == f) <= 20_000 for f in many.weight_files)
    assert state(one) == state(source) == state(many)


@pytest.mark.parametrize("dead", [EMBEDDING, "lm_head.weight"])
def test_the_living_name_of_a_tie_survives_the_dead_one(tmp_path: Path, dead: str) -> None:
    source = tiny_llama(tmp_path / "source", both_names=True)
    (alive,) = {EMBEDDING, "lm_head.weight"} - {dead}
    out = export(source, plan_for(source, erase(dead), vocabulary(KEPT, alive)), tmp_path / "out")
    assert dead not in out.tensors
    rows = source.read_bytes(alive)
    assert out.read_bytes(alive) == b"".join(rows[row * 128 : row * 128 + 128] for row in KEPT)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_select_as_torch_does(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dims = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    kept = {d: IndexSet.of(data.draw(st.sets(st.integers(0, shape[d] - 1), min_size=1))) for d in sorted(dims)}
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).reshape(shape)
    raw = b"head" + tensor.numpy().tobytes()
    info = TensorInfo("t", "I16", shape, "f", 4, len(raw))
    pieces = list(OutputTensor("t", "I16", tuple(shape), info, kept).pieces())
    for dim, rows in kept.items():
        tensor = tensor.index_select(dim, torch.tensor(list(rows)))
    assert b"".join(raw[p.start : p.stop] for p in pieces if isinstance(p, Piece)) == tensor.numpy().tobytes()
    assert all(a.stop < b.start for a, b in pairwise(pieces))  # type: ignore[union-attr]


def test_file_modes_are_kept(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source")
    (source.root / "model.safetensors").chmod(0o640)
    (source.root / "config.json").chmod(0o444)
    out = export(source, plan_for(source, vocabulary(KEPT, EMBEDDING)), tmp_path / "out").root
    assert [(out / name).stat().st_mode & 0o777 for name in ("model.safetensors", "config.json")] == [0o640, 0o444]


# Stages.


def short(stage: str, **fields: object) -> ShortCircuit:
    whole = {"pass": "dead-module", "site": "old", "evidence": PROVED, "by": "zero", "tensors": ("old.bias",)}
    return ShortCircuit(**(whole | {"stage": stage} | fields))


@pytest.mark.parametrize("stage", ["fuse", "short-circuit"])
def test_early_stages_keep_the_weights(llama: Checkpoint, stage: str) -> None:
    names = [tensor.name for tensor in output_tensors(llama, plan_for(llama, short(stage)))]
    assert names == list(llama.tensors)


def test_a_placeholder_is_16_bytes_of_zeros(llama: Checkpoint, tmp_path: Path) -> None:
    out = export(llama, plan_for(llama, short("erase", placeholder=True)), tmp_path / "out")
    assert state(out)["old.bias"] == ("F32", (4,), bytes(16))
    assert "old.bias" not in export(llama, plan_for(llama, short("erase")), tmp_path / "gone").tensors


# Plans that do not fit.


def narrow(**fields: object) -> Narrow:
    return vocabulary(KEPT, EMBEDDING, **fields)


@pytest.mark.parametrize(
    ("rewrites", "message"),
    [
        ([erase("no.such")], "has no tensor no.such"),
        ([short("fuse", tensors=("no.such",))], "has no tensor no.such"),
        ([vocabulary(KEPT, "no.such")], "has no tensor no.such"),
        ([vocabulary(KEPT, "model.norm.weight")], "has 32 rows, the plan says 64"),
        ([narrow(axes=(Axis(tensor=EMBEDDING, dim=2),))], "has 2 dimensions"),
        ([narrow(axes=(Axis(tensor=EMBEDDING, dim=-1),))], "has 2 dimensions"),
        ([vocabulary([1, 64], EMBEDDING)], "out of range for 64 rows"),
        ([vocabulary([], EMBEDDING)], "no row is kept"),
        ([narrow(), erase(EMBEDDING)], "both erased and narrowed"),
        ([narrow(), narrow()], "renumbered twice"),
        ([narrow(relabels="positions"), narrow()], "narrowed twice"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(llama: Checkpoint, tmp_path: Path, rewrites: list, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        export(llama, plan_for(llama, *rewrites), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_config_edits_follow_dotted_paths_in_order() -> None:
    def switch(config: dict) -> Specialise:
        return Specialise(**{"pass": "p"}, site="s", evidence=PROVED, config=config)

    plan = Plan(
        source="", model_type="", schema={}, schema_digest="",
        rewrites=(switch({"a.b": 1, "new": [1]}), switch({"a.b": 2})),
    )  # fmt: skip
    config = {"z": None, "a": {"c": 3, "b": 0}}
    assert config_edits(config, plan) == {"z": None, "a": {"c": 3, "b": 2}, "new": [1]}
    assert config == {"z": None, "a": {"c": 3, "b": 0}}
    with pytest.raises(PlanError, match=r"config.json has no x.y"):
        config_edits(config, plan.model_copy(update={"rewrites": (switch({"x.y.z": 1}),)}))
    with pytest.raises(PlanError, match="has no z"):
        config_edits(config, plan.model_copy(update={"rewrites": (switch({"z.q": 1}),)}))


def test_an_object_in_a_plan_is_written_the_same_before_and_after_it_was_saved(tmp_path: Path) -> None:
    edit = Specialise(**{"pass": "p"}, site="s", evidence=PROVED, config={"rope": {"type": "default", "theta": 1.0}})
    plan = Plan(source="", model_type="", schema={}, schema_digest="", rewrites=(edit,))
    plan.save(tmp_path / "plan.json")
    texts = [json.dumps(config_edits({"rope": {}}, p)) for p in (plan, Plan.load(tmp_path / "plan.json"))]
    assert texts == ['{"rope": {"theta": 1.0, "type": "default"}}'] * 2


def test_an_unedited_config_keeps_its_bytes(llama: Checkpoint, tmp_path: Path) -> None:
    out = export(llama, plan_for(llama, erase("old.bias")), tmp_path / "out")
    assert (out.root / "config.json").read_bytes() == (llama.root / "config.json").read_bytes()


def test_position_rows_go_with_their_config(tmp_path: Path) -> None:
    source = tiny_gpt2(tmp_path / "source")
    out = export(source, plan_for(source, positions(16)), tmp_path / "out")
    assert out.tensors["transformer.wpe.weight"].shape == (16, 32)
    assert (out.config["n_positions"], source.config["n_positions"]) == (16, CONTEXT)
    assert list(out.config) == list(source.config)
