"""Folding: the same bits from fewer calls, for what the schema makes constant and for nothing else."""

from __future__ import annotations

import pytest
import torch

from collapse.analysis.tabular import tabular_nodes
from collapse.analysis.uniform import equal_operand, uniform_values
from collapse.passes.constant_fold import ConstantFold, count_nodes
from collapse.plan import Specialise
from collapse.rewrite.fold import TABLE_BYTES, fold, folded_values
from collapse.rewrite.last_token import last_token
from collapse.schema import InputSchema
from tests.architectures import save_tiny, tiny_model, weights_of
from tests.contexts import context_of
from tests.graph_runs import both, prompts
from tests.small_programs import WIDTH, ids_and_mask, small_program
from tests.test_trace import program_of

KINDS = ("llama", "gpt2", "opt", "gemma3_text", "bloom", "falcon", "mpt", "mixtral")
LONGEST = 32


def folded_pair(kind, *, unpadded, max_tokens=LONGEST):
    program, weights = program_of(kind), weights_of(tiny_model(kind))
    folded = fold(program, max_tokens=max_tokens, unpadded=unpadded)
    return (program, weights), (folded.program, weights | folded_values(folded, weights, max_tokens))


@pytest.mark.parametrize(("unpadded", "padding"), [(True, 0), (False, 0), (False, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_folded_graph_gives_the_same_bits(kind, unpadded, padding):
    given, folded = folded_pair(kind, unpadded=unpadded)
    assert count_nodes(folded[0]) < count_nodes(given[0])
    for logits, caches in both(given, folded, padding=padding, cuts=(9, 12, 13)):
        assert torch.equal(*logits)
        assert all(torch.equal(left, right) for left, right in caches)


def test_both_edits_go_together():
    given, folded = folded_pair("llama", unpadded=True)
    for (whole, last), _ in both(given, (last_token(folded[0]), folded[1]), cuts=(9, 13)):
        torch.testing.assert_close(last, whole[:, -1:], rtol=1.3e-6, atol=1e-5)


def test_rotary_embeddings_and_the_causal_mask_become_tables():
    folded = fold(program_of("llama"), max_tokens=LONGEST, unpadded=True)
    values = folded_values(folded, weights_of(tiny_model("llama")), LONGEST)
    shapes = sorted((tuple(value.shape), value.dtype) for value in values.values())
    assert shapes == [((1, 1, 32, 32), torch.bool), ((32, 4), torch.float32), ((32, 4), torch.float32)]
    (mask,) = (value for value in values.values() if value.dtype == torch.bool)
    assert torch.equal(mask[0, 0], torch.ones(32, 32, dtype=torch.bool).tril())
    assert folded.table_bytes == 32 * 32 + 2 * 32 * 4 * 4
    names = {str(node.target) for node in folded.program.graph.graph.nodes}
    assert not names & {"aten.cos.default", "aten.sin.default", "aten.le.Tensor", "aten.arange.default"}


def test_a_mask_is_kept_where_requests_may_be_padded():
    folded = fold(program_of("llama"), max_tokens=LONGEST, unpadded=False)
    mask = folded.program.placeholder("attention_mask")
    assert any("sym_size" not in str(user.target) for user in mask.users)
    unpadded = fold(program_of("llama"), max_tokens=LONGEST, unpadded=True).program.placeholder("attention_mask")
    assert all("sym_size" in str(user.target) for user in unpadded.users)


def test_the_schema_is_needed_a_graph_for_unpadded_inputs_is_wrong_on_padded_ones():
    given, folded = folded_pair("llama", unpadded=True)
    (((whole, found), _),) = both(given, folded, padding=4)
    assert float((whole - found).abs().max()) > 1e-2


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_beyond_its_longest_sequence_the_graph_raises(kind):
    _, (program, weights) = folded_pair(kind, unpadded=True, max_tokens=12)
    ids, mask = prompts()
    program.run(weights, ids[:, :12], mask[:, :12])
    with pytest.raises((RuntimeError, IndexError)):
        program.run(weights, ids, mask)
    _, cache = program.run(weights, ids[:, :10], mask[:, :10])
    with pytest.raises((RuntimeError, IndexError)):
        program.run(weights, ids[:, 10:], mask, cache)


def test_without_a_bound_only_constants_are_folded():
    folded = fold(program_of("bloom"), max_tokens=None, unpadded=False)
    assert list(folded.nodes.values()) == ["unsqueeze_1"]  # the slopes of its position biases
    assert {left.reason for left in folded.left} == {
        "the schema gives no max_tokens, so a table of positions has no length"
    }


def test_a_table_that_is_too_large_is_left_with_the_reason():
    folded = fold(program_of("llama"), max_tokens=8192, unpadded=True)
    assert [left.reason for left in folded.left] == [f"its table would take {8192**2} bytes, more than {TABLE_BYTES}"]
    assert folded.table_bytes == 2 * 8192 * 4 * 4


def test_tables_of_weights_stay_weights():
    program = program_of("gpt2")
    (lookup,) = (node for node in program.graph.graph.nodes if node.name == "embedding_1")
    assert lookup not in tabular_nodes(program)


def proposal(tmp_path, kind="llama", **fields):
    schema = InputSchema(**({"type": "text", "tokens": tuple(range(48)), "max_tokens": 16} | fields))
    return ConstantFold().propose(context_of(save_tiny(kind, tmp_path), schema, program=program_of(kind)))


def test_the_pass_says_what_it_folds(tmp_path):
    found = proposal(tmp_path, padding="none")
    (rewrite,) = found.rewrites
    assert isinstance(rewrite, Specialise)
    assert (rewrite.graph, rewrite.max_tokens, rewrite.unpadded) == ("fold-constants", 16, True)
    folded = fold(program_of("llama"), max_tokens=16, unpadded=True)
    before, after = count_nodes(program_of("llama")), count_nodes(folded.program)
    assert rewrite.evidence.figures == {
        "nodes_before": before, "nodes_after": after, "nodes_folded": before - after, "tables": 3,
        "table_bytes": 16 * 16 + 2 * 16 * 4 * 4,
    }  # fmt: skip
    assert rewrite.evidence.grade == "proved"


def test_the_pass_lists_a_large_table_as_a_near_miss(tmp_path):
    found = proposal(tmp_path, max_tokens=8192, padding="none")
    assert len(found.rewrites) == 1
    assert "more than 16777216" in found.skipped[0].reason


NOT_A_FUNCTION_OF_POSITION = {
    "a size as a value": lambda x, mask: x * (torch.ones(WIDTH) * x.shape[1] + 1),
    "what reads the tokens": lambda x, mask: x * (x.argmax(1, keepdim=True) + 1),
}


@pytest.mark.parametrize("name", NOT_A_FUNCTION_OF_POSITION)
def test_what_a_call_decides_is_not_folded(name):
    program, _ = small_program(NOT_A_FUNCTION_OF_POSITION[name])
    folded = fold(program, max_tokens=LONGEST, unpadded=True)
    assert folded.nodes == {}


def test_a_running_sum_over_positions_is_not_looked_up():
    """Its rows depend on those before them in the call; taking rows does not commute with it."""
    program, weights = small_program(lambda x, mask: x + (torch.arange(x.shape[1]) * 2 + 1).cumsum(0)[:, None])
    folded = fold(program, max_tokens=LONGEST, unpadded=True)
    values = weights | folded_values(folded, weights, LONGEST)
    ids, mask = ids_and_mask()
    assert torch.equal(folded.program.run(values, ids, mask)[0], program.run(weights, ids, mask)[0])
    assert all("cumsum" not in node for node in folded.nodes.values())


UNIFORM = {
    "and": lambda x, mask: x * ((x > 0) & mask.bool()[:, :, None]),
    "or": lambda x, mask: x * ((x > 0) | ~mask.bool()[:, :, None]),
    "where": lambda x, mask: torch.where(mask.bool()[:, :, None], x, x + 1),
    "masked_fill": lambda x, mask: x.masked_fill(mask[:, :, None] == 0, -1.0),
    "mul": lambda x, mask: x * mask.to(torch.float32)[:, :, None],
}


@pytest.mark.parametrize("name", UNIFORM)
def test_a_mask_of_ones_leaves_the_other_operand(name):
    program, weights = small_program(UNIFORM[name])
    values = uniform_values(program, unpadded=True)
    assert any(equal_operand(node, values) is not None for node in program.graph.graph.nodes if node not in values)
    folded = fold(program, max_tokens=None, unpadded=True).program
    assert count_nodes(folded) < count_nodes(program)
    ids, mask = ids_and_mask()
    assert torch.equal(folded.run(weights, ids, mask)[0], program.run(weights, ids, mask)[0])


@pytest.mark.parametrize("name", UNIFORM)
def test_a_mask_that_may_have_zeros_is_applied(name):
    program, weights = small_program(UNIFORM[name])
    folded = fold(program, max_tokens=None, unpadded=False).program
    ids, mask = ids_and_mask()
    mask[0, :2] = 0
    assert torch.equal(folded.run(weights, ids, mask)[0], program.run(weights, ids, mask)[0])


def test_a_constant_that_is_written_later_is_not_uniform():
    def body(x, mask):
        ones = torch.ones(WIDTH)
        ones[0] = 3.0
        return x * ones

    program, weights = small_program(body)
    folded = fold(program, max_tokens=None, unpadded=True)
    values = weights | folded_values(folded, weights, None)
    ids, mask = ids_and_mask()
    assert torch.equal(folded.program.run(values, ids, mask)[0], program.run(weights, ids, mask)[0])
