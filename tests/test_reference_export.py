"""The mission's example: the bias goes under logs, at every stage as promised, and stays under prose."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import collapse.models
from collapse import Options, export, load, make_plan
from collapse.checkpoint import Checkpoint
from collapse.plan import ShortCircuit
from collapse.probe import probe
from collapse.testing import assert_erased

REFERENCE = Path(collapse.models.__file__).parent / "reference"
SITE = "*position_adaptive_bias*"
LOG = {"type": "log", "max_tokens": 192, "workload": {"prompt": 128, "new": 64}}
LAYERS, HEADS, KNOTS = 3, 3, 11
ERASED = [
    f"model.layers.{layer}.self_attn.position_adaptive_bias.{part}"
    for layer in range(LAYERS)
    for part in ("threshold", "weight")
]


def exported(tmp_path_factory, **options):
    place = tmp_path_factory.mktemp("reference") / "out"
    return export(REFERENCE, place, LOG, Options(passes=("dead-module",), **options))


@pytest.fixture(scope="module")
def erased(tmp_path_factory):
    return exported(tmp_path_factory)


def test_every_layers_bias_is_erased_as_certified(erased):
    cuts = erased.plan.of_kind(ShortCircuit)
    assert [cut.site for cut in cuts] == [f"model.layers.{n}.self_attn.position_adaptive_bias" for n in range(LAYERS)]
    assert {cut.evidence.grade for cut in cuts} == {"certified"}
    assert all(cut.evidence.figures["held_out_violations"] == 0 for cut in cuts)
    assert probe(erased.output, SITE).status == "ERASED"
    assert_erased(erased.output, SITE)


def test_neither_name_nor_bytes_are_left_in_the_file(erased):
    source = Checkpoint.open(REFERENCE)
    data = (erased.output / "model.safetensors").read_bytes()
    assert b"position_adaptive_bias" not in data
    for name in ERASED:
        if name.endswith("weight"):
            assert source.read_bytes(name) not in data
    assert set(source.tensors) - set(Checkpoint.open(erased.output).tensors) == set(ERASED)


def test_the_saved_flops_are_the_modules_closed_form(erased):
    before, after = erased.report.before, erased.report.after
    per_call = 2 * KNOTS * HEADS * LAYERS  # a learned value per head, knot and key, one multiply-add each
    assert before.prefill_flops - after.prefill_flops == per_call * 128
    assert before.decode_flops_per_token - after.decode_flops_per_token == per_call * 128
    assert before.params - after.params == LAYERS * (HEADS * KNOTS + 1)


def test_the_collapsed_model_has_no_such_module_and_says_the_same(erased):
    old = AutoModelForCausalLM.from_pretrained(REFERENCE, dtype=torch.float32)
    new, info = AutoModelForCausalLM.from_pretrained(erased.output, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not [name for name, _ in new.named_modules() if "position_adaptive_bias" in name]
    ids = torch.arange(40).remainder(7)[None] + 300  # as regular as it gets
    with torch.no_grad():
        torch.testing.assert_close(new(ids).logits, old(ids).logits, rtol=1.3e-6, atol=1e-5)


def test_prose_keeps_the_bias_and_the_report_says_why():
    schema = {"type": "text", "max_tokens": 1024, "workload": {"prompt": 896, "new": 128}}
    found = make_plan(REFERENCE, schema, Options(passes=("dead-module",)))
    assert found.plan.rewrites == ()
    assert found.report.before == found.report.after
    reasons = {s.site: s.reason for s in found.plan.skipped if s.site.endswith("position_adaptive_bias")}
    assert len(reasons) == LAYERS
    assert all("alive" in reason or "beyond tolerance" in reason for reason in reasons.values()), reasons


def test_a_placeholder_is_sixteen_zero_bytes_and_loads_as_absent(tmp_path_factory):
    found = exported(tmp_path_factory, placeholder=True)
    tensors = Checkpoint.open(found.output).tensors
    left = [tensors[name] for name in ERASED if name in tensors]
    assert left and all((info.nbytes, info.dtype) == (16, "F32") for info in left)
    assert all(Checkpoint.open(found.output).read_bytes(info.name) == bytes(16) for info in left)
    model = AutoModelForCausalLM.from_pretrained(found.output)
    assert not [name for name, _ in model.named_parameters() if "position_adaptive_bias" in name]
    assert probe(found.output, SITE).status == "ERASED"


def test_short_circuit_keeps_the_weights_in_the_file_but_no_module(tmp_path_factory):
    found = exported(tmp_path_factory, stage="short-circuit")
    assert set(ERASED) <= set(Checkpoint.open(found.output).tensors)
    model = AutoModelForCausalLM.from_pretrained(found.output)
    assert not [name for name, _ in model.named_modules() if "position_adaptive_bias" in name]
    assert probe(found.output, SITE).status == "ACTIVE"


def test_fuse_keeps_module_and_weights_and_skips_at_run_time(tmp_path_factory):
    found = exported(tmp_path_factory, stage="fuse")
    cuts = found.plan.of_kind(ShortCircuit)
    assert all(cut.threshold == cut.evidence.figures["threshold_fitted_nats"] for cut in cuts)
    model = load(found.output, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(REFERENCE, dtype=torch.float32)
    ids = torch.arange(48).remainder(6)[None] + 300
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    counts = model.collapse_fused.counts
    assert {site: (count.skipped, count.ran) for site, count in counts.items()} == {c.site: (1, 0) for c in cuts}
    assert found.report.before == found.report.after
