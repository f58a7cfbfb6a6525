"""Plots: every point has its place, and those that an axis has no place for are left out."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from benchmarks import plot
from benchmarks.plot import PARAMETERS, Axis

SPACE = {"s": "http://www.w3.org/2000/svg"}
KL = Axis("KL", log=True)
LINES = {"a <b>": [(2e6, 0.5), (1e6, 5.0)], "c": [(1.5e6, 0.05), (1e6, 0.0), (1e6, math.inf)]}


def texts(root: ET.Element) -> set[str]:
    return {str(element.text) for element in root.findall("s:text", SPACE)}


def test_a_plot_is_well_formed_and_has_a_place_for_every_point() -> None:
    root = ET.fromstring(plot.svg("title", LINES, PARAMETERS, KL))
    assert len(root.findall("s:circle", SPACE)) == 3 + 2  # points, and one in the legend for each line
    first = root.findall("s:polyline", SPACE)[0].attrib["points"]
    (left, high), (right, low) = (map(float, place.split(",")) for place in first.split())
    assert left == plot.LEFT
    assert right == plot.WIDTH - plot.RIGHT
    assert high < low  # more KL is higher up
    assert {"title", "a <b>", "c", "0.01", "0.1", "1", "10", "1M", "2M"} <= texts(root)


def test_a_linear_axis_takes_losses_below_zero() -> None:
    lines = {"a": [(1e6, -0.1), (2e6, 0.3)]}
    root = ET.fromstring(plot.svg("", lines, PARAMETERS, Axis("regret", unit=0.01, suffix=" %")))
    assert {"-10 %", "0 %", "10 %", "20 %", "30 %"} <= texts(root)
    places = root.findall("s:polyline", SPACE)[0].attrib["points"].split()
    assert [float(place.split(",")[1]) for place in places] == [plot.HEIGHT - plot.BOTTOM, plot.TOP]


def test_zero_is_on_the_axis_where_it_is_asked_for() -> None:
    assert Axis("s", zero=True).ends([2.0, 8.0]) == (0.0, 8.0)
    assert Axis("s").ends([2.0, 8.0]) == (2.0, 8.0)
    assert Axis("s", log=True).ends([0.02, 8.0]) == (-2, 1)


@pytest.mark.parametrize("lines", [{}, {"a": []}, {"a": [(1e6, 0.0)]}, {"a": [(1e6, 1.0)]}])
def test_plots_of_nothing_and_of_one_point_are_well_formed(lines: dict[str, list[tuple[float, float]]]) -> None:
    ET.fromstring(plot.svg("", lines, PARAMETERS, KL))


def test_decades_are_equally_far_apart() -> None:
    scale = plot.Scale(-2, 1, 300, 0)
    assert [scale(decade) for decade in (-2, -1, 0, 1)] == [300, 200, 100, 0]
