"""Trace a causal LM into one graph that serves prefill and decode, on the meta device: no weights needed.

The graph takes token ids, an attention mask and a KV cache whose length may be zero, and returns logits and
the grown cache. One program therefore stands for prefill (empty cache), chunked prefill and decode.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx
from torch.export import Dim
from torch.utils import _pytree as pytree

from collapse.checkpoint import Checkpoint
from collapse.errors import CheckpointError, UnsupportedError

Role = Literal["parameter", "buffer", "constant", "input"]


@dataclass(frozen=True)
class Input:
    """A placeholder of the graph. `target` is the state-dict name, or the name of the user input."""

    placeholder: str
    role: Role
    target: str
    persistent: bool = True


@dataclass(frozen=True)
class Program:
    """A traced model.

    Attributes:
        graph: ATen nodes with lifted weights; each node's `nn_module_stack` names its module.
        inputs: one entry a placeholder, in order.
        outputs: names of the outputs, in order; the first is `logits`, the others belong to the cache.
        tied: groups of parameter names that share one storage, each sorted.
        cache: shape of each cache input with `None` where batch and length stand.
        constants: tensors that the trace lifted.
        sizes: symbol name -> what it measures, for a dynamic program: batch, new, past.
    """

    graph: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]
    cache: tuple[torch.Tensor, ...]
    constants: Mapping[str, torch.Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    hints: Mapping[str, int] = field(default_factory=dict)
