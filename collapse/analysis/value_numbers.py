"""Value numbering: nodes of one or more graphs get the same number only where they have the same value in every call.

A number stands for an operator and the numbers of its arguments, so that it does not matter how a node is called or
where it stands. What the lengths of a schema decide is folded: a mask that is true throughout, a choice between two
tables of which one cannot be reached. Where nothing is known a number is given to one node alone, so that two values
can be missed to be the same but never be mistaken for the same. Memory that was only allocated counts as any other
value: a model that is a function at all gives the same whatever lies there, so also where the same lies in both.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from collapse.analysis.intervals import Interval
from collapse.analysis.lengths import Sizes
from collapse.analysis.reachability import NO_EFFECT, storage_roots, written_arguments

aten = torch.ops.aten

_SAME = frozenset({aten.lift_fresh_copy.default, aten.detach_.default, aten.alias.default, aten.detach.default})
_CASTS = frozenset({aten.to.dtype, aten.to.device, aten.to.dtype_layout})
_AND = frozenset({aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default})


@dataclass
class Numbers:
    """Hands out one number for each key; two graphs that share it can be compared."""

    _known: dict[Hashable, int] = field(default_factory=dict)

    def of(self, *key: Hashable) -> int:
        """Return the number of `key`, a new one if it was not seen before."""
        return self._known.setdefault(key, len(self._known))

    def of_both(self, key: Hashable, other: Hashable | None) -> int:
        """Return the number of two keys of one value: how it is computed, and what it is, where that is known."""
        if other is None:
            return self._known.setdefault(key, len(self._known))
        number = self._known.get(key, self._known.get(other, len(self._known)))
        self._known.setdefault(other, number)
        return self._known.setdefault(key, number)


@dataclass
class Numbering:
    """The numbers of one graph's nodes.

    Attributes:
        numbers: shared with the graph that this one is compared with.
        side: names the graph; values that are not understood differ between sides.
        leaves: key of every placeholder whose value the caller knows, by node name.
        known: bounds of integer nodes, from `intervals`.
        values: keys of nodes that positions decide, from `position_values`.
    """

    graph: fx.Graph
    numbers: Numbers
    side: str
    sizes: Sizes
    leaves: Mapping[str, Hashable]
    known: Mapping[fx.Node, Interval]
    values: Mapping[fx.Node, Hashable] = field(default_factory=dict)
    result: dict[fx.Node, int] = field(default_factory=dict)

    def run(self) -> Mapping[fx.Node, int]:
        """Number every node, in order, and return the numbers."""
        self._roots = storage_roots(self.graph)
        self._content: dict[fx.Node, int] = {}  # root of a storage -> number of what it holds now
        self._seen: dict[fx.Node, int] = {}  # node -> what its storage held when it was made
        self._whole: set[fx.Node] = set()  # nodes that are their whole storage, in its own shape
        for node in self.graph.nodes:
            if node.op != "output":
                self._visit(node)
        return self.result

    def value(self, node: fx.Node) -> int:
        """Return the number of what `node` holds now, which a write to its storage may have changed."""
        now = self._content[self._roots[node]]
        if now == self._seen[node]:
            return self.result[node]
        return now if node in self._whole else self.numbers.of("unknown", self.side, node.name)

    def _visit(self, node: fx.Node) -> None:
        root = self._roots[node]
        written = written_arguments(node)
        self.result[node] = self._number(node)
        if root is node:
            self._content[node] = self.result[node]
        if root is node or (node.target in _SAME and node.args[0] in self._whole):
            self._whole.add(node)
        for argument in written:
            self._write(node, argument, alone=len(written) == 1)
        self._seen[node] = self._content[root]

    def _write(self, node: fx.Node, argument: fx.Node, *, alone: bool) -> None:
        """Record that `node` wrote to `argument`; only writes to a whole tensor, which is the result, are followed."""
        root = self._roots[argument]
        if alone and argument in self._whole and self._roots[node] is root and _returns_written(node):
            self._whole.add(node)
            self._content[root] = self.result[node]
        else:
            self._content[root] = self.numbers.of("written", self.side, node.name)

    def _number(self, node: fx.Node) -> int:
        if node.op == "placeholder":
            leaf = ("leaf", self.leaves.get(node.name, (self.side, node.name)))
            return self.numbers.of_both(leaf, self._values_key(node))
        if _is_opaque(node):
            return self.numbers.of("unknown", self.side, node.name)
        size = self.sizes.canonical(node.meta.get("val")) if _is_size(node) else None
        if size is not None:
            return self.numbers.of("size", sympy.srepr(size))
        uniform = self._uniform_key(node)
        if uniform is not None:
            return self.numbers.of(*uniform)
        same = self._same_as(node)
        if same is not None:
            return self.value(same)
        arguments = tuple(self._key(argument) for argument in node.args)
        options = tuple((name, self._key(value)) for name, value in sorted(node.kwargs.items()))
        return self.numbers.of_both(("call", _name(node.target), arguments, options), self._values_key(node))

    def _uniform_key(self, node: fx.Node) -> tuple[Hashable, ...] | None:
        """Return the key of a tensor that holds one known integer throughout, in every call."""
        interval, shape = self.known.get(node), self._shape(node)
        if interval is None or interval.constant is None or shape is None:
            return None
        return "full", interval.constant, str(node.meta["val"].dtype), shape

    def _values_key(self, node: fx.Node) -> Hashable | None:
        """Return the key of a tensor whose values are known for all positions."""
        shape = self._shape(node) if node in self.values else None
        return None if shape is None else ("values", self.values[node], shape)

    def _same_as(self, node: fx.Node) -> fx.Node | None:
        """Return the argument that `node` equals in every call, if one is known."""
        if node.target in _SAME:
            return _as_node(node.args[0])
        if node.target in _CASTS and not _is_identity_cast(node):
            return None
        if node.target in _CASTS or node.target is aten.copy_.default:
            candidate: Any = node.args[0 if node.target in _CASTS else 1]
        elif node.target is aten.where.self:
            candidate = self._chosen(node)
        elif node.target in _AND:
            candidate = self._other_than_true(node)
        else:
            return None
        return candidate if isinstance(candidate, fx.Node) and self._alike(node, candidate) else None

    def _chosen(self, node: fx.Node) -> Any:
        condition, left, right = node.args
        interval = self.known.get(condition) if isinstance(condition, fx.Node) else None
        if interval is None or interval.constant is None:
            return None
        return left if interval.constant else right

    def _other_than_true(self, node: fx.Node) -> Any:
        for place, other in ((0, 1), (1, 0)):
            argument = node.args[place]
            interval = self.known.get(argument) if isinstance(argument, fx.Node) else None
            if interval is not None and interval.constant == 1 and node.meta["val"].dtype is torch.bool:
                return node.args[other]
        return None

    def _alike(self, left: fx.Node, right: fx.Node) -> bool:
        shape = self._shape(left)
        return shape is not None and shape == self._shape(right) and left.meta["val"].dtype == right.meta["val"].dtype

    def _shape(self, node: fx.Node) -> tuple[str, ...] | None:
        value = node.meta.get("val")
        shape = self.sizes.shape(value) if isinstance(value, torch.Tensor) else None
        return None if shape is None else tuple(map(sympy.srepr, shape))

    def _key(self, value: Any) -> Hashable:
        """Return what identifies an argument; numbers of another type or sign of zero are other arguments."""
        if isinstance(value, fx.Node):
            return ("node", self.value(value))
        if isinstance(value, list | tuple):
            return ("list", *(self._key(part) for part in value))
        if isinstance(value, slice):
            return ("slice", self._key(value.start), self._key(value.stop), self._key(value.step))
        if value is None or isinstance(value, bool | int | float | complex | str):
            return (type(value).__name__, repr(value))
        if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
            return ("option", repr(value))
        return ("unknown", self.side, id(value))


def _is_size(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt | int) and not isinstance(value, bool)


def _is_opaque(node: fx.Node) -> bool:
    """Whether the value of a node is not a function of its arguments that numbering can see."""
    if node.op != "call_function" or isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__module__", "") not in {"_operator", "math"} and not _is_symbolic(node.target)
    return _is_random(node, node.target)


def _is_random(node: fx.Node, target: torch._ops.OpOverload) -> bool:
    """Whether an operator draws numbers; dropout that is switched off does not."""
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = dict(zip((argument.name for argument in target._schema.arguments), node.args, strict=False))
    given = {argument.name: argument.default_value for argument in target._schema.arguments} | given | node.kwargs
    return not (given.get("train") is False or given.get("dropout_p") in (0, 0.0))


def _is_symbolic(target: Any) -> bool:
    """Whether a Python function computes sizes: torch's own `sym_max`, `sym_not` and the like."""
    return getattr(target, "__module__", "") == "torch" and getattr(target, "__name__", "").startswith("sym_")


def _name(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else f"{target.__module__}.{target.__name__}"


def _is_identity_cast(node: fx.Node) -> bool:
    """Whether a cast keeps the dtype, and asks for no other order in memory."""
    source = _as_node(node.args[0])
    value = source.meta.get("val") if source else None
    plain = node.kwargs.get("memory_format") is None and not any(isinstance(a, torch.memory_format) for a in node.args)
    return plain and isinstance(value, torch.Tensor) and bool(value.dtype == node.meta["val"].dtype)


def _returns_written(node: fx.Node) -> bool:
    """Whether the result of a writing operator is the tensor that it wrote to, its first argument."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target in NO_EFFECT:
        return False
    returns = node.target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write


def _as_node(value: Any) -> fx.Node | None:
    return value if isinstance(value, fx.Node) else None
