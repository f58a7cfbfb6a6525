"""Proves that two traced programs compute the same function for every call that a schema allows.

Both graphs are value-numbered with one set of numbers. What depends on token ids, weights or the cache must be the same
operators on the same arguments. What depends on sizes, positions and the attention mask alone may differ as it is
written, as long as the schema's lengths decide it: `analysis.intervals` bounds it over the whole triangle of allowed
(new, past) lengths at once, decode and chunked prefill included, so that no length is sampled and none is left out.
Constants that a config determines are compared by their bytes.

`Equal` is a proof; `Different` says that there is none, which is no proof of the opposite.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from collapse.analysis.intervals import intervals
from collapse.analysis.lengths import Lengths, Sizes
from collapse.analysis.position_values import position_values
from collapse.analysis.reachability import storage_roots, written_arguments
from collapse.analysis.value_numbers import Numbering, Numbers
from collapse.fingerprint import fingerprint
from collapse.program import Program

Values = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Equal:
    """The programs give the same logits and the same cache in every allowed call."""


@dataclass(frozen=True)
class Different:
    """There is no proof that the programs agree: why, and the node at which they part."""

    reason: str
    node: str = ""


def equal_under(
    left: Program,
    right: Program,
    *,
    max_tokens: int | None,
    unpadded: bool = False,
    names: Mapping[str, str] | None = None,
    values: tuple[Values, Values] = ({}, {}),
    left_logits: fx.Node | None = None,
) -> Equal | Different:
    """Compare two dynamic programs.

    Args:
        left: one program.
        right: the other.
        max_tokens: bound of past and new tokens together, padding included; None if there is none.
        unpadded: whether the attention mask is all ones.
        names: state-dict name in `right` -> name in `left` of the same tensor; None where names are the same.
        values: the real constants of both, from `config_values`; a constant without a value equals no other.
        left_logits: the node of `left` to compare with the logits of `right`; its logits unless given.

    A cache tensor that a program only hands on holds nothing and is not compared; the others are matched by number.
    """
    for program in (left, right):
        if program.max_tokens is not None and (max_tokens is None or max_tokens > program.max_tokens):
            return Different(f"cannot decide: a graph stands for at most {program.max_tokens} tokens")
    table, grown = Numbers(), (_grown(left), _grown(right))
    shapes = [[left.cache[i] for i in grown[0]], [right.cache[i] for i in grown[1]]]
    if shapes[0] != shapes[1]:
        return Different(f"the caches differ: {len(shapes[0])} and {len(shapes[1])} tensors that grow, or their shapes")
    renamed = [{name: name for name in left.shapes}, names or {name: name for name in right.shapes}]
    sides = []
    for side, program in enumerate((left, right)):
        if written := _written_input(program):
            return Different("cannot decide: a tensor of the caller is written to", written)
        lengths = Lengths(max_tokens, unpadded) if max_tokens is not None else None
        sizes = Sizes(program)
        known = intervals(program, sizes, lengths) if lengths else {}
        decided = _decided(program, values[side], lengths)
        leaves = _leaves(program, left, renamed[side], grown[side], values[side])
        sides.append(Numbering(program.graph.graph, table, f"side {side}", sizes, leaves, known, decided).run())
    outputs, others = _outputs(left, grown[0]), _outputs(right, grown[1])
    return _verdict([left_logits or outputs[0], *outputs[1:]], others, sides)


def _verdict(
    outputs: list[fx.Node], others: list[fx.Node], sides: Sequence[Mapping[fx.Node, int]]
) -> Equal | Different:
    for one, other in zip(outputs, others, strict=True):
        if sides[0][one] != sides[1][other]:
            return _parting(one, other, sides)
    return Equal()


def _parting(left: fx.Node, right: fx.Node, sides: Sequence[Mapping[fx.Node, int]]) -> Different:
    """Follow two nodes of different value back to where they are no longer computed alike."""
    while True:
        inputs = list(zip(left.all_input_nodes, right.all_input_nodes, strict=False))
        parted = next(((a, b) for a, b in inputs if sides[0][a] != sides[1][b]), None)
        alike = left.target == right.target and len(left.all_input_nodes) == len(right.all_input_nodes)
        if left.op == "placeholder" or not alike or parted is None:
            return Different(f"{_shown(left)} against {_shown(right)}", _place(left))
        left, right = parted


def _shown(node: fx.Node) -> str:
    if node.op == "placeholder":
        return node.name
    rest = [repr(argument) for argument in node.args if isinstance(argument, bool | int | float | str)]
    return f"{node.target}({', '.join([*(source.name for source in node.all_input_nodes), *rest])})"


def _place(node: fx.Node) -> str:
    modules = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return f"{modules[-1]}: {node.name}" if modules and modules[-1] else node.name


def _cache_nodes(program: Program) -> list[fx.Node]:
    cached = {i.placeholder for i in program.inputs if i.role == "input" and i.target not in _USER}
    return [node for node in program.graph.graph.nodes if node.op == "placeholder" and node.name in cached]


_USER = ("input_ids", "attention_mask", "position_ids")


def _results(program: Program) -> list[fx.Node]:
    nodes: Iterable[fx.Node] = program.graph.graph.nodes
    (results,) = next(node for node in nodes if node.op == "output").args
    assert isinstance(results, list | tuple)
    return [node for node in results if isinstance(node, fx.Node)]


def _grown(program: Program) -> list[int]:
    """Return the numbers of the cache tensors that the program does more with than hand them on."""
    handed_on = [
        node in _results(program)[1:] and all(user.op == "output" for user in node.users)
        for node in _cache_nodes(program)
    ]
    return [number for number, only in enumerate(handed_on) if not only]


def _outputs(program: Program, grown: list[int]) -> list[fx.Node]:
    logits, *cache = _results(program)
    return [logits, *(cache[number] for number in grown)]


def _written_input(program: Program) -> str:
    """Return the name of a node that writes to token ids, mask or cache, which the caller would see; or nothing."""
    users = {item.placeholder for item in program.inputs if item.role == "input"}
    for node, _ in (roots := storage_roots(program.graph.graph)).items():
        if any(roots[argument].name in users for argument in written_arguments(node)):
            return node.name
    return ""


def _leaves(
    program: Program, left: Program, names: Mapping[str, str], grown: list[int], values: Values
) -> dict[str, Hashable]:
    """Return what identifies each placeholder: state-dict name, number in the cache, or the bytes of a constant."""
    keys: dict[str, Hashable] = {}
    places = {node.name: number for number, node in enumerate(_cache_nodes(program))}
    state = _state_buffers(program)
    for item in program.inputs:
        if item.target in program.shapes and item.role in {"parameter", "buffer"}:
            if item.target in names and item.placeholder not in state:
                name = min(left.aliases(names[item.target]))
                keys[item.placeholder] = ("weight", name, program.shapes[item.target])
        elif item.role == "input":
            keys[item.placeholder] = _input_key(item.target, places.get(item.placeholder), grown)
        elif item.placeholder not in state:
            value = _value(program, item.target, values)
            if value is not None:
                keys[item.placeholder] = ("constant", fingerprint(value))
    return keys


def _decided(program: Program, values: Values, lengths: Lengths | None) -> dict[fx.Node, Hashable]:
    """Return the keys of what positions decide; what the graph writes to, or a file may hold, is no constant."""
    if lengths is None:
        return {}
    written = _state_buffers(program)
    unknown = {item.target for item in program.inputs if item.placeholder in written} | program.shapes.keys()
    return position_values(
        program, lambda name: None if name in unknown else _value(program, name, values), lengths.last_position
    )


def _input_key(target: str, number: int | None, grown: list[int]) -> Hashable:
    if number is None:
        return ("input", target)
    return ("cache", grown.index(number)) if number in grown else ("handed on", number)


def _state_buffers(program: Program) -> set[str]:
    """Return the placeholders that the graph writes to: they may hold what an earlier call left there."""
    roots = storage_roots(program.graph.graph)
    return {roots[argument].name for node in roots for argument in written_arguments(node)}


def _value(program: Program, target: str, values: Values) -> torch.Tensor | None:
    """Return a constant's value: the traced one, unless only its shape was traced."""
    traced = program.constants.get(target)
    found = values.get(target) if traced is None or traced.device.type == "meta" else traced
    return None if found is None or found.device.type == "meta" else found
