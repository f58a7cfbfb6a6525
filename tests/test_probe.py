"""The probe: what the files say about a site, and nothing that a typing error could pass."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from collapse.checkpoint import Checkpoint
from collapse.errors import CheckpointError
from collapse.plan import ShortCircuit, Specialise
from collapse.probe import probe
from collapse.testing import assert_erased
from tests.command import Command
from tests.tiny import PROVED, erase, export, plan_for, tiny_llama

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


def test_a_config_switch_alone_erases_a_site(llama: Checkpoint, tmp_path: Path) -> None:
    switch = Specialise(**{"pass": "switch"}, site="model.vision", evidence=PROVED, config={"vision": False})
    out = export(llama, plan_for(llama, switch), tmp_path / "out").root
    assert probe(out, "model.vision*").status == "ERASED"
    assert "config.json" in probe(out, "model.vision").reason


@pytest.mark.parametrize("pattern", ["*extra_bais*", "extra_bias", "", "*.layers.2.*"])
def test_a_typing_error_is_no_erasure(llama: Checkpoint, tmp_path: Path, pattern: str) -> None:
    out = export(llama, plan_for(llama, short(0), short(1)), tmp_path / "out").root
    for folder in (out, llama.root):
        with pytest.raises(CheckpointError, match="no tensor or module matches"):
            probe(folder, pattern)
        with pytest.raises(CheckpointError):
            assert_erased(folder, pattern)


def test_the_command_prints_json_and_exits_for_ci(command: Command, llama: Checkpoint, tmp_path: Path) -> None:
    out = export(llama, plan_for(llama, short(0)), tmp_path / "out").root
    for site, code, status in ((NAMES[0], 0, "ERASED"), (SITE, 1, "ACTIVE")):
        found = command("probe", out, "--site", site)
        assert (found.code, json.loads(found.out)["status"]) == (code, status)
    for folder, site in ((out, "nothing"), (tmp_path, "x"), (tmp_path / "absent", "x")):
        found = command("probe", folder, "--site", site)
        assert (found.code, found.out, found.err.count("\n")) == (2, "", 1)


def test_the_probe_needs_no_torch() -> None:
    modules = "collapse.probe, collapse.testing, collapse.cli_check, collapse.verify"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    root = str(Path(__file__).parent.parent)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert found.stdout == "False\n"
