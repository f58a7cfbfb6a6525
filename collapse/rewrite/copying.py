"""Copies graphs, so that a rewrite leaves its input as it is."""

from __future__ import annotations

from torch import fx


def copy_graph(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy whose nodes can be edited without touching `module`; node metadata is shared."""
    graph = fx.Graph()
    results = graph.graph_copy(module.graph, val_map={})
    graph.output(results)
    return fx.GraphModule(module, graph)
