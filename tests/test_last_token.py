"""Logits of the last position only: the same logits and caches for less work, counted exactly."""

from __future__ import annotations

import pytest
import torch

from collapse.analysis.call_sizes import LAST_ROWS
from collapse.analysis.flops import cost
from collapse.analysis.reachability import live_nodes
from collapse.passes.last_token import LastToken
from collapse.plan import Specialise
from collapse.rewrite.last_token import last_token
from collapse.schema import InputSchema
from collapse.trace import trace
from tests.architectures import save_tiny, tiny_config, tiny_model, weights_of
from tests.contexts import context_of
from tests.graph_runs import both
from tests.test_trace import program_of

KINDS = ("llama", "gpt2", "gemma3_text", "bloom", "falcon", "mpt")
OTHER_ROWS = {"rtol": 1.3e-6, "atol": 1e-5}  # a product of one row may run in another kernel
P, R = 13, LAST_ROWS


def flops(program, prompt=P):
    return cost(program, prompt=prompt, element_bytes=4).prefill_flops


def weights_read(program):
    live = live_nodes(program.graph.graph)
    return {item.target for item in program.inputs if item.placeholder in live and item.role != "input"}


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("kind", (*KINDS, "mixtral"))
def test_the_last_logits_and_the_cache_are_those_of_the_whole_graph(kind, padding):
    program, weights = program_of(kind), weights_of(tiny_model(kind))
    narrowed = last_token(program)
    assert weights_read(narrowed) == weights_read(program)
    for (whole, last), caches in both((program, weights), (narrowed, weights), padding=padding, cuts=(9, 12, 13)):
        assert last.shape == (3, 1, 48)
        torch.testing.assert_close(last, whole[:, -1:], **OTHER_ROWS)
        assert all(torch.equal(left, right) for left, right in caches)
    assert torch.equal(last, whole)  # a decode step does the same arithmetic


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text", "bloom", "mpt"])  # falcon's products round otherwise
@pytest.mark.parametrize("length", [1, 3, 4, 13])
def test_the_last_logits_are_those_that_generate_asks_for(kind, length):
    """Bit for bit where all rows are computed; of a longer prompt the last layer's kernels may differ by processor."""
    model, program = tiny_model(kind), program_of(kind)
    ids = torch.randint(3, 48, (2, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, logits_to_keep=1).logits
    found = last_token(program).run(weights_of(model), ids, mask)[0]
    if length <= LAST_ROWS:
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, **OTHER_ROWS)


def test_a_llama_saves_just_what_the_closed_form_says():
    """Queries, output projection, feed-forward and attention rows of the last layer, but for the last few positions."""
    d, h, s, f = 16, 4, 4, 24
    program = program_of("llama")
    saved = flops(program) - flops(last_token(program))
    assert saved == (P - R) * 2 * (2 * d * h * s + 3 * d * f) + 4 * h * s * (P - R) * P


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "falcon", "mpt"])
def test_fused_queries_keys_and_values_are_computed_whole(kind):
    d = 16
    program = program_of(kind)
    saved = flops(program) - flops(last_token(program))
    assert saved == (P - R) * 2 * (d * d + 2 * 4 * d * d) + 4 * d * (P - R) * P


def test_a_decode_step_costs_what_it_did():
    program = program_of("llama")
    before, after = (cost(one, prompt=P, element_bytes=4) for one in (program, last_token(program)))
    assert before.decode_flops_per_token == after.decode_flops_per_token
    assert before.params == after.params


def test_the_given_program_stays_as_it_is():
    program = program_of("falcon")
    before = str(program.graph.graph)
    last_token(program)
    assert str(program.graph.graph) == before


def test_experts_that_sort_tokens_stop_the_slice():
    program = program_of("mixtral")
    assert flops(program) == flops(last_token(program))


def proposal(tmp_path, kind, **fields):
    schema = InputSchema(type="text", tokens=tuple(range(48)), max_tokens=16, **fields)
    return LastToken().propose(context_of(save_tiny(kind, tmp_path), schema, program=program_of(kind)))


def test_the_pass_counts_what_it_saves_at_the_workload(tmp_path):
    found = proposal(tmp_path, "llama", workload={"prompt": P, "new": 3})
    (rewrite,) = found.rewrites
    assert isinstance(rewrite, Specialise)
    assert (rewrite.graph, rewrite.evidence.grade, found.skipped) == ("next-token", "proved", ())
    assert rewrite.evidence.figures["prefill_flops_saved"] == 37_440
    assert rewrite.evidence.figures["prefill_flops_before"] == flops(program_of("llama"))


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("llama", {"task": "score"}, "every position"),
        ("mixtral", {}, "mixes positions"),
        ("llama", {"workload": {"prompt": 1, "new": 3}}, "no matrix work is saved"),
    ],
)
def test_the_pass_declines(tmp_path, kind, fields, reason):
    found = proposal(tmp_path, kind, **fields)
    assert found.rewrites == ()
    assert reason in found.skipped[0].reason


def test_a_static_program_is_cut_as_well():
    program = trace(tiny_config("llama"), dynamic=False, batch=1, new=6, past=0)
    weights = weights_of(tiny_model("llama"))
    ids = torch.arange(6)[None]
    whole, last = (one.run(weights, ids, torch.ones_like(ids))[0] for one in (program, last_token(program)))
    torch.testing.assert_close(last, whole[:, -1:], **OTHER_ROWS)
