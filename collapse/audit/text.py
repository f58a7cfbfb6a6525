"""An audit for people."""

from __future__ import annotations

from collapse.audit.findings import RULES, Audit


def to_text(found: Audit) -> str:
    """Return a line for each finding, what could not be decided, what was counted, and the outcome."""
    lines = []
    for finding in found.findings:
        lines += [f"FAIL  {finding.place}: {finding.rule}: {finding.what}", f"      fix: {finding.fix}"]
    lines += [f"--    not decided: {reason}" for reason in found.undecided]
    lines += [f"note  {note}" for note in found.notes]
    if found.figures:
        lines.append(_counted(found))
    count = len(found.findings)
    return "\n".join([*lines, f"{found.status} ({count} findings, {len(RULES)} rules)"])


def _counted(found: Audit) -> str:
    figures = found.figures
    parts = [
        f"{figures['bytes']} bytes in {figures['files']} files",
        f"{figures['header_bytes']} in weight headers",
        f"{figures['tensor_bytes']} in tensors",
        f"{figures['other_file_bytes']} in other files",
    ]
    if found.searched:
        parts.append(f"{figures.get('rows_searched', 0)} erased rows searched for")
    return f"      {', '.join(parts)}"
