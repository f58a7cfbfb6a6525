"""An audit as SARIF 2.1.0 (OASIS), which code scanning services show beside the files."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from collapse.audit.findings import RULES, Audit, Finding

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def to_sarif(found: Audit, folder: PurePath, version: str) -> dict[str, Any]:
    """Return the SARIF log of one audit as plain JSON values.

    Files are named below `folder` as it was given; below its last part where it was given as an absolute path.
    `version` is that of collapse.
    """
    base = PurePath(folder.name) if folder.is_absolute() or ".." in folder.parts else folder
    rules = [
        {"id": name, "shortDescription": {"text": rule.claim}, "help": {"text": rule.fix}}
        for name, rule in RULES.items()
    ]
    messages = [{"level": "error", "message": {"text": reason}} for reason in found.undecided]
    notes = [{"level": "note", "message": {"text": note}} for note in found.notes]
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "collapse audit", "version": version, "rules": rules}},
                "invocations": [
                    {
                        "executionSuccessful": found.status != "undecided",
                        "exitCode": found.exit_code,
                        "toolExecutionNotifications": [*messages, *notes],
                    }
                ],
                "results": [_result(finding, base) for finding in found.findings],
            }
        ],
    }


def _result(finding: Finding, base: PurePath) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": {"uri": quote((base / finding.file).as_posix())}}
    inside = f" (in member {finding.member})" if finding.member else ""
    if finding.offset is not None and not inside:  # an offset in expanded data is none in the file
        place["region"] = {"byteOffset": finding.offset}
    at = f" at byte {finding.offset}" if finding.offset is not None else ""
    return {
        "ruleId": finding.rule,
        "ruleIndex": list(RULES).index(finding.rule),
        "level": "error",
        "message": {"text": f"{finding.file}: {finding.what}{inside}{at}; {finding.fix}"},
        "locations": [{"physicalLocation": place}],
    }
