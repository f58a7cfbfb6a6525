"""KL against size as SVG: one line a method, KL on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 40, 50
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")

Points = Sequence[tuple[float, float]]


def svg(title: str, lines: Mapping[str, Points], *, x: str = "parameters", y: str = "KL, nats a token") -> str:
    """Return the plot of (size, KL) points by method; a KL of zero or less has no place on the axis and is left out."""
    drawn = {name: sorted(p for p in points if p[1] > 0 and math.isfinite(p[1])) for name, points in lines.items()}
    drawn = {name: points for name, points in drawn.items() if points}
    if not drawn:
        return _document(title, [])
    sizes = [size for points in drawn.values() for size, _ in points]
    decades = [math.log10(kl) for points in drawn.values() for _, kl in points]
    across = Scale(min(sizes), max(sizes), LEFT, WIDTH - RIGHT)
    up = Scale(math.floor(min(decades)), math.ceil(max(decades)), HEIGHT - BOTTOM, TOP)
    parts = [*_grid(across, up, sizes, decades), *_labels(x, y)]
    for number, (name, points) in enumerate(drawn.items()):
        places = [(across(size), up(math.log10(kl))) for size, kl in points]
        parts += _line(name, places, number)
    return _document(title, parts)


class Scale:
    """A linear map from [low, high] to [start, stop]; of a single value the middle."""

    def __init__(self, low: float, high: float, start: float, stop: float) -> None:
        self.low, self.high, self.start, self.stop = low, high, start, stop

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.start + share * (self.stop - self.start)


def _grid(across: Scale, up: Scale, sizes: Sequence[float], decades: Sequence[float]) -> Iterable[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    yield f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#333"/>'
    for decade in range(math.floor(min(decades)), math.ceil(max(decades)) + 1):
        height = up(decade)
        yield f'<path d="M{LEFT} {height:.1f}H{right}" stroke="#ddd"/>'
        yield _text(LEFT - 8, height + 4, f"{10.0**decade:g}", "end")
    low, high = min(sizes), max(sizes)
    for step in range(5 if high > low else 1):
        size = low + (high - low) * step / 4
        yield f'<path d="M{across(size):.1f} {bottom}v5" stroke="#333"/>'
        yield _text(across(size), bottom + 20, f"{size / 1e6:.4g}M", "middle")


def _labels(x: str, y: str) -> Iterable[str]:
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x, "middle")
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">{escape(y)}</text>'


def _line(name: str, places: Points, number: int) -> Iterable[str]:
    colour = COLOURS[number % len(COLOURS)]
    joined = " ".join(f"{across:.1f},{up:.1f}" for across, up in places)
    yield f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for across, up in places:
        yield f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3.5" fill="{colour}"/>'
    at = TOP + 18 * number
    yield f'<circle cx="{WIDTH - RIGHT + 20}" cy="{at}" r="4" fill="{colour}"/>'
    yield _text(WIDTH - RIGHT + 30, at + 4, name, "start")


def _text(across: float, up: float, text: str, anchor: str) -> str:
    return f'<text x="{across:.1f}" y="{up:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _document(title: str, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
    body = "\n".join([_text(LEFT, 22, title, "start"), *parts])
    return f'{head} font-size="12">\n<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
