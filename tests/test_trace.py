"""One program for prefill, chunked prefill and decode: bit-equal to eager transformers."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from collapse.analysis.reachability import reachability
from collapse.checkpoint import Checkpoint
from collapse.errors import UnsupportedError
from collapse.program import Program, size_of
from collapse.trace import cache_argument, load_config, trace
from tests.architectures import save_tiny, tiny_config, tiny_model, weights_of

KINDS = ("llama", "gpt2", "opt", "gemma3_text")
SLIDING = ("gemma3_text",)  # eager crops the cache to the window, the program masks it: sums of other lengths


@cache
def program_of(kind: str) -> Program:
    return trace(tiny_config(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_and_decode_are_bit_equal_to_eager(kind):
    model, program = tiny_model(kind), program_of(kind)
    weights = weights_of(model)
    ids = torch.randint(3, 48, (3, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask).logits
        first = model(input_ids=ids[:, :9], attention_mask=mask[:, :9], use_cache=True)
        held = getattr(first, cache_argument(model) or "", None) or first.past_key_values
        rest = model(input_ids=ids[:, 9:], attention_mask=mask, **{cache_argument(model): held}).logits
    assert torch.equal(program.run(weights, ids, mask)[0], whole)
    logits, grown = program.run(weights, ids[:, :9], mask[:, :9])
    assert torch.equal(logits, first.logits)
    decoded = program.run(weights, ids[:, 9:], mask, grown)[0]
    if kind in SLIDING:
        torch.testing.assert_close(decoded, rest, rtol=1.3e-6, atol=1e-5)
    else:
        assert torch.equal(decoded, rest)


@pytest.mark.parametrize("kind", KINDS)
def test_left_padding_is_bit_equal_to_eager_with_the_positions_of_generate(kind):
    model, program = tiny_model(kind), program_of(kind)
    ids = torch.randint(3, 48, (2, 7), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    found = program.run(weights_of(model), ids, mask)[0]
    assert torch.equal(found[mask.bool()], expected[mask.bool()])


def test_symbols_evaluate_to_the_sizes_of_a_call():
    program = program_of("llama")
    bound = program.bindings(batch=5, new=7, past=11)
    logits = next(iter(reversed(program.graph.graph.nodes))).args[0][0]
    assert [size_of(size, bound) for size in logits.meta["val"].shape] == [5, 7, 48]
    assert program.cache[0].shape == ("batch", 2, "past", 4)


def test_tied_names_form_a_group_and_untied_ones_do_not():
    assert program_of("llama").tied == (("lm_head.weight", "model.embed_tokens.weight"),)
    assert trace(tiny_config("llama", tie_word_embeddings=False), dynamic=False).tied == ()


def test_a_static_program_without_past_equals_eager():
    model = tiny_model("llama")
    program = trace(model.config, dynamic=False, batch=1, new=6, past=0)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert torch.equal(program.run(weights_of(model), ids, torch.ones_like(ids))[0], expected)


def test_an_encoder_is_refused_by_name(tmp_path):
    from transformers import T5Config

    T5Config(d_model=8, num_layers=1, num_heads=1, d_ff=8, vocab_size=16).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(UnsupportedError, match="t5"):
        trace(load_config(Checkpoint.open(tmp_path)))


def test_names_of_a_base_model_file_are_found(tmp_path):
    program = program_of("gpt2")
    assert program.model_name("wte.weight") == "transformer.wte.weight"
    assert program.model_name("nonsense.weight") is None
    assert program.naming.resolve("wte.weight") == ("transformer.wte.weight", False)
    assert Checkpoint.open(save_tiny("gpt2", tmp_path)).model_type == "gpt2"


def test_the_files_names_of_experts_lead_to_the_tensor_that_they_are_merged_into():
    naming = program_of("mixtral").naming
    fused = "model.layers.1.mlp.experts.gate_up_proj"
    assert naming.resolve("model.layers.1.block_sparse_moe.experts.3.w1.weight") == (fused, True)
    assert naming.resolve("model.layers.1.block_sparse_moe.gate.weight") == ("model.layers.1.mlp.gate.weight", False)
    assert naming.resolve("model.layers.2.block_sparse_moe.gate.weight") == (None, False)


def test_a_multimodal_model_is_traced_as_its_text_model():
    from transformers import LlavaConfig

    text = tiny_config("llama").to_dict()
    vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 8, "patch_size": 4}  # fmt: skip
    program = trace(LlavaConfig(text_config=text, vision_config=vision, image_token_index=47))
    assert program.naming.resolve("language_model.lm_head.weight") == ("lm_head.weight", False)
    assert not reachability(program).read & {name for name in program.shapes if "language_model" not in name} - {
        "lm_head.weight"
    }
