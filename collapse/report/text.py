"""Numbers as people read them, and the words for the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FIGURES: Mapping[str, str] = {
    "params": "Parameters",
    "bytes": "Weight bytes",
    "prefill_flops": "Prefill FLOPs, executed",
    "prefill_flops_causal": "Prefill FLOPs, causal",
    "decode_flops_per_token": "Decode FLOPs per token",
    "kv_bytes_per_token": "KV-cache bytes per token",
    "weight_bytes_per_decode_token": "Weight bytes read per decoded token",
}


def short(number: float) -> str:
    """Return three figures and a decimal prefix: 1234567 is `1.23 M`."""
    for prefix, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= unit * 0.9995:
            scaled = number / unit
            digits = 0 if abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
            return f"{scaled:.{digits}f} {prefix}"
    return f"{number:g}"


def exact(number: int) -> str:
    """Return the number with thousands separated."""
    return f"{number:,}"


def change(before: int, after: int) -> str:
    """Return the difference in percent of `before`; `0 %` stands for none at all."""
    if before == after:
        return "0 %"
    if before == 0:
        return "new"
    percent = 100 * (after - before) / before
    return f"{percent:+.2f} %" if abs(percent) >= 0.005 else f"{percent:+.1e} %"


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table; the first column is text, the others are numbers."""
    rule = ("---", *("---:" for _ in header[1:]))
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (header, rule, *rows)
    )
