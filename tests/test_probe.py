"""The probe: what the files say about a site, and nothing that a typing error could pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from collapse.checkpoint import Checkpoint
from collapse.errors import CheckpointError
from collapse.plan import DropLayers, IndexSet, Reroot, ShortCircuit, Specialise
from collapse.probe import probe
from collapse.rewrite.origin import source_name
from collapse.rewrite.tensors import erased_names, output_name
from collapse.testing import assert_erased
from tests.command import Command
from tests.exported import EMBEDDING, KEPT
from tests.tiny import PROVED, erase, export, plan_for, tiny_llama, vocabulary

NAMES = tuple(f"model.layers.{layer}.self_attn.extra_bias.table" for layer in (0, 1))
SITE = "*.extra_bias*"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "source", extra={name: torch.ones(3) for name in NAMES})


def short(layer: int, **fields: object) -> ShortCircuit:
    site = NAMES[layer].removesuffix(".table")
    whole = {"pass": "dead-module", "site": site, "evidence": PROVED, "by": "zero", "tensors": (NAMES[layer],)}
    return ShortCircuit(**(whole | fields))


def add(folder: Path, **tensors: torch.Tensor) -> None:
    save_file(load_file(folder / WEIGHTS) | tensors, folder / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize(
    "pattern", [SITE, "*extra_bias*", "model.layers.?.self_attn.extra_bias", NAMES[0], "model.layers.1.*.extra_bias.*"]
)
def test_erased(llama: Checkpoint, tmp_path: Path, pattern: str) -> None:
    out = export(llama, plan_for(llama, short(0), short(1)), tmp_path / "out").root
    assert probe(llama.root, pattern).status == "ACTIVE"
    assert probe(out, pattern).status == "ERASED"
    assert_erased(out, pattern)


def test_what_an_erasure_names_is_erased_too(llama: Checkpoint, tmp_path: Path) -> None:
    out = export(llama, plan_for(llama, erase(*NAMES)), tmp_path / "out").root
    assert probe(out, SITE).status == "ERASED"
    assert "2 tensors" in probe(out, SITE).reason


def test_placeholders_are_erased_and_mentioned(llama: Checkpoint, tmp_path: Path) -> None:
    out = export(llama, plan_for(llama, *(short(n, placeholder=True) for n in (0, 1))), tmp_path / "out").root
    assert probe(out, SITE).status == "ERASED"
    assert "2 placeholders of 16 zero bytes" in probe(out, SITE).reason
    add(out, **{NAMES[1]: torch.tensor([0.0, 0, 0, 1e-30])})
    assert (probe(out, SITE).status, probe(out, SITE).alive) == ("ACTIVE", (NAMES[1],))


def test_zeros_are_not_an_erasure(llama: Checkpoint, tmp_path: Path) -> None:
    out = export(llama, plan_for(llama, short(0), short(1)), tmp_path / "out").root
    add(out, **{NAMES[0]: torch.zeros(3)})
    assert probe(out, SITE).status == "ZEROED"
    add(out, **{NAMES[0]: torch.zeros(4)})
    assert probe(out, SITE).status == "ZEROED", "the plan left no placeholder"
    with pytest.raises(AssertionError, match=f"is ZEROED: 1 tensors are in the files, all zero: {NAMES[0]}"):
        assert_erased(out, SITE)


def test_one_layer_alive_is_active(llama: Checkpoint, tmp_path: Path) -> None:
    out = export(llama, plan_for(llama, short(0)), tmp_path / "out").root
    found = probe(out, SITE)
    assert (found.status, found.alive) == ("ACTIVE", (NAMES[1],))
    assert probe(out, "model.layers.0.*extra_bias*").status == "ERASED"


@pytest.mark.parametrize("stage", ["fuse", "short-circuit"])
def test_early_stages_are_active(llama: Checkpoint, tmp_path: Path, stage: str) -> None:
    out = export(llama, plan_for(llama, short(0, stage=stage), short(1, stage=stage)), tmp_path / "out").root
    assert probe(out, SITE).status == "ACTIVE"


def test_a_stray_shard_or_a_pickled_twin_is_active(llama: Checkpoint, tmp_path: Path) -> None:
    out = export(llama, plan_for(llama, short(0), short(1)), tmp_path / "out").root
    torch.save({NAMES[1]: torch.ones(3)}, out / "pytorch_model.bin")
    assert (probe(out, SITE).status, probe(out, SITE).alive) == ("ACTIVE", (NAMES[1],))
    (out / "pytorch_model.bin").unlink()
    save_file({NAMES[0]: torch.ones(3)}, out / "model-old.safetensors")
    assert (probe(out, SITE).status, probe(out, SITE).alive) == ("ACTIVE", (NAMES[0],))


def test_a_specialised_config_erases_nothing(llama: Checkpoint, tmp_path: Path) -> None:
    switch = Specialise(**{"pass": "specialise"}, site="sliding_window", evidence=PROVED, config={"sliding_window": 9})
    out = export(llama, plan_for(llama, switch), tmp_path / "out").root
    with pytest.raises(CheckpointError, match="no tensor or module matches 'sliding_window'"):
        probe(out, "sliding_window")


def dropped(llama: Checkpoint, *kept: int) -> DropLayers:
    gone = tuple(n for n in llama.tensors if n.startswith("model.layers.") and int(n.split(".")[2]) not in kept)
    fields = {"prefix": "model.layers.", "size": 2, "kept": IndexSet.of(kept), "tensors": gone}
    return DropLayers(
        **{"pass": "layers"}, site="model.layers", evidence=PROVED, config={"num_hidden_layers": 1}, **fields
    )


def test_a_dropped_layer_is_erased_though_another_has_its_number_now(llama: Checkpoint, tmp_path: Path) -> None:
    out = export(llama, plan_for(llama, dropped(llama, 1)), tmp_path / "out").root
    assert "model.layers.0.mlp.up_proj.weight" in Checkpoint.open(out).tensors
    assert probe(out, "model.layers.0").status == "ERASED"
    assert probe(out, "model.layers.0.mlp.*").status == "ERASED"
    assert_erased(out, "model.layers.0.mlp.up_proj")
    found = probe(out, "model.layers.1.mlp.up_proj")
    assert found.status == "ACTIVE"
    assert found.alive == ("model.layers.1.mlp.up_proj.weight (here model.layers.0.mlp.up_proj.weight)",)
    assert probe(out, "model.layers").status == "ACTIVE"


def test_a_layer_beyond_the_last_one_is_not_hidden_by_the_renumbering(llama: Checkpoint, tmp_path: Path) -> None:
    out = export(llama, plan_for(llama, dropped(llama, 0)), tmp_path / "out").root
    assert probe(out, "model.layers.1").status == "ERASED"
    add(out, **{"model.layers.1.mlp.up_proj.weight": torch.ones(3)})
    assert probe(out, "model.layers.1").status == "ACTIVE"


def test_a_renamed_tensor_is_probed_by_the_source_s_name(llama: Checkpoint, tmp_path: Path) -> None:
    rooted = Reroot(
        **{"pass": "text-only"}, site="model", evidence=PROVED, config_root="", fields=(), names=(("model.", "text."),),
        tensors=NAMES,
    )  # fmt: skip
    plan = plan_for(llama, dropped(llama, 1), rooted)
    names = {name: output_name(plan, name) for name in llama.tensors}
    assert names["model.layers.1.mlp.up_proj.weight"] == "text.layers.0.mlp.up_proj.weight"
    for name in set(llama.tensors) - erased_names(plan)[0]:
        assert source_name(plan, names[name]) == name


def test_numbers_of_layers_and_of_experts_in_them_are_both_changed(llama: Checkpoint) -> None:
    experts = DropLayers(
        **{"pass": "experts"}, site="model.layers.2.moe.experts", evidence=PROVED, prefix="model.layers.2.moe.experts.",
        size=12, kept=IndexSet.of([3, 11]), tensors=(),
    )  # fmt: skip
    layers = DropLayers(
        **{"pass": "layers"}, site="model.layers", evidence=PROVED, prefix="model.layers.", size=12,
        kept=IndexSet.of([2, 10]), tensors=(),
    )  # fmt: skip
    for order in ((experts, layers), (layers, experts)):
        plan = plan_for(llama, *order)
        for old, new in (("2.moe.experts.11", "0.moe.experts.1"), ("10.moe.experts.11", "1.moe.experts.11")):
            assert output_name(plan, f"model.layers.{old}.w1") == f"model.layers.{new}.w1"


@pytest.mark.parametrize("pattern", ["*extra_bais*", "extra_bias", "", "*.layers.2.*"])
def test_a_typing_error_is_no_erasure(llama: Checkpoint, tmp_path: Path, pattern: str) -> None:
    out = export(llama, plan_for(llama, short(0), short(1)), tmp_path / "out").root
    for folder in (out, llama.root):
        with pytest.raises(CheckpointError, match="no tensor or module matches"):
            probe(folder, pattern)
        with pytest.raises(CheckpointError):
            assert_erased(folder, pattern)


def test_a_weight_file_that_is_a_pipe_is_not_waited_for(llama: Checkpoint, tmp_path: Path) -> None:
    out = export(llama, plan_for(llama, short(0), short(1)), tmp_path / "out").root
    os.mkfifo(out / "more.safetensors")
    with pytest.raises(CheckpointError, match="no plain file"):
        probe(out, SITE)


def test_the_command_prints_json_and_exits_for_ci(command: Command, llama: Checkpoint, tmp_path: Path) -> None:
    out = export(llama, plan_for(llama, short(0)), tmp_path / "out").root
    for site, code, status in ((NAMES[0], 0, "ERASED"), (SITE, 1, "ACTIVE")):
        found = command("probe", out, "--site", site)
        assert (found.code, json.loads(found.out)["status"]) == (code, status)
    for folder, site in ((out, "nothing"), (tmp_path, "x"), (tmp_path / "absent", "x")):
        found = command("probe", folder, "--site", site)
        assert (found.code, found.out, found.err.count("\n")) == (2, "", 1)


def test_the_probe_needs_no_torch() -> None:
    modules = (
        "collapse.probe, collapse.testing, collapse.cli_check, collapse.verify, collapse.audit, collapse.cli_audit"
    )
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    root = str(Path(__file__).parent.parent)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert found.stdout == "False\n"


def test_a_planned_export_is_written_without_torch(llama: Checkpoint, tmp_path: Path) -> None:
    plan_for(llama, vocabulary(KEPT, EMBEDDING)).save(tmp_path / "plan.json")
    code = (
        "import sys; from pathlib import Path; from tests.fault_server import export\n"
        "export(*map(Path, sys.argv[1:]), 30_000); print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(llama.root), str(tmp_path / "plan.json"), str(tmp_path / "out")]
    root = str(Path(__file__).parent.parent)
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert found.stdout == "False\n"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == len(KEPT)
