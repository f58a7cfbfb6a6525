"""Which sublayers maps may stand in for, in the layout that is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from collapse.analysis.layers import Layers
from collapse.passes.base import Context
from collapse.plan import Skipped
from collapse.search.maps import MapKind, kinds_for
from collapse.search.places import Place, Places, places_of
from collapse.search.units import Units

MAPPING = ("sublayers", "stand-in")  # the moves that put maps in the place of sublayers


def mappable(context: Context, layers: Layers, units: Sequence[Units], moves: Sequence[str]) -> Places:
    """Return the sublayers that maps may stand in for, and why others are left alone; none in the native layout."""
    asked = [move for move in MAPPING if move in moves]
    if context.layout == "native" or not asked:
        return Places((), uniform(layers, moves), 0)
    return places_of(context.program, context.checkpoint, context.config, layers, units, asked[-1])


def uniform(layers: Layers, moves: Sequence[str]) -> tuple[Skipped, ...]:
    """Say that blocks are alike in the native layout, and what goes there instead of sublayers."""
    reason = (
        "in the native layout blocks have all their sublayers, so that no map can stand in for one: the free layout "
        "has maps; here whole blocks go with `layers`, whose loss the readers that stay make up for"
    )
    return tuple(Skipped(pass_name=move, site=layers.site, reason=reason) for move in MAPPING if move in moves)


def tried_kinds(places: Places, moves: Sequence[str]) -> Mapping[Place, tuple[MapKind, ...]]:
    """Return the maps to try in each place, where there are any that are smaller than the sublayer."""
    found = {place: kinds_for(place, moves) for place in places.found}
    return {place: kinds for place, kinds in found.items() if kinds}
