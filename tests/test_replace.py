"""Computed weights in files: the values beside a plan, what is written, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from collapse.checkpoint import Checkpoint
from collapse.errors import PlanError
from collapse.fingerprint import data_digest
from collapse.manifest import load_manifest
from collapse.plan import Plan, Replace
from collapse.rewrite.values import load_values, save_plan, values_path
from tests.audit_cases import dropped
from tests.exported import EMBEDDING, KEPT, WEIGHTS
from tests.replacing import MEASURED, drawn, replacing, values_in
from tests.tiny import PROVED, VOCABULARY, erase, export, plan_for, state, tiny_llama, vocabulary

DOWN = "model.layers.1.mlp.down_proj.weight"
HEAD = "lm_head.weight"


def logits(model, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


# What is written.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_reloaded_model_is_the_source_with_the_computed_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    source = tiny_llama(tmp_path / "source", dtype=dtype)
    new = drawn(source, DOWN)
    plan = plan_for(source, replacing(new))
    out = export(source, plan, tmp_path / "out", values=values_in(tmp_path / "values", new))
    expected = state(source)
    expected[DOWN] = (*expected[DOWN][:2], out.read_bytes(DOWN))
    assert state(out) == expected and torch.equal(load_file(out.root / WEIGHTS)[DOWN], new[DOWN])
    assert source.read_bytes(DOWN)[:64] not in (out.root / WEIGHTS).read_bytes()
    by_hand = AutoModelForCausalLM.from_pretrained(source.root)
    by_hand.model.layers[1].mlp.down_proj.weight.data.copy_(new[DOWN])
    found = AutoModelForCausalLM.from_pretrained(out.root)
    assert found.dtype == dtype and torch.equal(logits(found, [1, 7, 9, 40]), logits(by_hand, [1, 7, 9, 40]))
    manifest = load_manifest(out.root)
    assert manifest.replaced.model_dump() == {"tensors": 1, "parameters": 32 * 48, "bytes": 32 * 48 * dtype.itemsize}
    assert manifest.erased.model_dump() == {"tensors": 0, "parameters": 0, "bytes": 0}


def test_a_tied_embedding_is_replaced_in_the_shape_that_the_vocabulary_leaves(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source")
    new = {EMBEDDING: drawn(source, EMBEDDING)[EMBEDDING][: len(KEPT)].clone()}
    plan = plan_for(source, vocabulary(KEPT, EMBEDDING), replacing(new))
    out = export(source, plan, tmp_path / "out", values=values_in(tmp_path / "values", new))
    assert out.tensors[EMBEDDING].shape == (len(KEPT), 32) and HEAD not in out.tensors
    model = AutoModelForCausalLM.from_pretrained(out.root)
    assert torch.equal(model.get_input_embeddings().weight, new[EMBEDDING])
    assert torch.equal(model.get_output_embeddings().weight, new[EMBEDDING])


def test_values_follow_a_layer_to_its_new_number(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source")
    new = drawn(source, DOWN, "model.norm.weight")
    plan = plan_for(source, dropped(source, 0), replacing(new))
    out = export(source, plan, tmp_path / "out", values=values_in(tmp_path / "values", new))
    tensors = load_file(out.root / WEIGHTS)
    assert torch.equal(tensors["model.layers.0.mlp.down_proj.weight"], new[DOWN]) and DOWN not in tensors
    assert torch.equal(tensors["model.norm.weight"], new["model.norm.weight"])


def test_values_go_into_shards_and_large_ones_are_copied_in_parts(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source", extra={"old.bias": torch.ones(300, 1024)})
    new = drawn(source, "old.bias", DOWN)
    plan = plan_for(source, replacing(new))
    out = export(source, plan, tmp_path / "out", values=values_in(tmp_path / "values", new), max_shard_size=20_000)
    assert len(out.weight_files) > 2
    assert {name: data_digest(tensor) for name, tensor in new.items()} == plan.rewrites[0].tensors
    assert all(out.read_bytes(name) == new[name].numpy().tobytes() for name in new)


# The file beside the plan.


@pytest.fixture(scope="module")
def new(llama: Checkpoint) -> dict[str, torch.Tensor]:
    return drawn(llama, DOWN, "model.norm.weight")


@pytest.fixture
def saved(llama: Checkpoint, new: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    save_plan(plan_for(llama, replacing(new)), values_in(tmp_path / "given", new), path)
    return path


def test_a_plan_and_its_values_are_saved_and_loaded_together(saved: Path, new: dict[str, torch.Tensor]) -> None:
    plan = Plan.load(saved)
    values = load_values(plan, saved)
    assert values is not None and values.tensors.keys() == new.keys()
    assert {name: values.digest(name) for name in new} == plan.rewrites[0].tensors
    beside = saved.with_suffix(".safetensors")
    save_file(new, saved.with_name("theirs"), {"format": "pt"})
    assert beside.read_bytes() == saved.with_name("theirs").read_bytes()
    save_plan(plan, values, saved)
    assert load_values(plan, saved) == values, "saving again over the file that the values are read from"
    assert sorted(path.name for path in saved.parent.iterdir()) == ["given", "plan.json", "plan.safetensors", "theirs"]


def test_a_plan_that_replaces_nothing_has_no_values(llama: Checkpoint, tmp_path: Path) -> None:
    plan = plan_for(llama, erase("old.bias"))
    save_plan(plan, None, tmp_path / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert load_values(plan, tmp_path / "plan.json") is None


def test_values_of_another_plan_are_not_saved(llama: Checkpoint, new: dict[str, torch.Tensor], tmp_path: Path) -> None:
    plan = plan_for(llama, replacing(drawn(llama, DOWN, seed=6)))
    with pytest.raises(PlanError, match=rf"{DOWN}: the values have the SHA-256 \w{{12}}, the plan says"):
        save_plan(plan, values_in(tmp_path / "given", new), tmp_path / "plan.json")
    with pytest.raises(PlanError, match="no values are given"):
        save_plan(plan, None, tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"leaves none for its values; name it \.json"):
        values_path(tmp_path / "plan.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["given"]


def edited(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return edit


def to_half(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN] = tensors[DOWN].half()


def one_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def long_header(path: Path) -> None:
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "the values file of the plan is missing"),
    "a folder": (as_folder, "is no plain file"),
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "cut short"),
    "bytes after the data": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "1 bytes after the data"),
    "a header beyond the file": (long_header, "header is damaged or cut short"),
    "one bit": (one_bit, "the values have the SHA-256"),
    "a tensor too few": (edited(lambda tensors: tensors.pop(DOWN)), f"{DOWN}: no values are given"),
    "a tensor too many": (edited(lambda t: t.update(x=torch.ones(2))), "has a tensor x, which the plan does not"),
    "another dtype": (edited(to_half), "the values have the SHA-256"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_damaged_values_file_is_one_line_and_nothing_is_written(
    kind: str, saved: Path, llama: Checkpoint, command, tmp_path: Path
) -> None:
    tamper, message = HOSTILE[kind]
    tamper(saved.with_suffix(".safetensors"))
    with pytest.raises(PlanError, match=message):
        load_values(Plan.load(saved), saved)
    found = command("export", llama.root, "--plan", saved, "-o", tmp_path / "out")
    assert (found.code, found.out, found.err.count("\n")) == (2, "", 1) and message in found.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", [lambda t: t.reshape(48, 32), lambda t: t.view(torch.int32)], ids=["shape", "dtype"])
def test_the_same_bytes_in_another_form_are_refused(llama: Checkpoint, tmp_path: Path, form) -> None:
    new = drawn(llama, DOWN)
    values = values_in(tmp_path / "values", {DOWN: form(new[DOWN])})
    with pytest.raises(
        PlanError, match=rf"{DOWN}: the values are [FI]32 \[\d+, \d+\], the output needs F32 \[32, 48\]"
    ):
        export(llama, plan_for(llama, replacing(new)), tmp_path / "out", values=values)
    assert [path.name for path in tmp_path.iterdir()] == ["values"]


# Plans that are refused. More of them are files in tests/known_wrong.


def test_computed_weights_are_never_proved(llama: Checkpoint, new: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="never proved"):
        replacing(new, evidence=PROVED)
    plan = plan_for(llama, replacing(new)).to_json()
    plan["rewrites"][0]["evidence"]["grade"] = "proved"
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(PlanError, match=r"rewrites\.0\.replace\.evidence = .*never proved"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("tensors", [{}, {DOWN: ""}, {DOWN: "0" * 63}, {DOWN: "G" * 64}, {DOWN: "0" * 64 + "\n"}])
def test_digests_are_64_hexadecimal_digits(tensors: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        Replace(**{"pass": "p"}, site="s", evidence=MEASURED, tensors=tensors)


def test_half_a_tie_is_not_replaced(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source", both_names=True)
    new = drawn(source, EMBEDDING)
    values = values_in(tmp_path / "values", dict.fromkeys((EMBEDDING, HEAD), new[EMBEDDING]))
    with pytest.raises(PlanError, match=f"{EMBEDDING}: the tensor is replaced, but {HEAD}, which the model ties to it"):
        export(source, plan_for(source, replacing(new)), tmp_path / "out", values=values)
    both = {EMBEDDING: new[EMBEDDING], HEAD: new[EMBEDDING]}
    for name, rewrites in {"alike": [replacing(both)], "alone": [replacing(new), erase(HEAD)]}.items():
        out = export(source, plan_for(source, *rewrites), tmp_path / name, values=values)
        model = AutoModelForCausalLM.from_pretrained(out.root)
        assert torch.equal(model.get_output_embeddings().weight, new[EMBEDDING])
    untied = drawn(source, EMBEDDING, HEAD)
    with pytest.raises(PlanError, match="which the model ties to it, is not replaced by the same"):
        export(source, plan_for(source, replacing(untied)), tmp_path / "out", values=values)


def test_two_tables_that_the_model_does_not_tie_are_replaced_apart(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source", tied=False)
    new = drawn(source, HEAD)
    out = export(source, plan_for(source, replacing(new)), tmp_path / "out", values=values_in(tmp_path / "v", new))
    assert out.tensors[HEAD].shape == (VOCABULARY, 32) and out.read_bytes(EMBEDDING) == source.read_bytes(EMBEDDING)
