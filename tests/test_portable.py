"""Tracing on the meta device for the CPU: constants keep their values, and nothing that fits one size passes."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers import masking_utils
from transformers.integrations import moe

from collapse.auto import config_from
from collapse.errors import UnsupportedError
from collapse.portable import portable
from collapse.token_ids import size_fields
from collapse.trace import trace
from tests.architectures import tiny_config, tiny_model, weights_of


@pytest.mark.parametrize("kind", ["falcon", "gpt_neo", "mixtral"])
def test_a_static_trace_gives_the_bits_of_eager(kind: str) -> None:
    """Falcon picks heads by a list of numbers, GPT-Neo fills with a tensor of one number, Mixtral counts experts."""
    model = tiny_model(kind, **({"multi_query": True} if kind == "falcon" else {}))
    program = trace(model.config, dynamic=False, batch=1, new=5, past=0)
    ids = torch.tensor([[3, 9, 4, 9, 2]])
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    found, _ = program.run(weights_of(model), ids, torch.ones_like(ids))
    assert torch.equal(found, expected)


def test_constants_of_a_traced_graph_have_values() -> None:
    program = trace(tiny_config("falcon", multi_query=True), dynamic=False, batch=1, new=2, past=0)
    read = [program.constants[item.target] for item in program.inputs if item.role == "constant"]
    assert [tensor.tolist() for tensor in read] == [[-2], [-1]] * 2


def test_a_loop_over_the_length_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"MambaForCausalLM cannot be traced for every size .* new = 3 only"):
        trace(tiny_config("mamba"))


def test_a_cache_without_single_tokens_is_masked_by_the_new_ones_alone() -> None:
    """Mamba multiplies its inputs with the mask, so a mask over the past as well would not fit."""
    model = tiny_model("mamba")
    program = trace(model.config, dynamic=False, batch=1, new=2, past=2)
    assert not program.masks_past
    ids = torch.tensor([[3, 9, 4, 8]])
    with torch.no_grad():
        held = model(input_ids=ids[:, :2], use_cache=True).cache
        leaves = [leaf.clone() for leaf in pytree.tree_leaves(held) if isinstance(leaf, torch.Tensor)]
        expected = model(input_ids=ids[:, 2:], cache=held, use_cache=True).logits
    found, _ = program.run(weights_of(model), ids[:, 2:], torch.ones_like(ids), leaves)
    assert torch.equal(found, expected)


def test_what_is_changed_for_tracing_is_put_back() -> None:
    before = (moe._can_use_grouped_mm, masking_utils._ignore_causal_mask_sdpa)
    with pytest.raises(ValueError), portable():
        raise ValueError
    assert (moe._can_use_grouped_mm, masking_utils._ignore_causal_mask_sdpa) == before
    assert torch.tensor(1.0, device="meta").device.type == "meta"


def test_an_infinite_number_in_config_json_is_read_as_transformers_writes_it() -> None:
    values = {**tiny_config("mamba2").to_dict(), "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    assert config_from(values).time_step_limit == [0.0, float("inf")]


def test_all_token_tables_of_one_size_are_named() -> None:
    config = {"vocab_size": 53, "text_config": {"vocab_size": 53, "vocab_size_per_layer_input": 53, "vocab_size_x": 7}}
    names = [name for name, _ in size_fields(config, 53)]
    assert names == ["vocab_size", "text_config.vocab_size", "text_config.vocab_size_per_layer_input"]
    assert [name for name, _ in size_fields(config)] == ["vocab_size", "text_config.vocab_size"]
