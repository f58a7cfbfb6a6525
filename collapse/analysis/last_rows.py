"""Which nodes are needed for the last position only, when logits are asked for there and nowhere else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from collapse.analysis.call_sizes import NEW, Shapes
from collapse.analysis.reachability import live_nodes, written_storage
from collapse.analysis.row_rules import Cut, Pull, tensor_arguments
from collapse.analysis.slicing import pull

LOGITS_CUT = Cut(dim=1, length=NEW)


@dataclass
class _Demand:
    """What is asked of each node by those after it."""

    whole: set[fx.Node] = field(default_factory=set)
    cuts: defaultdict[fx.Node, set[Cut]] = field(default_factory=lambda: defaultdict(set))

    def only(self, node: fx.Node) -> Cut | None:
        """Return the one cut that is all that is asked of the node."""
        cuts = self.cuts[node]
        return next(iter(cuts)) if len(cuts) == 1 and node not in self.whole else None


def last_rows(graph: fx.Graph, shapes: Shapes) -> Mapping[fx.Node, tuple[Cut, Pull]]:
    """Return the nodes of which only the last row of the cut is needed, with what they then need, in graph order.

    One walk from the outputs back: all users of a node come after it, so what is asked of it is known when it is
    reached. Caches are asked for whole. A node of which different things are asked is computed whole, and so is one
    that shares storage with what is written to: when it is read would matter.
    """
    live, (roots, written) = live_nodes(graph), written_storage(graph)
    demand, found = _Demand(), dict[fx.Node, tuple[Cut, Pull]]()
    for node in reversed(graph.nodes):
        if node.op == "output":
            logits, *caches = node.args[0]
            demand.cuts[logits].add(LOGITS_CUT)
            demand.whole.update(caches)
        elif node.name in live:
            fixed = all(roots[one] not in written for one in (node, *node.all_input_nodes))
            _ask(node, demand.only(node) if fixed else None, demand, found, shapes)
    return dict(reversed(found.items()))


def _ask(
    node: fx.Node, cut: Cut | None, demand: _Demand, found: dict[fx.Node, tuple[Cut, Pull]], shapes: Shapes
) -> None:
    pulled = pull(node, cut, shapes) if cut is not None else None
    if cut is None or pulled is None:
        demand.whole.update(node.all_input_nodes)
        if isinstance(node.meta.get("val"), list | tuple):  # its parts cannot be computed without it
            for part in node.users:
                found.pop(part, None)
        return
    found[node] = (cut, pulled)
    for place, argument in tensor_arguments(node):
        if place in pulled.cuts:
            demand.cuts[argument].add(pulled.cuts[place])
        else:
            demand.whole.add(argument)
