"""B04: layers that reuse an earlier layer's keys and values, whose own projections released files still carry."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from collapse.options import Options
from collapse.pipeline import export
from collapse.plan import Erase
from collapse.schema import InputSchema
from tests.architectures import save_tiny, tiny_config

SCHEMA = InputSchema(type="text", tokens=tuple(range(2, 40)), max_tokens=24)
SMALL = Options(passes=("unread-weights",), prompts=2, new_tokens=4)
KINDS = ("gemma3n_text", "gemma4_text")
PARTS = ("k_norm", "k_proj", "v_proj")


def add_released(root, kind):
    """Give the shared layers the tensors that the layers which they share with have, as the released files do."""
    path = root / "model.safetensors"
    tensors = load_file(path)
    shared = tiny_config(kind).num_kv_shared_layers
    layers = tiny_config(kind).num_hidden_layers
    added = {
        name.replace(".layers.0.", f".layers.{layer}."): tensor + 1
        for layer in range(layers - shared, layers)
        for name, tensor in tensors.items()
        if ".layers.0.self_attn" in name and any(part in name for part in PARTS)
    }
    save_file({**tensors, **added}, path, metadata={"format": "pt"})
    return added


@pytest.mark.parametrize("kind", KINDS)
def test_b04_projections_of_layers_that_share_keys_go_and_the_report_says_who_asks_for_them(tmp_path, kind):
    source = save_tiny(kind, tmp_path / "source")
    added = add_released(source, kind)
    result = export(source, tmp_path / "out", SCHEMA, SMALL)
    erased = {name for erase in result.plan.of_kind(Erase) for name in erase.tensors}
    assert erased == set(added)
    assert len(added) == 6
    assert all("vLLM" in erase.evidence.claim for erase in result.plan.of_kind(Erase))
    before, after = (load_file(root / "model.safetensors") for root in (source, result.output))
    assert before.keys() - after.keys() == set(added)
    models = [
        AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32).eval() for root in (source, result.output)
    ]
    ids = torch.randint(2, 40, (2, 20), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        assert torch.equal(*(model(input_ids=ids).logits for model in models))


@pytest.mark.parametrize("kind", KINDS)
def test_b04_projections_of_layers_that_others_share_stay(tmp_path, kind):
    source = save_tiny(kind, tmp_path / "source")
    result = export(source, tmp_path / "out", SCHEMA, SMALL)
    assert result.plan.rewrites == ()
    assert load_file(source / "model.safetensors").keys() == load_file(result.output / "model.safetensors").keys()
