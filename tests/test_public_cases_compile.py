"""Reported faults of tools that do this job: stale compiled graphs; the number is that of the collected case.

The backends need no C++ compiler; when a graph is used again is decided in front of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from collapse import load
from collapse.analysis.activation import profile
from collapse.analysis.stand_in import StandIn, short_circuited
from collapse.checkpoint import Checkpoint
from collapse.runtime.fuse import fuse
from tests.architectures import tiny_config
from tests.exported import EMBEDDING, KEPT
from tests.tiny import erase, export, plan_for, tiny_llama, vocabulary
from tests.traces import afresh

SITE = "model.layers.1.mlp"
IDS = torch.tensor([[5, 8, 13, 21, 34, 5, 8]])
REGULAR = torch.full((1, 10), 5)
NEW_IDS = torch.tensor([[KEPT.index(token) for token in IDS[0].tolist()]])


class Graphs:
    """A backend of `torch.compile` that counts what it is given, and runs it as it is."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        self.count += 1
        return module


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "source", extra={"old.bias": torch.arange(1.0, 6.0)})


def opened(source: Checkpoint) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(source.root).eval()


def wrapped(model: PreTrainedModel, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


def in_place(model: PreTrainedModel, backend: Any) -> Any:
    model.compile(backend=backend)
    return model


WAYS = pytest.mark.parametrize("compiled_by", [wrapped, in_place])


@pytest.mark.parametrize(("compiled_by", "backend"), [(wrapped, "aot_eager"), (in_place, "eager")])
def test_b27_a_model_compiled_before_the_collapse_and_one_compiled_after_it_do_not_meet(
    source: Checkpoint, tmp_path: Path, compiled_by: Callable[..., Any], backend: str
) -> None:
    model = opened(source)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    eager = model(IDS).logits
    compiled = compiled_by(model, backend)
    assert torch.equal(compiled(IDS).logits, eager)
    afresh(tiny_config("llama", num_hidden_layers=1), dynamic=False, batch=1, new=5, past=3)
    out = export(source, plan_for(source, erase("old.bias"), vocabulary(KEPT, EMBEDDING)), tmp_path / "out")
    collapsed, twin = load(out.root), load(out.root, guard="off")
    expected = twin(NEW_IDS).logits
    assert torch.equal(compiled_by(collapsed, backend)(NEW_IDS).logits, expected)
    torch.testing.assert_close(expected, eager[..., KEPT], rtol=1.3e-6, atol=1e-5)
    assert torch.equal(compiled(IDS).logits, eager)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    shared = {tensor.data_ptr() for tensor in model.parameters()} & {t.data_ptr() for t in collapsed.parameters()}
    assert not shared


@WAYS
def test_b27_a_trial_short_circuit_is_seen_through_a_graph_made_before_and_is_in_none_made_after(
    source: Checkpoint, compiled_by: Callable[..., Any]
) -> None:
    model, graphs = opened(source), Graphs()
    eager, trial = model(IDS).logits, [StandIn(SITE, "zero")]
    with short_circuited(model, trial):
        zeroed = model(IDS).logits
    assert not torch.equal(zeroed, eager)
    compiled = compiled_by(model, graphs)
    with short_circuited(model, trial):
        assert torch.equal(compiled(IDS).logits, zeroed)
    assert graphs.count == 0
    assert torch.equal(compiled(IDS).logits, eager)
    made = graphs.count
    assert made > 0
    with short_circuited(model, trial):
        assert torch.equal(compiled(IDS).logits, zeroed)
    assert torch.equal(compiled(IDS).logits, eager)
    assert graphs.count == made


@WAYS
def test_b27_a_profile_of_a_compiled_model_is_that_of_the_model(
    source: Checkpoint, compiled_by: Callable[..., Any]
) -> None:
    expected = profile(opened(source), [SITE], IDS.tolist())[SITE]
    model, graphs = opened(source), Graphs()
    eager = model(IDS).logits
    compiled = compiled_by(model, graphs)
    assert torch.equal(compiled(IDS).logits, eager)
    made = graphs.count
    found = profile(model, [SITE], IDS.tolist())[SITE]
    figures = ("calls", "rms", "residual", "zero", "identity", "constant")
    assert [getattr(found, name) for name in figures] == [getattr(expected, name) for name in figures]
    assert torch.equal(compiled(IDS).logits, eager)
    assert graphs.count == made


class Pipeline(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.widen = torch.nn.Embedding(40, 4), torch.nn.Linear(4, 6)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.widen(self.embed(input_ids)) + 1


def test_b27_fusing_and_unfusing_a_compiled_model_takes_effect_at_once() -> None:
    model = Pipeline()
    eager = model(REGULAR)
    compiled = wrapped(model, "eager")
    assert torch.equal(compiled(REGULAR), eager)
    with fuse(model, {"widen": 9.0}) as handle:
        assert torch.equal(compiled(REGULAR), torch.ones(1, 10, 6))
        assert handle.counts["widen"].skipped == 1
    assert torch.equal(compiled(REGULAR), eager)
