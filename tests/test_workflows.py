"""The CI files parse, name commands that exist, and fail on a planted layer that should have been erased."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

ROOT = Path(__file__).parent.parent
CHECK = ".github/workflows/collapse-check.yml"
SITE = "*position_adaptive_bias*"
needs_cli = pytest.mark.skipif(find_spec("collapse.cli") is None, reason="the command line is not in this checkout")


def parsed(name: str) -> Any:
    """Return a YAML file of the repository; YAML 1.1 reads the key `on` as true."""
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def steps(name: str) -> list[dict[str, Any]]:
    """Return the steps of all jobs of a workflow, in order."""
    return [step for job in parsed(name)["jobs"].values() for step in job["steps"]]


def step(title: str) -> str:
    """Return the script of the check workflow's step called `title`."""
    return str(next(step["run"] for step in steps(CHECK) if step.get("name") == title))


def run_step(script: str, folder: Path, cli: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a step as the runner does, with `cli` as the text of the `collapse` executable."""
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    (binaries / "collapse").write_text(cli)
    (binaries / "collapse").chmod(0o755)
    (binaries / "python").unlink(missing_ok=True)
    (binaries / "python").symlink_to(sys.executable)
    environment = {**os.environ, **variables, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def stand_in(status: str, code: int) -> str:
    """Return a `collapse` executable that prints a probe's answer and exits with `code`."""
    return f"#!/bin/sh\necho '{json.dumps({'status': status, 'reason': 'planted'})}'\nexit {code}\n"


def real_cli() -> str:
    return f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m collapse "$@"\n'


def write_model(folder: Path, *, planted: bool) -> Path:
    """Write a small checkpoint, with the layer that should be gone if `planted`."""
    model = folder / "served"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1}))
    tensors = {"model.norm.weight": torch.ones(4)}
    if planted:
        tensors["model.layers.0.self_attn.position_adaptive_bias.bias"] = torch.arange(1.0, 5.0)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("name", [".github/workflows/ci.yml", CHECK])
def test_workflows_have_triggers_jobs_and_few_rights(name: str) -> None:
    workflow = parsed(name)
    assert workflow[True], "the key `on`"
    assert workflow["permissions"] == {"contents": "read"}
    assert all("uses" in step or "run" in step for step in steps(name))


@pytest.mark.parametrize("name", [".github/workflows/ci.yml", CHECK])
def test_no_input_is_pasted_into_a_script(name: str) -> None:
    assert [step["run"] for step in steps(name) if "${{" in step.get("run", "")] == []


def test_ci_runs_what_a_developer_runs() -> None:
    (command,) = [step["run"] for step in steps(".github/workflows/ci.yml") if "run" in step]
    assert command == "scripts/test"
    assert "scripts/test" in (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_check_probes_verifies_and_reports() -> None:
    scripts = "\n".join(step.get("run", "") for step in steps(CHECK))
    assert re.findall(r"^ *collapse (\w+)", scripts, re.MULTILINE) == ["probe", "verify", "report"]
    assert "GITHUB_STEP_SUMMARY" in step("FLOP diff")


def test_every_variable_of_a_step_is_an_input() -> None:
    job = parsed(CHECK)["jobs"]["check"]
    inputs = parsed(CHECK)[True]["workflow_call"]["inputs"]
    used = set(re.findall(r'"\$([A-Z]+)"', "\n".join(step.get("run", "") for step in steps(CHECK))))
    assert used == set(job["env"])
    assert {re.fullmatch(r"\$\{\{ inputs\.(\w+) \}\}", value)[1] for value in job["env"].values()} == set(inputs)  # type: ignore[index]


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [("ERASED", 0, 0), ("ACTIVE", 1, 1), ("ZEROED", 1, 1), ("ACTIVE", 0, 1), ("ZEROED", 0, 1), ("ERASED", 2, 2)],
)
def test_the_probe_step_passes_only_when_erased(status: str, code: int, expected: int, tmp_path: Path) -> None:
    result = run_step(step("The layer is still erased"), tmp_path, stand_in(status, code), MODEL="m", SITE=SITE)
    assert result.returncode == expected
    assert status in result.stdout


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_verify_step_hands_on_the_status(code: int, tmp_path: Path) -> None:
    title = "The model is what its source says on inputs of the schema"
    assert run_step(step(title), tmp_path, stand_in("", code), MODEL="m", SOURCE="s").returncode == code


def test_the_report_step_writes_the_summary_or_fails(tmp_path: Path) -> None:
    summary = tmp_path / "summary.md"
    variables = {"BASE": "b", "MODEL": "m", "GITHUB_STEP_SUMMARY": str(summary)}
    arguments = '#!/bin/sh\necho "$@"\n'
    assert run_step(step("FLOP diff"), tmp_path, arguments, **variables).returncode == 0
    assert summary.read_text() == "report b m --format markdown\n"
    assert run_step(step("FLOP diff"), tmp_path, "#!/bin/sh\nexit 2\n", **variables).returncode == 2


@needs_cli
@pytest.mark.parametrize("title", ["The layer is still erased"])
def test_a_planted_layer_fails_the_workflow(title: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, planted=True)
    result = run_step(step(title), tmp_path, real_cli(), MODEL=str(model), SITE=SITE)
    assert result.returncode == 1, result.stderr
    assert json.loads((tmp_path / "probe.json").read_text())["status"] == "ACTIVE"


def hook() -> dict[str, Any]:
    return next(dict(hook) for hook in parsed(".pre-commit-hooks.yaml") if hook["id"] == "collapse-probe")


def test_the_hook_is_complete() -> None:
    assert hook()["id"] == "collapse-probe"
    assert hook()["language"] == "python"
    assert hook()["pass_filenames"] is False


@pytest.mark.parametrize("name", ["model.safetensors", "served/model-00001-of-00002.safetensors", "served/config.json"])
def test_the_hook_runs_on_model_files(name: str) -> None:
    assert re.search(hook()["files"], name)


@pytest.mark.parametrize("name", ["model.py", "README.md", "safetensors.txt"])
def test_the_hook_leaves_other_files_alone(name: str) -> None:
    assert not re.search(hook()["files"], name)


@needs_cli
def test_a_planted_layer_fails_the_hook(tmp_path: Path) -> None:
    model = write_model(tmp_path, planted=True)
    script = f"{hook()['entry']} {model} --site '{SITE}'"
    assert run_step(script, tmp_path, real_cli()).returncode == 1


def test_own_hooks_run_what_the_gates_run() -> None:
    hooks = [hook for repo in parsed(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert [hook["id"] for hook in hooks] == ["ruff-format", "ruff-check", "mypy"]
    for hook in hooks:
        tool = hook["entry"].split()[0]
        assert tool in (ROOT / "scripts" / "test").read_text()
        assert shutil.which(Path(tool).name, path=str(Path(sys.executable).parent))
