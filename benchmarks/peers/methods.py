"""The peers by name, and what is compared with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.peers.calibration import Calibration
from benchmarks.peers.cut import Removal
from benchmarks.peers.flap import flap_adaptive, flap_uniform
from benchmarks.peers.ours import free, healed, maps, native
from benchmarks.peers.replaceme import replaceme
from benchmarks.peers.shortgpt import shortgpt
from benchmarks.peers.sleb import sleb
from benchmarks.peers.uidl import uidl
from benchmarks.peers.wanda_sp import wanda_sp

METHODS: Mapping[str, Callable[[Calibration, float], Removal]] = {
    "collapse": native,
    "collapse-free": free,
    "collapse-maps": maps,
    "collapse-healed": healed,
    "shortgpt": shortgpt,
    "uidl": uidl,
    "sleb": sleb,
    "replaceme": replaceme,
    "flap": flap_adaptive,
    "flap-ul": flap_uniform,
    "wanda-sp": wanda_sp,
}
