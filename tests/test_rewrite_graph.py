"""The graph interpreter against independent surgery on the eager model."""

from __future__ import annotations

import pytest
import torch

from collapse.analysis.reachability import live_nodes, reachability, remove_dead_nodes
from collapse.analysis.stand_in import StandIn, short_circuited
from collapse.analysis.tables import last_row, position_tables, token_tables
from collapse.errors import PlanError
from collapse.plan import Axis, Evidence, IndexSet, Narrow, Plan, ShortCircuit
from collapse.rewrite.graph import rewrite_program, rewrite_weights
from tests.architectures import tiny_model, weights_of
from tests.test_trace import program_of

EVIDENCE = Evidence(grade="measured", claim="a test", method="none")


def plan_of(*rewrites) -> Plan:
    return Plan(source="0", model_type="test", schema={}, schema_digest="0", rewrites=rewrites)


def cut(site: str, by: str, constant=None) -> ShortCircuit:
    return ShortCircuit(pass_name="test", site=site, evidence=EVIDENCE, by=by, constant=constant, tensors=())


def inputs(length: int = 9):
    ids = torch.randint(3, 48, (2, length), generator=torch.Generator().manual_seed(3))
    return ids, torch.ones_like(ids)


CONSTANT = tuple(i / 10 for i in range(16))
MLP = {"llama": "model.layers.1.mlp", "gpt2": "transformer.h.1.mlp"}


