"""A multimodal checkpoint becomes its text model's own."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from collapse.options import Options
from collapse.passes.text_only import TextOnly
from collapse.pipeline import export
from collapse.plan import Reroot
from collapse.schema import InputSchema
from tests.architectures import save_tiny
from tests.contexts import context_of

MULTIMODAL = ("gemma3", "qwen2_5_vl", "llava", "mistral3")
SCHEMA = InputSchema(type="text", tokens=tuple(range(40)), max_tokens=24)
SMALL = Options(passes=("text-only", "unread-weights"), prompts=2, new_tokens=4)
CLASSES = {
    "gemma3": "Gemma3ForCausalLM", "qwen2_5_vl": "Qwen2ForCausalLM", "llava": "LlamaForCausalLM",
    "mistral3": "MistralForCausalLM",
}  # fmt: skip


def save_multimodal(kind, root):
    save_tiny(kind, root)
    (root / "preprocessor_config.json").write_text("{}")
    return root


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    @cache
    def make(kind):
        root = tmp_path_factory.mktemp(kind)
        source = save_multimodal(kind, root / "source")
        return source, export(source, root / "out", SCHEMA, SMALL)

    return make


def loaded(root, kind=AutoModelForCausalLM):
    model, report = kind.from_pretrained(root, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return model.eval()


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_the_output_is_the_text_models_own_checkpoint(exported, kind):
    source, result = exported(kind)
    text, whole = loaded(result.output), loaded(source, AutoModelForImageTextToText)
    assert type(text).__name__ == CLASSES[kind]
    ids = torch.randint(0, 40, (2, 20), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        found, expected = (m(input_ids=ids, attention_mask=mask, position_ids=positions).logits for m in (text, whole))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_the_erased_share_is_the_towers(exported, kind):
    source, result = exported(kind)
    whole, text = loaded(source, AutoModelForImageTextToText), loaded(result.output)
    towers = sum(p.numel() for name, p in whole.named_parameters() if not name.startswith(("model.language", "lm_")))
    (reroot,) = result.plan.of_kind(Reroot)
    assert reroot.evidence.figures["parameters"] == towers > 0
    assert reroot.evidence.grade == "proved"
    assert not [s for s in result.plan.skipped if s.site in reroot.tensors]
    assert sum(p.numel() for p in text.parameters()) == sum(p.numel() for p in whole.parameters()) - towers


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_the_config_is_the_text_models_and_nothing_of_images_is_left(exported, kind):
    source, result = exported(kind)
    config = json.loads((result.output / "config.json").read_text())
    assert config["architectures"] == [CLASSES[kind]]
    assert not {"vision_config", "text_config"} & config.keys()
    assert "mrope_section" not in json.dumps(config)
    assert (AutoConfig.from_pretrained(result.output).eos_token_id, config["vocab_size"]) == (1, 53)
    assert not (result.output / "preprocessor_config.json").exists()
    assert (source / "preprocessor_config.json").exists()


def test_a_text_model_is_left_alone(tmp_path):
    proposal = TextOnly().propose(context_of(save_tiny("llama", tmp_path)))
    assert proposal.rewrites == ()
    assert [s.reason for s in proposal.skipped] == ["the model is a text model"]


def test_two_tensors_that_would_get_one_name_leave_the_model_as_it_is(tmp_path):
    file = save_tiny("llava", tmp_path) / "model.safetensors"
    held = load_file(file)
    name = next(name for name in held if name.endswith("lm_head.weight"))
    twin = "lm_head.weight" if name != "lm_head.weight" else "language_model.lm_head.weight"
    save_file(held | {twin: held[name] + 1}, file, {"format": "pt"})
    proposal = TextOnly().propose(context_of(tmp_path, SCHEMA))
    assert proposal.rewrites == ()
    assert "its files cannot be named so" in proposal.skipped[0].reason
