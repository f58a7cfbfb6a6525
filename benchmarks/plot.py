"""Lines of points as SVG, each axis linear or logarithmic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 40, 50
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """What an axis says and how it runs; a tick is shown by `unit`, with `suffix`. `zero` puts 0 on a linear axis."""

    label: str
    log: bool = False
    unit: float = 1.0
    suffix: str = ""
    zero: bool = False

    def takes(self, value: float) -> bool:
        """Whether the value has a place on the axis: a logarithmic one has none for zero or less."""
        return math.isfinite(value) and (value > 0 or not self.log)

    def place(self, value: float) -> float:
        """Return the value, or its decade."""
        return math.log10(value) if self.log else value

    def ends(self, values: Sequence[float]) -> tuple[float, float]:
        """Return the places of both ends, for values that have a place: whole decades, or the values' own range."""
        places = [self.place(value) for value in values] + ([0.0] if self.zero and not self.log else [])
        return (math.floor(min(places)), math.ceil(max(places))) if self.log else (min(places), max(places))

    def ticks(self, low: float, high: float) -> list[tuple[float, str]]:
        """Return places and texts: of every decade, or five evenly spread."""
        if self.log:
            marks = [(float(decade), 10.0**decade) for decade in range(round(low), round(high) + 1)]
        else:
            marks = [(value, value) for value in _spread(low, high)]
        return [(place, f"{value / self.unit:.4g}{self.suffix}") for place, value in marks]


PARAMETERS = Axis("parameters", unit=1e6, suffix="M")


def svg(title: str, lines: Mapping[str, Points], x: Axis, y: Axis) -> str:
    """Return the plot of points by name; a point that has no place on an axis is left out."""
    drawn = {name: sorted(p for p in points if x.takes(p[0]) and y.takes(p[1])) for name, points in lines.items()}
    drawn = {name: points for name, points in drawn.items() if points}
    if not drawn:
        return _document(title, [])
    columns = list(zip(*(point for points in drawn.values() for point in points), strict=True))
    across = Scale(*x.ends(columns[0]), LEFT, WIDTH - RIGHT)
    up = Scale(*y.ends(columns[1]), HEIGHT - BOTTOM, TOP)
    parts = [*_grid(across, up, x, y), *_labels(x.label, y.label)]
    for number, (name, points) in enumerate(drawn.items()):
        parts += _line(name, [(across(x.place(a)), up(y.place(b))) for a, b in points], number)
    return _document(title, parts)


def _spread(low: float, high: float) -> list[float]:
    return [low + (high - low) * step / 4 for step in range(5)] if high > low else [low]


class Scale:
    """A linear map from [low, high] to [start, stop]; of a single value the middle."""

    def __init__(self, low: float, high: float, start: float, stop: float) -> None:
        self.low, self.high, self.start, self.stop = low, high, start, stop

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.start + share * (self.stop - self.start)


def _grid(across: Scale, up: Scale, x: Axis, y: Axis) -> Iterable[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    yield f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#333"/>'
    for place, text in y.ticks(up.low, up.high):
        height = up(place)
        yield f'<path d="M{LEFT} {height:.1f}H{right}" stroke="#ddd"/>'
        yield _text(LEFT - 8, height + 4, text, "end")
    for place, text in x.ticks(across.low, across.high):
        yield f'<path d="M{across(place):.1f} {bottom}v5" stroke="#333"/>'
        yield _text(across(place), bottom + 20, text, "middle")


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
