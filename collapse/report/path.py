"""The path of a search as a table: loss against size, point by point."""

from __future__ import annotations

from collapse.report.text import short, table
from collapse.search_path import HeldBound, PathPoint, SearchPath, Sizes

HEADER = (
    "without", "parameters", "prefill FLOPs", "bytes a token", "KL, choosing", "KL, held out", "regret, held out",
    "at most", "",
)  # fmt: skip


def path_table(path: SearchPath) -> str:
    """Return a Markdown table of the points and, under it, what its figures are of."""
    notes = (
        f"Points of the search of `{', '.join(path.moves)}` for {', '.join(path.budgets)}, in the order in which they "
        "were found. Sizes are of these passes alone, counted in the graph for the point that was taken and reckoned "
        "from the products that go for others; KL is in nats a token. Choosing text led the search, "
        "held-out text judged points on the way; *at most* is a confidence bound from that. Empty: not judged."
    )
    if not any(point.taken for point in path.points):
        notes += " None was taken."
    else:
        notes += " Losses of the point that was taken are those before any healing."
    return f"{table(HEADER, [_row(point, path.before) for point in path.points])}\n\n{notes}"


def _row(point: PathPoint, before: Sizes) -> tuple[str, ...]:
    shares, held = {**point.shares, **point.counted}, point.held_out
    return (
        _without(point),
        f"{short(before.params * shares['params'])} ({shares['params']:.1%})",
        f"{short(before.prefill_flops * shares['flops'])} ({shares['flops']:.1%})",
        f"{short(before.weight_bytes_per_decode_token * shares['decode'])} ({shares['decode']:.1%})",
        f"{point.kl:.4f}",
        f"{held.kl:.4f}" if held else "",
        f"{held.regret:.2%}" if held else "",
        ", ".join(map(_bound, point.bounds)),
        "**taken**" if point.taken else "",
    )


def _without(point: PathPoint) -> str:
    blocks = [f"blocks {', '.join(map(str, point.dropped))}"] if point.dropped else []
    units = [f"{count} {kind}" for kind, count in point.lost.items() if count]
    maps = [f"{len(point.maps)} sublayers, which have maps"] if point.maps else []
    return ", ".join((*blocks, *units, *maps)) or "nothing, refitted"


def _bound(bound: HeldBound) -> str:
    if bound.at_most is None:
        return f"{bound.metric} unknown"
    kl = bound.metric == "kl"
    shown, limit = (f"{value:.4g}" if kl else f"{value:.2%}" for value in (bound.at_most, bound.limit))
    return f"{bound.metric} {shown} (limit {limit}{'' if bound.met else ', broken'})"
