"""What a search found, as evidence: losses on held-out text, and the path that was walked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from collapse.certify.losses import SequenceLoss
from collapse.plan import Evidence
from collapse.search.walk import Point

Figures = dict[str, float | int | str]


def measurement(losses: Iterable[SequenceLoss], params: float) -> Evidence:
    """Return what a point with a share `params` of the parameters loses on held-out text, as *measured* evidence."""
    figures = total_losses(losses)
    kl, less = figures["kl"], 1 - params
    return Evidence(
        grade="measured",
        claim=f"with {less:.1%} less parameters the mean KL divergence on held-out text is {kl:.4f} nats a token",
        method="search by measured KL and refitting on text that judges nothing; losses on held-out text, no bound",
        figures=figures,
    )


def total_losses(losses: Iterable[SequenceLoss]) -> Figures:
    """Return what some sequences lose together: mean KL in nats a token, regret and flips as shares."""
    found = list(losses)
    tokens = sum(one.tokens for one in found)
    return {
        "kl": sum(one.kl for one in found) / tokens,
        "regret": sum(one.nll - one.source_nll for one in found) / sum(one.source_nll for one in found),
        "flips": sum(one.flips for one in found) / tokens,
        "confident_flips": sum(one.confident_flips for one in found) / max(1, sum(one.confident for one in found)),
        "tokens": tokens,
    }


def path_figures(path: Sequence[Point]) -> Figures:
    """Return the walked path as figures; empty where it has no point."""
    if not path:
        return {}
    last = path[-1]
    lost = {f"{kind}_lost": count for kind, count in last.lost.items()}
    walked = "; ".join(f"{_said(point)}: KL {point.kl:.4f}" for point in path)
    maps: Figures = {"maps": len(last.maps)} if last.maps else {}
    return {"dropped_blocks": len(last.shape.gone), **lost, **maps, "calibration_kl": last.kl, "path": walked}


def _said(point: Point) -> str:
    parts = [f"{len(point.shape.gone)} blocks"] if point.shape.gone else []
    parts += [f"{count} {kind}" for kind, count in point.lost.items()]
    count = len(point.maps)
    maps = f"with {count} {'maps' if count > 1 else 'map'}" if count else ""
    narrower = "without " + ", ".join(parts or ["anything"])
    return narrower if not maps else f"{narrower}, {maps}" if parts else maps
