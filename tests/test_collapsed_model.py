"""The plan applied to a loaded model: bit for bit what loading the written checkpoint gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from collapse.checkpoint import Checkpoint
from collapse.errors import PlanError
from collapse.plan import Axis, IndexSet, Narrow, Plan
from collapse.progress import Stopwatch
from collapse.rewrite.model import collapsed_model
from collapse.rewrite.values import Values
from collapse.source_model import source_weights
from collapse.trace import load_config, trace
from tests.audit_cases import dropped
from tests.exported import EMBEDDING, KEPT
from tests.replacing import MEASURED, drawn, replacing, values_in
from tests.tiny import erase, export, plan_for, tiny_gpt2, tiny_llama, vocabulary

DOWN = "model.layers.1.mlp.down_proj.weight"
NEURONS = [*range(0, 20), *range(25, 40)]
IDS = torch.tensor([[1, 7, 9, 30, 12, 2], [3, 3, 8, 21, 0, 5]])


def neurons() -> Narrow:
    axes = [
        Axis(tensor=f"model.layers.{layer}.mlp.{name}_proj.weight", dim=dim)
        for layer in (0, 1)
        for name, dim in (("gate", 0), ("up", 0), ("down", 1))
    ]
    return Narrow(
        **{"pass": "neurons"}, site="mlp", evidence=MEASURED, size=48, kept=IndexSet.of(NEURONS),
        relabels="channels", axes=tuple(axes), config={"intermediate_size": len(NEURONS)},
    )  # fmt: skip


def in_memory(source: Checkpoint, plan: Plan, values: Values | None = None) -> PreTrainedModel:
    weights = source_weights(source, Stopwatch(quiet=True))
    return collapsed_model(source, trace(load_config(source)), plan, weights, values)


def same(found: PreTrainedModel, output: Checkpoint) -> None:
    reloaded = AutoModelForCausalLM.from_pretrained(output.root, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(found(IDS).logits, reloaded(IDS).logits)
    ours, theirs = found.state_dict(), reloaded.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert found.config.to_diff_dict() | {"dtype": 0} == reloaded.config.to_diff_dict() | {"dtype": 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_and_vocabulary_go(tmp_path: Path, dtype: torch.dtype) -> None:
    source = tiny_llama(tmp_path / "source", dtype=dtype)
    plan = plan_for(source, dropped(source, 0), vocabulary(KEPT, EMBEDDING))
    found = in_memory(source, plan)
    assert found.config.vocab_size == len(KEPT) and len(found.model.layers) == 1 and not found.training
    assert found.get_input_embeddings().weight is found.get_output_embeddings().weight
    same(found, export(source, plan, tmp_path / "out"))


def test_neurons_go_and_computed_weights_come(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source", tied=False)
    new = {DOWN: drawn(source, DOWN)[DOWN][:, : len(NEURONS)].clone()}
    plan, values = plan_for(source, neurons(), replacing(new)), values_in(tmp_path / "values", new)
    found = in_memory(source, plan, values)
    assert torch.equal(found.model.layers[1].mlp.down_proj.weight, new[DOWN])
    same(found, export(source, plan, tmp_path / "out", values=values))


def test_a_model_of_transposed_weights_and_buffers(tmp_path: Path) -> None:
    source = tiny_gpt2(tmp_path / "source")
    gone = dropped(source, 1)
    plan = plan_for(source, gone.model_copy(update={"config": {"n_layer": 1}}))
    same(in_memory(source, plan), export(source, plan, tmp_path / "out"))


def test_an_empty_plan_gives_the_source(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source")
    same(in_memory(source, plan_for(source)), source)


def test_the_source_in_memory_stays_as_it_is(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source")
    weights = source_weights(source, Stopwatch(quiet=True))
    before = {name: tensor.detach().clone() for name, tensor in weights.items()}
    plan = plan_for(source, dropped(source, 0), vocabulary(KEPT, EMBEDDING), neurons())
    collapsed_model(source, trace(load_config(source)), plan, weights)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights.items())
    assert source.config["vocab_size"] == 64 and source.config["num_hidden_layers"] == 2


def test_a_parameter_without_a_value_is_no_model(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source")
    with pytest.raises(PlanError, match="the collapsed model has no value for it"):
        in_memory(source, plan_for(source, erase(DOWN)))
    with pytest.raises(PlanError, match="no values are given"):
        in_memory(source, plan_for(source, replacing(drawn(source, DOWN))))
