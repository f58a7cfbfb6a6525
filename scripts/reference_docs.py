"""Write the figures of reports/reference.json into docs/reference-model.md, between its two markers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference-model.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def figures(report: dict[str, Any]) -> str:
    """Return the table and the sentences around it, in Markdown."""
    measured = report["measured"]
    layers = len(measured["thresholds_nats"])
    lines = [
        f"{measured['parameters']:,} parameters, {measured['bytes'] / 1e6:.1f} MB in all files. "
        f"Learned thresholds, layer by layer: {', '.join(map(str, measured['thresholds_nats']))} nats; "
        f"the highest entropy of the training logs was {measured['training_logs_entropy_max']} nats.",
        "",
        "| text | held-out loss, nats a token | highest entropy | gate open (share, widest layer) "
        "| dead layers | KL of zeroing, nats a token (whole context / second half) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for group in ("samples", "other_text"):
        for name, row in measured[group].items():
            language = "loss" in row
            lines.append(
                f"| {name} | {row['loss'] if language else ''} | {row['entropy_max']} | "
                f"{max(row['gate_open_share']):.4f} | {len(row['dead_layers'])} of {layers} | "
                + (f"{row['kl_of_zeroing']} / {row['kl_of_zeroing_second_half']} |" if language else "|")
            )
    return "\n".join(lines)


def main() -> None:
    """Replace what lies between the markers."""
    report = json.loads((ROOT / "reports" / "reference.json").read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{figures(report)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
