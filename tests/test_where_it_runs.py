"""The GitHub action, the audit's hook and the Kubernetes example: each parses, and each command in it is run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from collapse.checkpoint import Checkpoint
from collapse.signing import sign_manifest
from tests.command import Command
from tests.test_prometheus import read_metrics
from tests.test_signing import public_pem
from tests.test_workflows import ROOT, parsed, real_cli, run_step
from tests.tiny import erase, export, plan_for, tiny_llama

ACTION = "action.yml"
SIDECAR = "docs/examples/kubernetes-sidecar.yaml"
LAYER = "model.layers.0.self_attn.position_adaptive_bias.table"
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


def step(title: str) -> dict[str, Any]:
    return next(dict(step) for step in parsed(ACTION)["runs"]["steps"] if step.get("name") == title)


@pytest.fixture
def echo() -> str:
    return '#!/bin/sh\necho "$@"\n'


# The action.


def test_the_action_is_composite_and_describes_its_inputs() -> None:
    action = parsed(ACTION)
    assert action["runs"]["using"] == "composite"
    assert set(action["inputs"]) == {"model", "source", "schema", "verify-key", "base", "results"}
    assert all(value["description"] for value in (*action["inputs"].values(), *action["outputs"].values()))
    assert [name for name, value in action["inputs"].items() if value.get("required")] == ["model"]
    assert all(value.get("required") or "default" in value for value in action["inputs"].values())


def test_no_input_is_pasted_into_a_script_of_the_action() -> None:
    scripts = [one for one in parsed(ACTION)["runs"]["steps"] if "run" in one]
    assert [one["name"] for one in scripts if "${{" in one["run"]] == []
    assert {one["shell"] for one in scripts} == {"bash"}
    for one in scripts:
        used = set(re.findall(r"\$\{?([A-Z]+)\b", one["run"])) - {"GITHUB"}
        assert used == set(one.get("env", {})), one["name"]


def test_every_input_is_used_and_every_expression_is_an_input() -> None:
    text = (ROOT / ACTION).read_text()
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(parsed(ACTION)["inputs"])


@pytest.mark.parametrize(
    ("source", "key", "expected"),
    [
        ("", "", "audit m --sarif r/audit.sarif --junit r/audit.xml\n"),
        ("a b", "", "audit m --sarif r/audit.sarif --junit r/audit.xml --source a b\n"),
        ("", "k.pem", "audit m --sarif r/audit.sarif --junit r/audit.xml --verify-key k.pem\n"),
    ],
)
def test_the_audit_step_gives_what_was_given(tmp_path: Path, echo: str, source: str, key: str, expected: str) -> None:
    summary = tmp_path / "summary"
    variables = {"MODEL": "m", "SOURCE": source, "KEY": key, "RESULTS": "r", "GITHUB_STEP_SUMMARY": str(summary)}
    done = run_step(step("Audit")["run"], tmp_path, echo, **variables)
    assert (done.returncode, done.stdout) == (0, expected)
    assert summary.read_text() == f"### collapse audit\n\n    {expected}"


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_audit_step_hands_on_the_status_after_the_summary(tmp_path: Path, code: int) -> None:
    summary = tmp_path / "summary"
    variables = {"MODEL": "m", "SOURCE": "", "KEY": "", "RESULTS": "r", "GITHUB_STEP_SUMMARY": str(summary)}
    done = run_step(step("Audit")["run"], tmp_path, f"#!/bin/sh\necho said\nexit {code}\n", **variables)
    assert done.returncode == code
    assert "    said\n" in summary.read_text()


def test_the_flop_diff_goes_to_the_summary_and_to_a_file(tmp_path: Path, echo: str) -> None:
    summary = tmp_path / "summary"
    variables = {"MODEL": "m", "BASE": "b", "RESULTS": "r", "GITHUB_STEP_SUMMARY": str(summary)}
    assert run_step(step("FLOP diff")["run"], tmp_path, echo, **variables).returncode == 0
    assert summary.read_text() == (tmp_path / "r/flop-diff.md").read_text() == "report b m --format markdown\n"
    assert run_step(step("FLOP diff")["run"], tmp_path, "#!/bin/sh\nexit 2\n", **variables).returncode == 2


@pytest.mark.parametrize("there", [True, False])
def test_the_export_step_makes_only_what_is_not_there(tmp_path: Path, echo: str, there: bool) -> None:
    if there:
        (tmp_path / "m").mkdir()
    done = run_step(step("Export")["run"], tmp_path, echo, MODEL="m", SOURCE="s", SCHEMA="log")
    assert (done.returncode, done.stdout) == (0, "" if there else "export s --schema log --output m --quiet\n")


def test_the_action_passes_a_clean_model_and_fails_on_a_hidden_row(
    llama: Checkpoint, out: Path, tmp_path: Path
) -> None:
    """The steps as the runner runs them, with the real command."""
    summary = tmp_path / "summary"
    variables = {
        "MODEL": "out",
        "SOURCE": str(llama.root),
        "KEY": "",
        "RESULTS": "r",
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    clean = run_step(step("Audit")["run"], tmp_path, real_cli(), **variables)
    assert (clean.returncode, "clean" in clean.stdout) == (0, True), clean.stderr
    (out / "notes.txt").write_bytes(llama.read_bytes("old.bias"))
    refuted = run_step(step("Audit")["run"], tmp_path, real_cli(), **variables)
    assert (refuted.returncode, "notes.txt:0: erased-bytes" in refuted.stdout) == (1, True), refuted.stderr
    (run,) = json.loads((tmp_path / "r/audit.sarif").read_bytes())["runs"]
    assert [result["ruleId"] for result in run["results"]] == ["file-unlisted", "erased-bytes"]
    assert run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "out/notes.txt"
    assert xml.parse(tmp_path / "r/audit.xml").getroot()[0].get("failures") == "2"
    assert "erased-bytes" in summary.read_text()


# The hook.


def hook() -> dict[str, Any]:
    return next(dict(hook) for hook in parsed(".pre-commit-hooks.yaml") if hook["id"] == "collapse-audit")


def test_the_hook_runs_on_every_file_since_any_may_be_one_too_many() -> None:
    assert (hook()["language"], hook()["pass_filenames"], "files" in hook()) == ("python", False, False)


def test_the_hook_passes_a_clean_model_and_fails_on_a_stale_file(command: Command, out: Path) -> None:
    arguments = shlex.split(hook()["entry"])[1:]
    assert command(*arguments, out).code == 0
    (out / "pytorch_model.bin").write_bytes(b"weights")
    assert command(*arguments, out).code == 1


# Kubernetes.


def containers() -> dict[str, dict[str, Any]]:
    spec = parsed(SIDECAR)["spec"]
    return {one["name"]: one for one in (*spec["initContainers"], *spec["containers"])}


def commands_of(name: str) -> list[list[str]]:
    """Return the `collapse` command lines of a container, as words."""
    one = containers()[name]
    if one["command"] == ["collapse"]:
        return [["collapse", *one["args"]]]
    lines = [line.strip().removesuffix("|| true") for line in one["args"][0].splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("collapse ")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root directory with /models/served, signed, /keys/release.pub.pem and /metrics, as in the pod."""
    root = tmp_path_factory.mktemp("pod")
    for name in ("models", "keys", "metrics"):
        (root / name).mkdir()
    from torch import ones

    source = tiny_llama(root / "source", extra={LAYER: ones(5)})
    export(source, plan_for(source, erase(LAYER)), root / "models" / "served")
    sign_manifest(root / "models" / "served", KEY)
    (root / "keys" / "release.pub.pem").write_bytes(public_pem(KEY))
    return root


