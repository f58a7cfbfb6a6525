"""Fusing: skipping while the context is regular, running otherwise, and never skipping without evidence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from collapse.errors import PlanError
from collapse.models import AdaptiveLlamaConfig, AdaptiveLlamaForCausalLM
from collapse.models.position_bias import EntropySettings
from collapse.runtime.fuse import SiteCounts, fuse

SETTINGS = EntropySettings(window=64, recall=4, prior=8)
SITE = "model.layers.{}.self_attn.position_adaptive_bias"
THRESHOLD = 3.2


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model() -> AdaptiveLlamaForCausalLM:
    torch.manual_seed(1)
    built = AdaptiveLlamaForCausalLM(
        AdaptiveLlamaConfig(
            vocab_size=90,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            entropy_recall=4,
            entropy_prior=8,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    ).eval()
    for layer in built.model.layers:
        layer.self_attn.position_adaptive_bias.threshold.data.fill_(THRESHOLD)
    return built


def sites(threshold: float = THRESHOLD) -> dict[str, float]:
    return {SITE.format(layer): threshold for layer in range(2)}


REGULAR = torch.full((1, 30), 5)
IRREGULAR = torch.arange(30)[None]


def test_regular_context_is_skipped_and_exact(model: Any) -> None:
    expected = model(REGULAR).logits
    with fuse(model, sites(), settings=SETTINGS) as handle:
        assert torch.equal(model(REGULAR).logits, expected)
    assert handle.counts == {path: SiteCounts(skipped=1, ran=0) for path in sites()}


def test_irregular_context_runs(model: Any) -> None:
    expected = model(IRREGULAR).logits
    with fuse(model, sites(), settings=SETTINGS) as handle:
        assert torch.equal(model(IRREGULAR).logits, expected)
    assert handle.counts == {path: SiteCounts(skipped=0, ran=1) for path in sites()}


def test_planted_violation_a_threshold_set_too_high_changes_the_logits(model: Any) -> None:
    expected = model(IRREGULAR).logits
    with fuse(model, sites(99.0), settings=SETTINGS):
        assert not torch.allclose(model(IRREGULAR).logits, expected)


def test_one_irregular_row_makes_the_batch_run(model: Any) -> None:
    with fuse(model, sites(), settings=SETTINGS) as handle:
        model(torch.cat((REGULAR, IRREGULAR)))
    assert handle.counts[SITE.format(0)] == SiteCounts(skipped=0, ran=1)


@pytest.mark.parametrize("start", [REGULAR, torch.cat((IRREGULAR, REGULAR), 1)])
def test_generation_is_unchanged(model: Any, start: torch.Tensor) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(start, **options)
    with fuse(model, sites(), settings=SETTINGS) as handle:
        assert torch.equal(model.generate(start, **options), expected)
    count = handle.counts[SITE.format(1)]
    assert count.skipped + count.ran == 8


def test_decoding_after_an_irregular_prompt_remembers_it(model: Any) -> None:
    with fuse(model, sites(), settings=SETTINGS) as handle:
        cache = model(IRREGULAR, use_cache=True).cache
        model(REGULAR[:, :1], cache=cache)
    assert handle.counts[SITE.format(0)] == SiteCounts(skipped=0, ran=2)


def test_a_cache_filled_elsewhere_is_never_skipped(model: Any) -> None:
    cache = model(REGULAR, use_cache=True).cache
    with fuse(model, sites(), settings=SETTINGS) as handle:
        model(REGULAR[:, :1], cache=cache)
    assert handle.counts[SITE.format(0)] == SiteCounts(skipped=0, ran=1)


def test_padding_is_not_text(model: Any) -> None:
    padded = torch.cat((IRREGULAR, REGULAR), 1)
    mask = torch.ones_like(padded)
    mask[:, :30] = 0
    with fuse(model, sites(), settings=SETTINGS) as handle:
        model(padded, attention_mask=mask)
    assert handle.counts[SITE.format(0)] == SiteCounts(skipped=1, ran=0)


def test_training_is_never_skipped(model: Any) -> None:
    with fuse(model, sites(), settings=SETTINGS) as handle, torch.enable_grad():
        model(REGULAR)
    assert handle.counts[SITE.format(0)] == SiteCounts(skipped=0, ran=1)


def test_removing_gives_the_model_back(model: Any) -> None:
    bias = model.get_submodule(SITE.format(0))
    handle = fuse(model, sites(99.0), settings=SETTINGS)
    assert "forward" in bias.__dict__
    handle.remove()
    handle.remove()
    assert "forward" not in bias.__dict__
    assert not model._forward_pre_hooks and not model._forward_hooks
    model(REGULAR)
    assert handle.counts[SITE.format(0)] == SiteCounts(skipped=0, ran=0)


class Pipeline(nn.Module):
    """Any module that returns one tensor can be fused; `forward` counts how often it was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.widen = nn.Embedding(40, 4), nn.Linear(4, 6)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.widen(self.embed(input_ids)) + 1


class Pair(nn.Module):
    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return input_ids, input_ids


def test_any_module_gets_a_zero_of_its_own_shape_without_computing() -> None:
    pipeline = Pipeline().half()
    computed: list[torch.Size] = []
    pipeline.widen.register_forward_hook(lambda _, __, output: computed.append(output.shape))
    with fuse(pipeline, {"widen": 9.0}, settings=SETTINGS) as handle:
        output = pipeline(REGULAR)
    assert output.dtype == torch.float16
    assert torch.equal(output, torch.ones(1, 30, 6, dtype=torch.float16))
    assert handle.counts["widen"] == SiteCounts(skipped=1, ran=0)


def test_a_module_of_two_outputs_is_refused() -> None:
    holder = nn.Sequential(Pair())
    with fuse(holder, {"0": 9.0}, settings=SETTINGS), pytest.raises(PlanError, match="not one tensor"):
        holder(REGULAR)


def test_a_module_that_writes_the_cache_is_refused(model: Any) -> None:
    with (
        fuse(model, {"model.layers.0.self_attn": 99.0}, settings=SETTINGS),
        pytest.raises(PlanError, match="KV cache"),
    ):
        model(REGULAR, use_cache=True)


@pytest.mark.parametrize("wrong", [{"model.layers.9": 1.0}, {"": 1.0}, {SITE.format(0): float("nan")}])
def test_wrong_sites_are_refused_before_anything_changes(model: Any, wrong: dict[str, float]) -> None:
    with pytest.raises(PlanError):
        fuse(model, wrong, settings=SETTINGS)
    assert not model._forward_pre_hooks