@pytest.mark.parametrize("kind", MLP)
@pytest.mark.parametrize(("by", "constant"), [("zero", None), ("identity", None), ("constant", CONSTANT)])
def test_a_short_circuited_graph_equals_the_hooked_model(kind, by, constant):
    model, program = tiny_model(kind), program_of(kind)
    rewritten = rewrite_program(program, plan_of(cut(MLP[kind], by, constant)))
    ids, mask = inputs()
    stand_in = StandIn(MLP[kind], by, None if constant is None else torch.tensor(constant))
    with torch.no_grad(), short_circuited(model, [stand_in]):
        expected = model(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(rewritten.run(weights_of(model), ids, mask)[0], expected)
    left = {item.target for item in rewritten.inputs}
    assert not [name for name in left if name.startswith(MLP[kind])]


def test_cutting_leaves_the_source_program_as_it_was():
    program = program_of("llama")
    before = str(program.graph.graph)
    rewrite_program(program, plan_of(cut(MLP["llama"], "zero")))
    assert str(program.graph.graph) == before


def test_a_site_that_is_not_there_is_refused():
    with pytest.raises(PlanError, match="model.layers.9.mlp"):
        rewrite_program(program_of("llama"), plan_of(cut("model.layers.9.mlp", "zero")))


ATTENTION = {
    "llama": ("model.layers.0.self_attn", "model.layers.0.self_attn.o_proj.weight"),
    "gpt2": ("transformer.h.1.attn", "transformer.h.1.attn.c_proj.weight"),
    "gemma3_text": ("model.layers.1.self_attn", "model.layers.1.self_attn.o_proj.weight"),
}


@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_is_cut_out_with_its_cache_entries(kind):
    site, gate = ATTENTION[kind]
    model, program = tiny_model(kind), program_of(kind)
    rewritten = rewrite_program(program, plan_of(cut(site, "zero")))
    ids, mask = inputs()
    with torch.no_grad():  # a module whose output weights are zero gives zero
        for name, parameter in model.named_parameters():
            if name == gate or name == gate.replace("weight", "bias"):
                parameter.zero_()
        expected = model(input_ids=ids, attention_mask=mask).logits
    found, grown = rewritten.run(weights_of(model), ids, mask)
    assert torch.equal(found, expected)
    assert len(grown) == len(rewritten.cache) == len(program.cache) - 2
    assert rewritten.outputs[-1] == f"cache.{len(grown) - 1}"
    assert not [item.target for item in rewritten.inputs if item.target.startswith(f"{site}.")]
    first, held = rewritten.run(weights_of(model), ids[:, :4], mask[:, :4])
    second, _ = rewritten.run(weights_of(model), ids[:, 4:], mask, held)
    torch.testing.assert_close(torch.cat([first, second], 1), expected, rtol=1.3e-6, atol=1e-5)


def test_without_any_attention_no_cache_is_left_and_sizes_come_from_mask_and_ids():
    program = program_of("llama")
    plan = plan_of(*(cut(f"model.layers.{layer}.self_attn", "zero") for layer in range(3)))
    rewritten = rewrite_program(program, plan)
    assert (rewritten.cache, rewritten.outputs) == ((), ("logits",))
    ids, mask = inputs()
    weights = weights_of(tiny_model("llama"))
    whole = rewritten.run(weights, ids, mask)[0]
    rest = rewritten.run(weights, ids[:, 5:], mask)[0]
    torch.testing.assert_close(rest, whole[:, 5:], rtol=1.3e-6, atol=1e-5)


def test_a_module_with_several_exits_is_refused():
    with pytest.raises(PlanError, match="gives 2 values"):
        rewrite_program(program_of("llama"), plan_of(cut("model.rotary_emb", "zero")))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_narrowed_rows_give_the_kept_logits(kind):
    model, program = tiny_model(kind), program_of(kind)
    tables = token_tables(program)
    kept = IndexSet.of([1, 2, 5, 8, 13, 21, 34])
    axes = tuple(Axis(tensor=name, dim=0) for name in tables)
    narrow = Narrow(
        pass_name="test", site="vocabulary", evidence=EVIDENCE, axes=axes, size=48, kept=kept, relabels="tokens"
    )
    plan = plan_of(narrow)
    old = torch.tensor([[1, 5, 34, 2], [21, 13, 8, 1]])
    new = torch.tensor([[0, 2, 6, 1], [5, 4, 3, 0]])
    with torch.no_grad():
        expected = model(input_ids=old).logits[..., list(kept)]
    rewritten = rewrite_program(program, plan)
    found = rewritten.run(rewrite_weights(program, weights_of(model), plan), new, torch.ones_like(new))[0]
    torch.testing.assert_close(found, expected, rtol=1.3e-6, atol=1e-5)
    for name in tables:
        assert rewritten.shapes[name] == (7, 16)


def test_token_tables_are_those_looked_up_by_ids_and_the_head():
    assert token_tables(program_of("llama")) == ("lm_head.weight",)
    assert program_of("llama").aliases("lm_head.weight") == ("lm_head.weight", "model.embed_tokens.weight")
    assert set(position_tables(program_of("gpt2"))) == {"transformer.wpe.weight"}
    assert position_tables(program_of("llama")) == {}


@pytest.mark.parametrize(("kind", "table", "offset"), [
    ("gpt2", "transformer.wpe.weight", 0), ("opt", "model.decoder.embed_positions.weight", 2),
])  # fmt: skip
def test_the_last_position_row_counts_the_offset(kind, table, offset):
    program = program_of(kind)
    assert last_row(program, position_tables(program)[table], 10) == 9 + offset


def test_every_weight_of_a_whole_model_is_read():
    assert reachability(program_of("llama")).unread == ()


def test_dead_weights_follow_a_cut_module():
    rewritten = rewrite_program(program_of("llama"), plan_of(cut(MLP["llama"], "zero")))
    unread = reachability(rewritten).unread
    gone = {f"model.layers.1.mlp.{part}_proj.weight" for part in ("up", "gate", "down")}
    assert set(unread) == gone | {"model.layers.1.post_attention_layernorm.weight"}


def exported(module, *arguments):
    """The graph, which takes the constants first, and these constants."""
    program = torch.export.export(module, arguments, strict=False)
    graph = program.graph_module.graph
    graph.set_codegen(torch.fx.graph.CodeGen())
    return torch.fx.GraphModule({}, graph), list(program.constants.values())


class MutatesInPlace(torch.nn.Module):
    def forward(self, x, buffer):
        buffer.index_copy_(0, torch.tensor([1]), x[:1])
        y = x.clone()
        y.mul_(2)
        y[0] = 7.0
        unused = x.clone()
        unused.add_(1)
        return y + 0


def test_mutation_that_is_read_or_outlives_the_call_is_kept_and_other_mutation_is_not():
    module, x, buffer = MutatesInPlace(), torch.arange(6.0).reshape(3, 2), torch.zeros(3, 2)
    graph, constants = exported(module, x.clone(), buffer.clone())
    removed = remove_dead_nodes(graph.graph)
    graph.recompile()
    given = buffer.clone()
    found = graph(*constants, x, given)
    expected_buffer = buffer.clone()
    expected = module(x, expected_buffer)
    assert torch.equal(found[0], expected)
    assert torch.equal(given, expected_buffer)
    targets = [str(node.target) for node in graph.graph.nodes]
    assert "aten.index_copy_.default" in targets
    assert "aten.fill_.Tensor" in targets
    assert removed == ("add_", "clone_1")


def test_asserts_and_detach_do_not_keep_weights_alive():
    graph = torch.fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    used = graph.call_function(torch.ops.aten.relu.default, (x,))
    detached = graph.call_function(torch.ops.aten.detach_.default, (weight,))
    graph.call_function(torch.ops.aten._assert_tensor_metadata.default, (detached,))
    graph.output((used,))
    assert live_nodes(graph) == {"x", "relu_default", "output"}
