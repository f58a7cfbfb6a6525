"""An audit as JUnit XML: a test case a rule, which every CI service can list."""

from __future__ import annotations

import re
from xml.etree import ElementTree as xml

from collapse.audit.findings import RULES, SEARCH, Audit

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # characters that XML 1.0 has not


def to_junit(found: Audit, name: str) -> bytes:
    """Return the XML document of one audit; `name` is that of the suite, the model's.

    A rule with findings fails; what was not decided is an error, the search without a source is skipped.
    """
    failed = {finding.rule for finding in found.findings}
    skipped = set() if found.searched or SEARCH in failed else {SEARCH}
    counts = {"tests": len(RULES) + len(found.undecided), "failures": len(failed)}
    counts |= {"errors": len(found.undecided), "skipped": len(skipped)}
    attributes = {"name": _clean(name), **{key: str(count) for key, count in counts.items()}}
    root = xml.Element("testsuites")
    suite = xml.SubElement(root, "testsuite", attributes)
    for rule, about in RULES.items():
        case = xml.SubElement(suite, "testcase", {"classname": "collapse.audit", "name": rule})
        lines = [f"{finding.place}: {finding.what}" for finding in found.findings if finding.rule == rule]
        if lines:
            failure = xml.SubElement(case, "failure", {"type": rule, "message": _clean(f"not so: {about.claim}")})
            failure.text = _clean("\n".join([*lines, f"fix: {about.fix}"]))
        elif rule in skipped:
            xml.SubElement(case, "skipped", {"message": "erased rows were not searched for: no source"})
    for number, reason in enumerate(found.undecided, start=1):
        case = xml.SubElement(suite, "testcase", {"classname": "collapse.audit", "name": f"not-decided-{number}"})
        xml.SubElement(case, "error", {"message": _clean(reason)})
    document: bytes = xml.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)
