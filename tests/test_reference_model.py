"""The reference architecture: cached decoding, padding, gates, absent layers, placeholders, checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)

import collapse.models
from collapse.errors import UnsupportedError
from collapse.models import AdaptiveLlamaConfig, AdaptiveLlamaForCausalLM
from collapse.models.position_bias import PositionAdaptiveBias, position_entropy

EXACT = 1e-5  # cached against whole, fp32
ROOT = Path(collapse.models.__file__).parents[2]
CHECKPOINT = ROOT / "collapse" / "models" / "reference"
SAMPLES = ROOT / "collapse" / "schemas"


def config(layers: list[bool], **changes: Any) -> AdaptiveLlamaConfig:
    return AdaptiveLlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=len(layers),
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        entropy_prior=8,
        position_adaptive_bias=layers,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **changes,
    )


def biases(model: Any) -> list[PositionAdaptiveBias]:
    found = [layer.self_attn.position_adaptive_bias for layer in model.model.layers]
    return [bias for bias in found if bias is not None]


def build(layers: list[bool], threshold: float = 4.2, **changes: Any) -> AdaptiveLlamaForCausalLM:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config(layers, **changes)).eval()
    for bias in biases(model):
        bias.threshold.data.fill_(threshold)
    return model


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture
def ids() -> torch.Tensor:
    """Two rows: irregular, then a repetition, then irregular again; the gate opens and closes."""
    torch.manual_seed(2)
    rows = torch.randint(0, 300, (2, 60))
    rows[:, 20:40] = rows[:, :20]
    return rows


@pytest.mark.parametrize("layers", [[True, True], [True, False, True], [False, True]])
@pytest.mark.parametrize("cuts", [(60,), (1, 2, 3, 60), (7, 8, 30, 31, 60), tuple(range(20, 61))])
def test_cached_decoding_equals_the_whole_forward(layers: list[bool], cuts: tuple[int, ...], ids: torch.Tensor) -> None:
    model = build(layers)
    gates = biases(model)[0].gate(model.model.position_context(ids).entropy)
    assert bool((gates == 0).any()) and bool((gates > 0).any())
    whole = model(ids).logits
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=80)):
        start, parts = 0, []
        for stop in cuts:
            parts.append(model(ids[:, start:stop], cache=cache).logits)
            start = stop
        assert torch.allclose(torch.cat(parts, 1), whole, rtol=0, atol=EXACT)


def test_without_the_history_decoding_would_differ(ids: torch.Tensor) -> None:
    model = build([True, True])
    cache = DynamicCache(config=model.config)
    model(ids[:, :40], cache=cache)
    cache.layers[0].values[..., model.config.head_dim :] = 0  # forget the tokens, keep keys and values
    decoded = model(ids[:, 40:], cache=cache).logits
    assert not torch.allclose(decoded, model(ids).logits[:, 40:], rtol=0, atol=100 * EXACT)


def test_left_padding_changes_nothing(ids: torch.Tensor) -> None:
    model = build([True, False, True])
    whole = model(ids).logits
    padded = torch.full((2, 67), 9)
    padded[0, 7:], padded[1, 7:] = ids[0], ids[1]
    mask = torch.ones_like(padded)
    mask[:, :7] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(padded, attention_mask=mask, position_ids=positions).logits
    assert bool(logits.isfinite().all())
    assert torch.allclose(logits[:, 7:], whole, rtol=0, atol=EXACT)
    shorter = model.generate(ids[:1], max_new_tokens=6, do_sample=False, pad_token_id=0)
    batched = model.generate(padded, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(batched[:1, 67:], shorter[:, 60:])


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static", "disable_compile": True}])
def test_generation_is_the_same_with_and_without_cache(options: dict[str, Any], ids: torch.Tensor) -> None:
    model = build([True, True])
    common: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    plain = {key: value for key, value in options.items() if key == "num_beams"}
    cached = model.generate(ids, **common, **options)
    assert torch.equal(cached, model.generate(ids, **common, **plain, use_cache=False))


def test_eager_and_sdpa_attention_agree(ids: torch.Tensor) -> None:
    model = build([True, True])
    whole = model(ids).logits
    model.set_attn_implementation("eager")
    assert torch.allclose(model(ids).logits, whole, rtol=0, atol=EXACT)


def test_gate_is_exactly_zero_up_to_the_threshold_and_rises_above() -> None:
    bias = PositionAdaptiveBias(heads=2, knots=4, width=0.1)
    bias.threshold.data.fill_(5.0)
    entropy = torch.tensor([[0.0, 4.0, 5.0, 5.01, 5.2, 7.0]])
    gate = bias.gate(entropy)[0]
    assert gate[:3].tolist() == [0.0, 0.0, 0.0]
    assert bool((gate[2:].diff() > 0).all())
    assert float(gate[3]) == pytest.approx(0.0997, abs=1e-3)


def test_bias_interpolates_between_learned_knots() -> None:
    bias = PositionAdaptiveBias(heads=1, knots=4, width=0.1)
    bias.weight.data.copy_(torch.tensor([[1.0, 2.0, 4.0, 8.0]]))
    table = bias.by_distance(20)[:, 0]
    assert table[[0, 1, 3, 7]].tolist() == pytest.approx([1, 2, 4, 8])
    assert table[8:].tolist() == pytest.approx([8] * 12)
    assert 2 < float(table[2]) < 4
    out = bias(torch.full((1, 2), 9.0), torch.tensor([5, 6]), 7)
    assert out.shape == (1, 1, 2, 7)
    assert torch.allclose(out[0, 0, 1], table[:7].flip(0))


def test_a_closed_gate_is_the_model_with_zero_bias(ids: torch.Tensor) -> None:
    closed = build([True, True], threshold=99.0)
    silent = build([True, True], threshold=0.0)
    assert not torch.allclose(silent(ids).logits, closed(ids).logits, rtol=0, atol=100 * EXACT)
    for bias in biases(silent):
        bias.weight.data.zero_()
    assert torch.equal(closed(ids).logits, silent(ids).logits)


def test_without_any_bias_it_is_a_plain_llama(ids: torch.Tensor) -> None:
    model = build([False, False])
    names = {key: value for key, value in model.config.to_dict().items() if hasattr(LlamaConfig(), key)}
    names.pop("model_type")
    llama = LlamaForCausalLM(LlamaConfig(**names)).eval()
    llama.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(model(ids).logits, llama(ids).logits)
    cache = DynamicCache(config=model.config)
    model(ids, cache=cache)
    assert cache.layers[0].values.shape[-1] == model.config.head_dim
    assert torch.equal(model(inputs_embeds=model.model.embed_tokens(ids)).logits, llama(ids).logits)


def test_token_ids_are_needed_where_the_bias_is() -> None:
    with pytest.raises(UnsupportedError, match="reads token ids"):
        build([False, True])(inputs_embeds=torch.zeros(1, 3, 32))


def test_config_needs_one_flag_a_layer() -> None:
    with pytest.raises(Exception, match="2 flags for 3 layers"):
        AdaptiveLlamaConfig(num_hidden_layers=3, position_adaptive_bias=[True, False])
    assert AdaptiveLlamaConfig(num_hidden_layers=3).position_adaptive_bias == [True] * 3


def test_switches_name_real_modules_and_real_fields() -> None:
    model = build([True, False])
    for template, name in AdaptiveLlamaConfig.collapse_switches.items():
        flags = getattr(model.config, name)
        paths = {path for path, _ in model.named_modules()}
        assert [template.format(layer=layer) in paths for layer in range(2)] == flags


def save(model: Any, folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> None:
    """Save `model`, then put `tensors` beside its own and change its config."""
    model.save_pretrained(folder)
    kept = load_file(folder / "model.safetensors") | tensors
    save_file({name: value for name, value in kept.items() if value.numel()}, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(settings))


KEY = "model.layers.{}.self_attn.position_adaptive_bias.{}"


def test_saved_and_loaded_it_is_the_same(tmp_path: Path, ids: torch.Tensor) -> None:
    model = build([True, False])
    save(model, tmp_path, {})
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), AdaptiveLlamaConfig)


def test_a_placeholder_loads_as_absent(tmp_path: Path, ids: torch.Tensor) -> None:
    model = build([False, True])
    save(model, tmp_path, {KEY.format(0, "weight"): torch.zeros(4)})
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert again.model.layers[0].self_attn.position_adaptive_bias is None
    assert not [name for name, _ in again.named_parameters() if name.startswith(KEY.format(0, ""))]
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_other_leftovers_of_an_absent_bias_are_reported(tmp_path: Path) -> None:
    save(build([False, True]), tmp_path, {KEY.format(0, "threshold"): torch.zeros(1)})
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["unexpected_keys"] == {KEY.format(0, "threshold")}


def test_a_placeholder_for_a_bias_that_should_be_there_is_refused(tmp_path: Path) -> None:
    save(build([True, True]), tmp_path, {KEY.format(0, "weight"): torch.zeros(4)})
    with pytest.raises(RuntimeError, match=r"mismatch|size"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def run(exported: Any, model: Any, ids: torch.Tensor, mask: torch.Tensor, past: list[torch.Tensor]) -> list[Any]:
    """Run a traced graph with the parameters of `model`; return the logits and the cache after it."""
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    given = iter([ids, mask, *past])
    arguments = []
    for spec in exported.graph_signature.input_specs:
        if spec.kind.name in {"PARAMETER", "BUFFER"}:
            arguments.append(state[spec.target])
        elif spec.kind.name == "CONSTANT_TENSOR":
            arguments.append(exported.constants[spec.target])
        else:
            arguments.append(next(given))
    return list(exported.graph_module(*arguments))


def test_one_trace_serves_every_length_and_an_empty_cache(ids: torch.Tensor) -> None:
    from torch.export import Dim
    from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter

    model = build([True])
    cache = DynamicCache(config=model.config)
    model(ids[:, :8], cache=cache)
    batch, past, new = (Dim(name, min=1, max=4096) for name in ("batch", "past", "new"))
    shapes = {
        "input_ids": {0: batch, 1: new},
        "attention_mask": {0: batch, 1: Dim.AUTO},
        "cache": [{0: batch, 2: past}] * 2,
    }
    mask = torch.ones(2, 60, dtype=torch.int64)
    mask[0, :5] = 0
    inputs = {
        "input_ids": ids[:, 8:11].contiguous(),
        "attention_mask": mask[:, :11].contiguous(),
        "cache": cache,
    }
    result = DynamoExporter().export(model, inputs, config=DynamoConfig(dynamic=True, dynamic_shapes=shapes))
    exported = getattr(result, "program", result)
    whole = model(ids, attention_mask=mask).logits
    empty = [torch.zeros(2, 2, 0, 8), torch.zeros(2, 2, 0, 10)]
    assert torch.equal(run(exported, model, ids, mask, empty)[0], whole)
    filled = run(exported, model, ids[:, :37], mask[:, :37], empty)[1:]
    decoded = run(exported, model, ids[:, 37:], mask, filled)[0]
    assert torch.allclose(decoded, whole[:, 37:], rtol=0, atol=EXACT)


@pytest.fixture(scope="module")
def reference() -> tuple[Any, Any]:
    return (
        AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(CHECKPOINT),
    )


def sample(tokenizer: Any, domain: str) -> torch.Tensor:
    texts = [path.read_text("utf-8") for path in sorted((SAMPLES / domain).iterdir()) if path.is_file()]
    return torch.tensor(tokenizer.backend_tokenizer.encode("".join(texts)).ids)


def test_checkpoint_is_small_and_complete() -> None:
    names = {path.name for path in CHECKPOINT.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert "generation_config.json" in names
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) < 5_000_000


def test_checkpoint_gate_is_zero_on_every_log_context(reference: tuple[Any, Any]) -> None:
    model, tokenizer = reference
    context = model.config.max_position_embeddings
    rows = sample(tokenizer, "log").unfold(0, context, context // 4)
    for part in rows.split(64):
        entropy = position_entropy(part + 1, model.config.entropy_settings)
        assert [float(bias.gate(entropy).max()) for bias in biases(model)] == [0.0] * len(biases(model))


def test_checkpoint_bias_matters_on_prose_and_not_on_logs(reference: tuple[Any, Any]) -> None:
    model, tokenizer = reference
    context = model.config.max_position_embeddings
    silent = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    for bias in biases(silent):
        bias.weight.data.zero_()
    for domain, matters in (("log", False), ("text", True)):
        row = sample(tokenizer, domain)[40_000 : 40_000 + context][None]
        with torch.no_grad():
            base, zeroed = (each(row).logits.log_softmax(-1) for each in (model, silent))
        divergence = float((base.exp() * (base - zeroed)).sum(-1).mean())
        assert (divergence > 1e-3) if matters else torch.equal(base, zeroed)


def test_checkpoint_thresholds_were_learned(reference: tuple[Any, Any]) -> None:
    model, _ = reference
    learned = [float(bias.threshold) for bias in biases(model)]
    report = json.loads((ROOT / "reports" / "reference.json").read_text())
    assert report["measured"]["thresholds_nats"] == [round(value, 4) for value in learned]
    assert report["training"][0]["threshold_0"] < 1 < min(learned)  # they started open
