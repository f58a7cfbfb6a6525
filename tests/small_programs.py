"""Programs of a few operators between an embedding and the logits, traced in a moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import Dim

from collapse.program import Input, Program

WIDTH = 8
ROLES: dict[str, Any] = {"PARAMETER": "parameter", "CONSTANT_TENSOR": "constant", "USER_INPUT": "input"}
Body = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Small(torch.nn.Module):
    """Token ids `[batch, new]` to logits `[batch, new, 8]`; `body` takes hidden states and mask."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(16, WIDTH)
        self.up = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.body = body

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.body(self.embed(input_ids) @ self.up, attention_mask),)


def small_program(body: Body) -> tuple[Program, dict[str, torch.Tensor]]:
    """The program without a cache, and its weights."""
    module = Small(body).eval()
    ids = torch.ones(2, 5, dtype=torch.long)
    sizes = {0: Dim.AUTO, 1: Dim.AUTO}
    shapes = {"input_ids": sizes, "attention_mask": sizes}
    exported = torch.export.export(module, (ids, torch.ones_like(ids)), dynamic_shapes=shapes, strict=False)
    inputs = tuple(
        Input(spec.arg.name, ROLES[spec.kind.name], spec.target or spec.arg.name)
        for spec in exported.graph_signature.input_specs
    )
    graph = exported.graph_module.graph
    graph.set_codegen(torch.fx.graph.CodeGen())
    names = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
    program = Program(
        graph=torch.fx.GraphModule({}, graph), inputs=inputs, outputs=("logits",), cache=(),
        constants=dict(exported.constants), shapes=names, tied=(), module_types={},
    )  # fmt: skip
    return program, dict(module.named_parameters())


def ids_and_mask(batch: int = 3, length: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 16, (batch, length), generator=torch.Generator().manual_seed(1))
    return ids, torch.ones_like(ids)
