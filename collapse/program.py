"""A traced model as data: the graph, what its placeholders are, and how to run it on real tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import sympy
import torch
from torch import fx

from collapse.naming import Naming

Role = Literal["parameter", "buffer", "constant", "input"]
Measure = Literal["batch", "new", "past", "total"]


@dataclass(frozen=True)
class Input:
    """A placeholder of the graph. `target` is the state-dict name, or the name of the user's argument."""

    placeholder: str
    role: Role
    target: str


@dataclass(frozen=True)
class CacheLeaf:
    """One tensor of the KV cache: its sizes, with a `Measure` where batch or length stand."""

    shape: tuple[int | Measure, ...]
    dtype: torch.dtype

    def empty(self, batch: int) -> torch.Tensor:
        """Return the leaf as it is before the first token: zeros, of length 0 where it grows."""
        sizes = [size if isinstance(size, int) else batch if size == "batch" else 0 for size in self.shape]
        return torch.zeros(sizes, dtype=self.dtype)


@dataclass(frozen=True)
class Program:
    """A traced model.

    Attributes:
        graph: ATen nodes with lifted weights; each node's `nn_module_stack` names its module.
        inputs: one entry a placeholder, in order.
        outputs: one name an output, in order: `logits`, `cache.0`, `cache.1` and so on.
        cache: the cache tensors that it takes, in order.
        constants: tensors that the trace lifted, by target.
        shapes: shape of every parameter and persistent buffer by state-dict name, all tied names included.
        tied: groups of parameter names that are one tensor, each sorted.
        module_types: class name of every module path.
        naming: how the names in weight files become those of the model.
        max_tokens: the longest sequence, past included, for which the graph stands; None if it does for any.
    """

    graph: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    cache: tuple[CacheLeaf, ...]
    constants: Mapping[str, torch.Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    tied: tuple[tuple[str, ...], ...]
    module_types: Mapping[str, str]
    naming: Naming = field(default_factory=Naming)
    max_tokens: int | None = None

    @property
    def parameters(self) -> Mapping[str, str]:
        """State-dict name -> placeholder name, for parameters and buffers."""
        return {item.target: item.placeholder for item in self.inputs if item.role in {"parameter", "buffer"}}

    def placeholder(self, name: str) -> fx.Node:
        """Return the placeholder node called `name`."""
        nodes: Iterable[fx.Node] = self.graph.graph.nodes
        return next(node for node in nodes if node.op == "placeholder" and node.name == name)

    def aliases(self, name: str) -> tuple[str, ...]:
        """Return all names of the tensor called `name`, itself included."""
        return next((group for group in self.tied if name in group), (name,))

    def model_name(self, name: str) -> str | None:
        """Return the state-dict name of a tensor that a file calls `name`, or None where no module claims it."""
        return self.naming.resolve(name)[0]

    def with_graph(self, graph: fx.GraphModule, **changes: Any) -> Program:
        """Return the program with another graph; placeholders that the graph lost are dropped from `inputs`."""
        left = {node.name for node in graph.graph.nodes if node.op == "placeholder"}
        inputs = tuple(item for item in self.inputs if item.placeholder in left)
        return replace(self, graph=graph, inputs=inputs, **changes)

    @property
    def masks_past(self) -> bool:
        """Whether the attention mask covers what the cache holds; not where the cache keeps no single tokens."""
        return any("past" in leaf.shape for leaf in self.cache)

    def user_inputs(self) -> Iterator[tuple[Input, tuple[int | Measure, ...]]]:
        """Yield what a caller passes, in order, and what its sizes measure."""
        leaves = iter(self.cache)
        given: Mapping[str, tuple[int | Measure, ...]] = {
            "input_ids": ("batch", "new"),
            "position_ids": ("batch", "new"),
            "attention_mask": ("batch", "total" if self.masks_past else "new"),
        }
        for item in self.inputs:
            if item.role == "input":
                yield item, given[item.target] if item.target in given else next(leaves).shape

    def bindings(self, *, batch: int, new: int, past: int) -> dict[sympy.Symbol, int]:
        """Return what each size symbol of a dynamic graph stands for in a call with these sizes."""
        values: Mapping[Measure, int] = {"batch": batch, "new": new, "past": past, "total": past + new}
        bound: dict[sympy.Symbol, int] = {}
        for item, measures in self.user_inputs():
            for size, measure in zip(self.placeholder(item.placeholder).meta["val"].shape, measures, strict=True):
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    bound[size.node.expr] = values[measure]  # type: ignore[index]
        return bound

    def run(
        self,
        weights: Mapping[str, torch.Tensor],
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        cache: Sequence[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run the graph on real tensors.

        Args:
            weights: parameters and buffers by state-dict name.
            input_ids: `[batch, new]`, int64.
            attention_mask: `[batch, past + new]`, int64; 0 marks padding, to which positions do not count.
            cache: what an earlier call returned; None stands for an empty cache.

        Returns:
            Logits `[batch, new, vocabulary]`, and the grown cache.
        """
        leaves = cache if cache is not None else [leaf.empty(len(input_ids)) for leaf in self.cache]
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        mask = attention_mask if self.masks_past else attention_mask[:, -input_ids.shape[1] :]
        user = {"input_ids": input_ids, "attention_mask": mask, "position_ids": positions}
        stream = iter(leaves)
        arguments = [self._value(item, weights, user, stream) for item in self.inputs]
        with torch.no_grad():
            results = self.graph(*arguments)
        return results[0], tuple(results[1:])

    def _value(
        self,
        item: Input,
        weights: Mapping[str, torch.Tensor],
        user: Mapping[str, torch.Tensor],
        cache: Iterator[torch.Tensor],
    ) -> torch.Tensor:
        if item.role == "constant":
            return self.constants[item.target]
        if item.role == "input":
            return user[item.target] if item.target in user else next(cache)
        return weights[item.target]


def size_of(size: int | torch.SymInt, bindings: Mapping[sympy.Symbol, int]) -> int:
    """Return a size of a traced shape as a number, given what its symbols stand for."""
    return int(size.node.expr.subs(bindings)) if isinstance(size, torch.SymInt) else int(size)
