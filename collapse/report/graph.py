"""graph.svg: the model before and after, side by side, one box a module and equal layers as one.

State never hangs on colour: a kept module has a solid frame, a narrowed one a dashed frame with cut corners, a
removed one a dotted frame with round corners; the latter two say so in words as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import graphviz

from collapse.report.data import Figures, Module, Report, State
from collapse.report.render import digraph
from collapse.report.text import short

STYLE: Mapping[State, Mapping[str, str]] = {
    "kept": {"style": "filled", "fillcolor": "#ffffff", "penwidth": "1.1"},
    "narrowed": {"style": "filled,dashed", "fillcolor": "#e9f0fb", "penwidth": "2", "shape": "octagon"},
    "removed": {"style": "filled,dotted,rounded", "fillcolor": "#ececec", "penwidth": "2", "fontcolor": "#555555"},
}
FRAME: Mapping[State, str] = {"kept": "solid", "narrowed": "dashed", "removed": "dotted"}
LIST_ITEM = re.compile(r"^(?P<list>.*)\.(?P<index>\d+|\{\d+-\d+\})$")
SIDES = ("before", "after")


@dataclass(frozen=True)
class Box:
    """One module of the picture with the modules right inside it that are told in its label."""

    module: Module
    parts: tuple[Module, ...]


@dataclass(frozen=True)
class Stage:
    """One box, or a group of consecutive equal layers with a box a sublayer."""

    layer: Module | None
    boxes: tuple[Box, ...]


def stages(modules: Sequence[Module]) -> tuple[Stage, ...]:
    """Arrange modules, in the order in which they run, into what the picture shows."""
    layers = [item for item in modules if LIST_ITEM.match(item.path) and not _inside_any(item, modules)]
    wrappers = {item.path for item in modules if any(layer.path.startswith(f"{item.path}.") for layer in layers)}
    result: list[Stage] = []
    for item in modules:
        if item in layers:
            children = _children(item, modules)
            result.append(Stage(item, tuple(Box(child, _children(child, modules)) for child in children)))
        elif item.path not in wrappers and (_parent(item.path) in wrappers or not _parent(item.path)):
            result.append(Stage(None, (Box(item, _children(item, modules)),)))
    return tuple(result)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _inside_any(item: Module, modules: Sequence[Module]) -> bool:
    """Whether some item of a module list is around this one."""
    return any(item.path.startswith(f"{other.path}.") for other in modules if LIST_ITEM.match(other.path))


def _children(parent: Module, modules: Sequence[Module]) -> tuple[Module, ...]:
    inside = [item for item in modules if item.path.startswith(f"{parent.path}.")]
    return tuple(i for i in inside if not any(i.path.startswith(f"{other.path}.") for other in inside))


def report_graph(report: Report) -> graphviz.Digraph:
    """Draw both sides of a report."""
    name = f"{report.source.name} under the schema {report.input_schema.get('type', 'custom')}"
    legend = "solid: kept      dashed, cut corners: narrowed      dotted, round: removed"
    prompt = f"prefill of {report.workload.prompt} tokens, executed FLOPs; MAC = 2 FLOPs"
    graph = digraph(
        "collapse", label=f"{name}\n{legend}\n{prompt}", labelloc="t", rankdir="TB", newrank="true", pad="0.1"
    )
    sides = {"before": report.before, "after": report.after}
    for side in SIDES:
        with graph.subgraph(name=f"cluster_{side}") as part:
            part.attr("graph", label=_total(side, sides[side]), style="rounded", color="#999999", margin="14")
            _draw(part, side, stages(report.modules))
    return graph


def model_graph(modules: Sequence[Module], *, name: str, figures: Figures) -> graphviz.Digraph:
    """Draw one model."""
    graph = digraph("collapse", label=f"{name}\n{_total('', figures)}", labelloc="t", rankdir="TB")
    _draw(graph, "before", stages(modules))
    return graph


def _total(side: str, figures: Figures) -> str:
    words = f"{short(figures.params)} params, prefill {short(figures.prefill_flops)}FLOPs"
    decode = f"decode {short(figures.decode_flops_per_token)}FLOPs a token"
    return f"{side.upper()}: {words},\n{decode}" if side else f"{words}, {decode}"


def _draw(graph: graphviz.Digraph, side: str, parts: tuple[Stage, ...]) -> None:
    previous = (f"{side}_tokens", False)
    graph.node(previous[0], "token ids", shape="plaintext")
    for number, stage in enumerate(parts):
        if stage.layer is None:
            names = list(_boxes(graph, side, number, stage))
        else:
            with graph.subgraph(name=f"cluster_{side}_{number}") as inner:
                inner.attr("graph", style=FRAME[stage.layer.state], margin="8", label="", color="#333333")
                names = list(_boxes(inner, side, number, stage))
        for name, gone in names:
            graph.edge(previous[0], name, style="dotted" if side == "after" and (gone or previous[1]) else "solid")
            previous = (name, gone)
    graph.node(f"{side}_logits", "logits", shape="plaintext")
    graph.edge(previous[0], f"{side}_logits")


def _boxes(graph: graphviz.Digraph, side: str, number: int, stage: Stage) -> Iterator[tuple[str, bool]]:
    """Add the boxes of a stage; yield the name of each, and whether it is removed."""
    if stage.layer is not None:
        graph.node(f"{side}_{number}", _layer_label(stage.layer, side), shape="plaintext", fontsize="12")
        yield f"{side}_{number}", stage.layer.state == "removed"
    for index, box in enumerate(stage.boxes):
        name = f"{side}_{number}_{index}"
        graph.node(name, _box_label(box, side), **STYLE[box.module.state])
        yield name, box.module.state == "removed"


def _layer_label(layer: Module, side: str) -> str:
    match = LIST_ITEM.match(layer.path)
    index = match["index"].strip("{}") if match else layer.path
    name = f"layers {index} x {layer.count}" if layer.count > 1 else f"layer {index}"
    return f"{name}{_state_words(layer, side)}\n{'each ' if layer.count > 1 else ''}{_numbers(_side(layer, side))}"


def _box_label(box: Box, side: str) -> str:
    figures = _side(box.module, side)
    lines = [box.module.path.rpartition(".")[2] + _state_words(box.module, side), _numbers(figures)]
    parts = [_part(part, side) for part in box.parts if box.module.state != "removed"]
    lines += [", ".join(parts[start : start + 4]) for start in range(0, len(parts), 4)]
    return "\n".join(line for line in lines if line)


def _part(part: Module, side: str) -> str:
    return part.path.rpartition(".")[2] + _state_words(part, side)


def _state_words(module: Module, side: str) -> str:
    if module.state == "kept":
        return ""
    if side == "after":
        return f" ({module.state.upper()})"
    return " (goes)" if module.state == "removed" else " (shrinks)"


def _side(module: Module, side: str) -> Figures:
    return module.before if side == "before" else module.after


def _numbers(figures: Figures) -> str:
    if not figures:
        return "nothing left"
    flops = f", {short(figures.prefill_flops)}FLOPs" if figures.prefill_flops else ""
    return f"{short(figures.params)} params{flops}"
