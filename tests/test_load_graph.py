"""An export run as a graph: its logits are those of transformers, and the verifier refutes a wrong one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from collapse import load_graph
from collapse.analysis import slicing
from collapse.analysis.row_rules import Pull
from collapse.checkpoint import Checkpoint
from collapse.errors import CheckpointError, PlanError, SchemaError
from collapse.plan import Plan, Specialise
from collapse.probe import probe
from collapse.program import Program
from collapse.progress import Stopwatch
from collapse.rewrite import last_token
from collapse.rewrite.graph import rewrite_program, rewrite_weights
from collapse.rewrite.specialise import specialise
from collapse.runtime import graph as runtime
from collapse.runtime.graph import LoadedGraph, graph_of
from collapse.source_model import source_weights
from collapse.trace import load_config, trace
from collapse.verify.dynamic import Rewritten, dynamic_checks
from tests.exported import EMBEDDING, KEPT, SMALL
from tests.tiny import PROVED, export, plan_for, samples, tiny_llama, vocabulary

LONGEST = 24
EQ = {"rtol": 1e-5, "atol": 1e-4}  # products of one row run in other kernels than those of many


def edit(graph: str, **fields) -> Specialise:
    return Specialise(pass_name="test", site="graph", evidence=PROVED, graph=graph, **fields)


EDITS = (edit("next-token"), edit("fold-constants", max_tokens=LONGEST, unpadded=True))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Checkpoint:
    return tiny_llama(tmp_path_factory.mktemp("graphs") / "source")


@pytest.fixture(scope="module")
def plan(source) -> Plan:
    return plan_for(source, vocabulary(KEPT, EMBEDDING), *EDITS)


@pytest.fixture(scope="module")
def out(source, plan, tmp_path_factory) -> Path:
    return export(source, plan, tmp_path_factory.mktemp("graphs") / "out").root


@pytest.fixture(scope="module")
def loaded(out) -> LoadedGraph:
    return load_graph(out)


@pytest.fixture(scope="module")
def model(out):
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()


def prompts(batch: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(0, len(KEPT), (batch, length), generator=torch.Generator().manual_seed(4))


def test_prefill_and_decode_give_the_last_logits_of_the_model(loaded, model):
    ids = prompts()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    state = loaded.prefill(ids[:, :6])
    assert state.logits.shape == (2, 1, len(KEPT))
    torch.testing.assert_close(state.logits[:, 0], expected[:, 5], **EQ)
    for position in range(6, 9):
        state = loaded.decode(state, ids[:, position : position + 1])
        torch.testing.assert_close(state.logits[:, 0], expected[:, position], **EQ)
    assert state.mask.shape == (2, 9)


def test_generate_is_greedy_as_transformers_is(loaded, model):
    ids = prompts()
    mask = torch.ones_like(ids)  # else a prompt with the padding token would be taken for padded
    expected = model.generate(
        ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(loaded.generate(ids, 8), expected)


def test_a_plan_without_graph_edits_gives_all_logits(loaded, plan, model):
    bare = plan.model_copy(update={"rewrites": plan.rewrites[:1]})
    ids = prompts()
    whole = graph_of(
        trace(model.config), source_weights(Checkpoint.open(Path(model.name_or_path)), Stopwatch(quiet=True)), bare
    )
    with torch.no_grad():
        assert torch.equal(whole.prefill(ids).logits, model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits)


def test_the_graph_made_from_the_source_is_the_same(out, source, loaded):
    ids = prompts()
    torch.testing.assert_close(load_graph(out, source.root).prefill(ids).logits, loaded.prefill(ids).logits, **EQ)


def test_left_padding_where_the_schema_allows_it(source, plan, model):
    padded = plan.model_copy(update={"rewrites": (plan.rewrites[0], EDITS[0], edit("fold-constants", max_tokens=24))})
    graph = graph_of(
        traced(source.root),
        source_weights(source, Stopwatch(quiet=True)),
        padded.model_copy(update={"rewrites": padded.rewrites[1:]}),
    )
    ids = prompts()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    alone = graph.prefill(ids[:1, 4:]).logits
    torch.testing.assert_close(graph.prefill(ids, mask).logits[:1], alone, **EQ)


def test_wrong_inputs_get_one_clear_error(loaded):
    ids = prompts()
    for shape in ((0, 3), (2, 0), (3,)):
        with pytest.raises(SchemaError, match="the ids have the shape"):
            loaded.prefill(torch.zeros(shape, dtype=torch.long))
    right = torch.ones_like(ids)
    right[0, -2:] = 0
    with pytest.raises(SchemaError, match="zeros after a token; pad on the left"):
        loaded.prefill(ids, right)
    with pytest.raises(SchemaError, match="25 tokens break max_tokens 24"):
        loaded.prefill(prompts(length=25))
    with pytest.raises(SchemaError, match="break max_tokens 24"):
        loaded.generate(ids, 20)
    padded = torch.ones_like(ids)
    padded[0, 0] = 0
    with pytest.raises(SchemaError, match="without padding"):
        loaded.prefill(ids, padded)
    with pytest.raises(SchemaError, match="mask has the shape"):
        loaded.prefill(ids, padded[:, 1:])


def test_a_directory_that_is_no_export_is_refused(source):
    with pytest.raises(CheckpointError, match=r"collapse\.json"):
        load_graph(source.root)


def test_an_edit_that_is_asked_for_twice_is_refused(source):
    with pytest.raises(PlanError, match="next-token twice"):
        specialise(traced(source.root), plan_for(source, EDITS[0], EDITS[0]))


def test_edits_of_the_graph_are_no_erased_module(out):
    with pytest.raises(CheckpointError, match="no tensor or module matches 'graph'"):
        probe(out, "graph")


@cache
def traced(root: Path) -> Program:
    return trace(load_config(Checkpoint.open(root)))


def reference(source: Checkpoint, plan: Plan) -> Rewritten:
    program = traced(source.root)
    whole = rewrite_program(program, plan)
    weights = rewrite_weights(program, source_weights(source, Stopwatch(quiet=True)), plan)
    return Rewritten(whole, weights, specialise(whole, plan))


def checks(out: Path, source: Checkpoint, plan: Plan, given: Rewritten):
    found, example = dynamic_checks(out, source, plan, samples(KEPT, 20, 9), reference=given, settings=SMALL)
    return {check.name: check for check in found}, example


def test_the_verifier_compares_the_graph_that_load_graph_runs(out, source, plan):
    found, example = checks(out, source, plan, reference(source, plan))
    assert example is None
    assert all(check.passed for check in found.values())
    assert found["graph: next token"].figures["positions"] == 2
    assert found["graph: next token, cache"].figures["positions"] == 8
    assert "graph: next token, left padding" not in found  # the plan is for unpadded requests


def test_the_verifier_also_pads_where_requests_may_be_padded(out, source, plan):
    padded = plan.model_copy(update={"rewrites": (plan.rewrites[0], edit("fold-constants", max_tokens=LONGEST))})
    found, _ = checks(out, source, padded, reference(source, padded))
    assert found["graph: folded"].passed
    assert found["graph: folded"].figures["positions"] > 2
    assert found["graph: folded, left padding"].passed


def test_a_slice_pushed_through_keys_and_values_is_refuted(monkeypatch, out, source, plan):
    def through(node, cut, shapes):
        return Pull(dict.fromkeys(((0,), (1,), (2,)), cut))

    monkeypatch.setattr(slicing, "SEEDED", {"aten.scaled_dot_product_attention": through})
    planted = reference(source, plan)
    monkeypatch.undo()
    found, _ = checks(out, source, plan, planted)
    assert found["graph: prefill"].passed
    assert found["graph: next token"].passed is False
    assert "cannot be run" in found["graph: next token"].detail


def test_rows_of_another_position_are_refuted(monkeypatch, out, source, plan):
    def first(self, node, cut, count):
        taken = self._graph.call_function(torch.ops.aten.slice.Tensor, (node, cut.dim, 0, last_token._most(count)))
        return self._described(taken, node, cut, count)

    monkeypatch.setattr(last_token._Rewriter, "_plain", first)
    planted = reference(source, plan)
    found, example = checks(out, source, plan, planted)
    assert found["graph: next token"].passed is False
    assert example is not None and example["check"] == "graph: next token"


def test_a_table_of_other_positions_is_refuted(out, source, plan):
    given = reference(source, plan)
    assert given.specialised is not None and given.specialised.folded is not None
    folded = given.specialised.folded
    (first, second) = [name for name in folded.nodes if "to_" in folded.nodes[name]][-2:]
    swapped = {**folded.nodes, first: folded.nodes[second], second: folded.nodes[first]}
    wrong = replace(given.specialised, folded=replace(folded, nodes=swapped))
    found, _ = checks(out, source, plan, given._replace(specialised=wrong))
    assert found["graph: next token"].passed is False


def test_weights_that_the_graph_does_not_read_are_let_go(loaded):
    assert set(loaded.weights) <= {item.target for item in loaded.specialised.program.inputs}
    assert isinstance(loaded, runtime.LoadedGraph)
