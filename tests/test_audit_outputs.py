"""What the audit says, in each of its forms: for people, JSON, SARIF 2.1.0 and JUnit XML."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree as xml

import pytest

from collapse.audit import Audit, Finding, audit
from collapse.audit.findings import RULES
from collapse.audit.junit import to_junit
from collapse.audit.sarif import to_sarif
from collapse.audit.text import to_text
from collapse.checkpoint import Checkpoint
from collapse.verify import verify
from tests.command import Command
from tests.exported import EMBEDDING

CLEAN = Audit(figures={"files": 1, "bytes": 9, "header_bytes": 4, "tensor_bytes": 5, "other_file_bytes": 0})
HIDDEN = Finding(rule="erased-bytes", file="old dir/x.pt2", what="holds it", offset=7, member="data/0")
TRAILING = Finding(rule="trailing-bytes", file="model.safetensors", what="8 bytes follow", offset=4096)
REFUTED = Audit(findings=(HIDDEN, TRAILING), undecided=("x.pt2: too large",), searched=True)


def check_sarif(log: Any) -> None:
    """Assert what SARIF 2.1.0 requires of the objects that we use, property by property."""
    assert log["version"] == "2.1.0" and log["$schema"].startswith("https://")
    assert set(log) == {"$schema", "version", "runs"} and len(log["runs"]) == 1
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert isinstance(driver["name"], str) and isinstance(driver["version"], str)
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(set(ids)) == len(ids)
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"] and rule["help"]["text"]
    for invocation in run["invocations"]:
        assert type(invocation["executionSuccessful"]) is bool and type(invocation["exitCode"]) is int
        for notification in invocation["toolExecutionNotifications"]:
            assert notification["level"] in {"none", "note", "warning", "error"} and notification["message"]["text"]
    assert isinstance(run["results"], list)
    for result in run["results"]:
        assert result["level"] in {"none", "note", "warning", "error"}
        assert result["message"]["text"]
        assert ids[result["ruleIndex"]] == result["ruleId"]
        for location in result["locations"]:
            physical = location["physicalLocation"]
            assert re.fullmatch(r"[A-Za-z0-9._~%/-]+", physical["artifactLocation"]["uri"]), "a relative URI reference"
            assert not physical["artifactLocation"]["uri"].startswith("/")
            region = physical.get("region")
            assert region is None or (set(region) == {"byteOffset"} and region["byteOffset"] >= 0)


@pytest.mark.parametrize("found", [CLEAN, REFUTED, Audit(undecided=("why",)), Audit(notes=("so",))])
def test_sarif_has_what_the_standard_requires(found: Audit) -> None:
    check_sarif(json.loads(json.dumps(to_sarif(found, PurePosixPath("models/served"), "0.1.0"))))


@pytest.mark.parametrize("broken", ["version", "results", "uri"])
def test_the_check_of_sarif_bites(broken: str) -> None:
    log = to_sarif(REFUTED, PurePosixPath("served"), "0.1.0")
    if broken == "version":
        log["version"] = "2.0.0"
    elif broken == "results":
        del log["runs"][0]["results"]
    else:
        log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] = "/a b"
    with pytest.raises((AssertionError, KeyError)):
        check_sarif(log)


@pytest.mark.parametrize(
    ("folder", "uri"),
    [
        ("models/served", "models/served/old%20dir/x.pt2"),
        ("/data/served", "served/old%20dir/x.pt2"),
        ("../served", "served/old%20dir/x.pt2"),
        (".", "old%20dir/x.pt2"),
    ],
)
def test_sarif_names_files_below_the_directory_and_never_absolutely(folder: str, uri: str) -> None:
    results = to_sarif(REFUTED, PurePosixPath(folder), "0.1.0")["runs"][0]["results"]
    places = [result["locations"][0]["physicalLocation"] for result in results]
    assert places[0] == {"artifactLocation": {"uri": uri}}, "an offset in an expanded member is none of the file"
    assert places[1]["region"] == {"byteOffset": 4096}
    assert "in member data/0) at byte 7" in results[0]["message"]["text"]


def test_sarif_of_a_clean_audit_has_no_results() -> None:
    run = to_sarif(CLEAN, PurePosixPath("served"), "0.1.0")["runs"][0]
    assert run["results"] == []
    assert run["invocations"][0]["exitCode"] == 0


def test_junit_has_a_case_a_rule_and_counts_that_add_up() -> None:
    (suite,) = xml.fromstring(to_junit(REFUTED, "served"))
    assert suite.attrib == {
        "name": "served",
        "tests": str(len(RULES) + 1),
        "failures": "2",
        "errors": "1",
        "skipped": "0",
    }
    assert len(suite.findall("testcase")) == len(RULES) + 1
    failed = {case.get("name"): case.findtext("failure") for case in suite if case.find("failure") is not None}
    assert set(failed) == {"erased-bytes", "trailing-bytes"}
    assert "model.safetensors:4096: 8 bytes follow" in str(failed["trailing-bytes"])
    assert [case.find("error").get("message") for case in suite if case.find("error") is not None] == [
        "x.pt2: too large"
    ]  # type: ignore[union-attr]


def test_junit_of_a_clean_audit_fails_nothing_and_skips_the_search() -> None:
    (suite,) = xml.fromstring(to_junit(CLEAN, "served"))
    assert (suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("0", "0", "1")
    assert [case.get("name") for case in suite if case.find("skipped") is not None] == ["erased-bytes"]
    (suite,) = xml.fromstring(to_junit(CLEAN.model_copy(update={"searched": True}), "served"))
    assert suite.get("skipped") == "0"


@pytest.mark.parametrize("name", ["a\x00b", 'a"<&>b', "a\x1b[31m", "ä\ud800"])
def test_junit_stays_xml_whatever_a_file_is_called(name: str) -> None:
    found = Audit(
        findings=(Finding.model_construct(rule="file-unlisted", file=name, what="is there", offset=None, member=None),)
    )
    assert len(xml.fromstring(to_junit(found, name))) == 1


@pytest.mark.parametrize("name", ["a\nFAIL  b", "a\x1b[2J", os.fsdecode(b"a\xff")])
def test_a_file_name_forges_no_output(
    command: Command, llama: Checkpoint, out: Path, tmp_path: Path, name: str
) -> None:
    (out / name).write_bytes(llama.read_bytes("old.bias"))
    found = command(
        "audit", out, "--source", llama.root, "--sarif", tmp_path / "x.sarif", "--junit", tmp_path / "x.xml"
    )
    assert found.code == 1
    assert [line.split(":")[0] for line in found.out.splitlines() if line.startswith("FAIL")] == [
        f"FAIL  {name.encode('unicode_escape').decode()}"
    ] * 2
    check_sarif(json.loads((tmp_path / "x.sarif").read_bytes()))
    assert "no plain" not in found.out and verify(out, llama, static_only=True).status == "refuted"


def test_text_gives_place_rule_and_fix() -> None:
    lines = to_text(REFUTED).splitlines()
    assert lines[0] == "FAIL  old dir/x.pt2!data/0:7: erased-bytes: holds it"
    assert lines[2] == "FAIL  model.safetensors:4096: trailing-bytes: 8 bytes follow"
    assert lines[3] == f"      fix: {RULES['trailing-bytes'].fix}"
    assert lines[-2] == "--    not decided: x.pt2: too large"
    assert lines[-1] == f"refuted (2 findings, {len(RULES)} rules)"
    assert to_text(CLEAN).splitlines() == [
        "      9 bytes in 1 files, 4 in weight headers, 5 in tensors, 0 in other files",
        f"clean (0 findings, {len(RULES)} rules)",
    ]


@pytest.mark.parametrize(("found", "code"), [(CLEAN, 0), (REFUTED, 1), (Audit(undecided=("why",)), 2)])
def test_exit_codes(found: Audit, code: int) -> None:
    assert found.exit_code == code


def test_every_finding_has_a_rule_of_the_table(llama: Checkpoint, out: Path) -> None:
    (out / "notes.txt").write_bytes(llama.read_bytes(EMBEDDING))
    assert {finding.rule for finding in audit(out, llama).findings} <= set(RULES)
    with pytest.raises(KeyError):
        Finding(rule="no-such-rule", file="x", what="y").fix  # noqa: B018


def test_the_command_writes_every_form_and_exits_for_ci(
    command: Command, llama: Checkpoint, out: Path, tmp_path: Path
) -> None:
    sarif, junit = tmp_path / "audit.sarif", tmp_path / "audit.xml"
    arguments = ("audit", out, "--source", llama.root, "--sarif", sarif, "--junit", junit)
    found = command(*arguments, "--json")
    assert (found.code, json.loads(found.out)["status"], json.loads(found.out)["findings"]) == (0, "clean", [])
    assert json.loads(sarif.read_bytes())["runs"][0]["results"] == []
    (out / "notes.txt").write_bytes(b"ab" + llama.read_bytes("old.bias"))
    found = command(*arguments, "--json")
    (unlisted, hidden) = json.loads(found.out)["findings"]
    assert (found.code, unlisted["rule"], hidden["rule"]) == (1, "file-unlisted", "erased-bytes")
    assert (hidden["file"], hidden["offset"], hidden["fix"]) == ("notes.txt", 2, RULES["erased-bytes"].fix)
    check_sarif(json.loads(sarif.read_bytes()))
    assert xml.parse(junit).getroot()[0].get("failures") == "2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audit.sarif", "audit.xml", "out"], "no drafts"
    assert str(tmp_path) not in sarif.read_text() + junit.read_text() + found.out


def test_the_command_says_what_it_did_not_search(command: Command, out: Path) -> None:
    found = command("audit", out)
    assert found.code == 0
    assert "without --source, tensors were not compared and bytes of erased rows not searched for" in found.out


@pytest.mark.parametrize("arguments", [("nowhere",), (".",)])
def test_bad_input_is_one_line_and_exit_code_2(command: Command, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    found = command("audit", tmp_path / arguments[0])
    assert (found.code, found.out, len(found.err.splitlines())) == (2, "", 1)


def test_a_file_that_cannot_be_written_is_one_line(command: Command, out: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = command("audit", out, "--sarif", tmp_path / "file" / "audit.sarif")
    assert (found.code, len(found.err.splitlines())) == (2, 1)
    assert "cannot be written" in found.err