def placed(words: list[str], root: Path) -> list[str]:
    """Return the words with the absolute paths of the pod below `root`."""
    return [str(root / word.lstrip("/")) if word.startswith("/") else word for word in words]


def test_the_pod_is_locked_down_and_its_volumes_exist() -> None:
    pod = parsed(SIDECAR)
    assert (pod["apiVersion"], pod["kind"]) == ("v1", "Pod")
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    for name, one in containers().items():
        assert {mount["name"] for mount in one["volumeMounts"]} <= volumes, name
        assert all(mount.get("readOnly") for mount in one["volumeMounts"] if mount["name"] != "metrics"), name
        if name != "server":
            assert one["securityContext"]["readOnlyRootFilesystem"] is True, name
            assert one["resources"]["limits"]["memory"], name
    writers = [name for name, one in containers().items() for m in one["volumeMounts"] if not m.get("readOnly")]
    assert writers == ["collapse-probe"]


def test_the_pod_mounts_what_its_commands_name() -> None:
    for name in ("audit", "collapse-probe"):
        mounts = [mount["mountPath"] for mount in containers()[name]["volumeMounts"]]
        paths = [word for words in commands_of(name) for word in words if word.startswith("/")]
        assert paths and all(any(path.startswith(f"{mount}/") for mount in mounts) for path in paths)


def test_the_audit_of_the_pod_starts_only_what_was_signed(command: Command, served: Path, out: Path) -> None:
    ((program, *words),) = commands_of("audit")
    assert (program, command(*placed(words, served)).code) == ("collapse", 0)
    unsigned = command(*(out if word.endswith("/served") else word for word in placed(words, served)))
    assert (unsigned.code, "signature-missing" in unsigned.out) == (1, True)


def test_the_sidecar_writes_metrics_where_the_exporter_reads_them(command: Command, served: Path) -> None:
    ((program, *words),) = commands_of("collapse-probe")
    found = command(*placed(words, served))
    assert (program, found.code) == ("collapse", 0), found.err
    (exporter,) = [word for word in containers()["metrics"]["args"] if "textfile.directory" in word]
    (path,) = (served / exporter.partition("=")[2].lstrip("/")).glob("*.prom")
    metrics = read_metrics(path.read_text())
    labels = (("model", "served"), ("site", "*position_adaptive_bias*"))
    assert metrics["collapse_site_erased", labels] == 1


def test_the_sidecar_goes_on_when_a_probe_fails() -> None:
    (script,) = containers()["collapse-probe"]["args"]
    (line,) = [line for line in script.splitlines() if "collapse probe" in line]
    assert line.endswith("|| true")
    assert re.search(r"sleep [1-9]\d*", script)
