from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from collapse.analysis.config_cost import config_only, cost_of_config, counted_by_torch, element_size
from collapse.analysis.flop_rules import RULES, kind_of
from collapse.analysis.flops import Cost, cost, matrix_work
from collapse.analysis.second_opinion import second_opinion
from collapse.analysis.sizes import Call, size_reader
from collapse.errors import CheckpointError, UnsupportedError
from collapse.plan import Axis, Evidence, IndexSet, Narrow, Plan, ShortCircuit
from collapse.program import Program
from collapse.rewrite.graph import rewrite_program
from collapse.trace import meta_model, trace

PROMPT = 21
SIZES: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 80, "vocab_size": 96, "max_position_embeddings": 256, "head_dim": 10,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def llama(**changes: Any) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**{**SIZES, "tie_word_embeddings": True, "dtype": "float16", **changes})


def pairs(queries: int, past: int) -> int:
    return queries * past + queries * (queries + 1) // 2


@pytest.fixture(scope="module")
def program() -> Program:
    return trace(llama(), dynamic=False, batch=1, new=17, past=36)


@pytest.fixture(scope="module")
def found(program: Program) -> Cost:
    return cost(program, prompt=PROMPT, element_bytes=2)


def test_llama_equals_the_closed_form(found: Cost) -> None:
    d, h, g, s, f, v, layers = 48, 4, 2, 10, 80, 96, 2
    token, head, square = 2 * layers * (2 * d * h * s + 2 * d * g * s + 3 * d * f), 2 * d * v, 4 * layers * h * s
    assert found.prefill_flops == PROMPT * token + head + square * PROMPT * PROMPT
    assert found.prefill_flops_causal == PROMPT * token + head + square * pairs(PROMPT, 0)
    assert found.decode_flops_per_token == token + head + square * PROMPT
    assert found.kv_bytes_per_token == layers * 2 * g * s * 2
    params = layers * (2 * d * h * s + 2 * d * g * s + 3 * d * f + 2 * d) + d + v * d
    assert (found.params, found.bytes) == (params, 2 * params)
    assert found.weight_bytes_per_decode_token == 2 * params  # tied: the head reads the whole table


def test_modules_hold_their_children_and_the_head_its_one_position(found: Cost) -> None:
    attention = found.modules["model.layers.1.self_attn"]
    assert attention.prefill_flops == PROMPT * 2 * (2 * 48 * 40 + 2 * 48 * 20) + 4 * 4 * 10 * PROMPT * PROMPT
    assert attention.kv_bytes_per_token == 2 * 2 * 10 * 2
    assert found.modules["lm_head"].prefill_flops == found.modules["lm_head"].decode_flops_per_token == 2 * 48 * 96
    parts = [found.modules[path] for path in ("model", "lm_head")]
    assert sum(part.prefill_flops for part in parts) == found.prefill_flops
    assert found.modules["model.layers.0.mlp"].params == 3 * 48 * 80


def test_an_untied_table_is_read_one_row_at_a_time() -> None:
    found = cost_of_config(llama(tie_word_embeddings=False), prompt=PROMPT).cost
    assert found.bytes - found.weight_bytes_per_decode_token == 2 * (96 - 1) * 48


def test_gpt2_with_its_conv1d_equals_the_closed_form() -> None:
    config = transformers.GPT2Config(
        n_embd=48, n_layer=2, n_head=4, vocab_size=96, n_positions=128, bos_token_id=1, eos_token_id=1
    )
    found = cost_of_config(config, prompt=PROMPT).cost
    token, head, square = 2 * 2 * 12 * 48 * 48, 2 * 48 * 96, 4 * 2 * 48
    assert found.prefill_flops == PROMPT * token + head + square * PROMPT**2
    assert found.prefill_flops_causal == PROMPT * token + head + square * pairs(PROMPT, 0)
    assert found.decode_flops_per_token == token + head + square * PROMPT
    assert found.bytes - found.weight_bytes_per_decode_token == 4 * 127 * 48  # all positions but one


def test_mixtral_counts_the_experts_that_run() -> None:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2)
    found = cost_of_config(config, prompt=PROMPT).cost
    d, f, experts = 48, 80, 2
    token = 2 * 2 * (2 * d * 40 + 2 * d * 20 + d * 5 + experts * 3 * d * f)
    assert found.decode_flops_per_token == token + 2 * d * 96 + 4 * 2 * 40 * PROMPT
    assert found.prefill_flops == PROMPT * token + 2 * d * 96 + 4 * 2 * 40 * PROMPT**2
    unread = 2 * (5 - experts) * 3 * d * f + 95 * d
    assert found.bytes - found.weight_bytes_per_decode_token == 4 * unread


@pytest.mark.parametrize("kind", ["Bloom", "Falcon"])
def test_attention_of_plain_products_is_halved_like_the_fused_one(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=96
    )
    found = cost_of_config(config, prompt=PROMPT).cost
    square = found.prefill_flops - found.prefill_flops_causal
    assert square == config.num_hidden_layers * 4 * 48 * (PROMPT**2 - pairs(PROMPT, 0))


def test_eager_attention_counts_as_the_fused_one(found: Cost) -> None:
    eager = trace(llama(attn_implementation="eager"), dynamic=False, batch=1, new=17, past=36)
    names = {work.op for work in matrix_work(eager, Call(1, 17, 36))}
    assert names == {"aten.linear", "aten.matmul"}
    assert cost(eager, prompt=PROMPT, element_bytes=2).figures() == found.figures()


def test_torch_counts_the_same_where_it_sees_the_products(program: Program) -> None:
    counted = list(counted_by_torch(meta_model(llama()), PROMPT))
    ours = [sum(w.flops for w in matrix_work(program, call)) for call in (Call(1, PROMPT, 0), Call(1, 1, PROMPT - 1))]
    assert ours == counted


def test_a_cache_that_is_a_state_does_not_grow() -> None:
    config = transformers.MambaConfig(
        hidden_size=16, num_hidden_layers=1, vocab_size=96, state_size=4, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    result = cost_of_config(config, prompt=5)
    assert result.cost.kv_bytes_per_token == 0
    assert result.cost.decode_flops_per_token < result.cost.prefill_flops
    assert result.method == "one trace for each call, at its sizes"


@settings(max_examples=25, deadline=None)
@given(new=st.integers(1, 4000), past=st.integers(0, 4000))
def test_a_static_trace_scales_to_any_call(program: Program, new: int, past: int) -> None:
    total = sum(work.flops for work in matrix_work(program, Call(1, new, past)))
    per_token = 2 * 2 * (2 * 48 * 40 + 2 * 48 * 20 + 3 * 48 * 80) + 2 * 48 * 96
    assert total == new * per_token + 4 * 2 * 40 * new * (new + past)


def test_a_trace_whose_sizes_do_not_stand_out_says_nothing_about_others() -> None:
    small = trace(llama(num_hidden_layers=1), dynamic=False, batch=1, new=3, past=5)
    with pytest.raises(UnsupportedError, match="traced for"):
        size_reader(small, Call(1, 7, 0))


def _call(target: Any, *shapes: tuple[int, ...]) -> fx.Node:
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
    for node, shape in zip(inputs, shapes, strict=True):
        node.meta["val"] = torch.empty(shape, device="meta")
    return graph.call_function(target, tuple(inputs))


@pytest.mark.parametrize(
    "target",
    [
        torch.ops.aten._scaled_mm.default, torch.ops.aten.lstm.input, torch.ops.aten.gru.input,
        torch.ops.aten._flash_attention_forward.default, torch.ops.aten._native_multi_head_attention.default,
        torch.ops.aten._cdist_forward.default, torch.ops.aten.bilinear.default,
        torch.ops.aten.linalg_multi_dot.default, torch.ops.aten._fft_r2c.default, torch.ops.aten.addbmm.default,
        torch.ops.aten.chain_matmul.default, torch.ops.aten._weight_int4pack_mm.default,
        torch.ops.quantized.linear.default, torch.ops.higher_order.while_loop, torch.ops.higher_order.scan,
        torch.matmul,
    ],
    ids=lambda operator: operator.__name__ if operator is torch.matmul else str(operator),
)  # fmt: skip
def test_matrix_work_without_a_rule_is_refused_by_name(target: Any) -> None:
    with pytest.raises(UnsupportedError, match="no FLOP rule for the operator"):
        kind_of(_call(target, (2, 3)))


@pytest.mark.parametrize(
    "name", ["multiply.Tensor", "divide.Tensor", "subtract.Scalar", "concat.default", "less.Scalar"]
)
def test_second_names_of_pointwise_operators_are_cheap(name: str) -> None:
    packet, overload = name.split(".")
    target = getattr(getattr(torch.ops.aten, packet), overload)
    assert kind_of(_call(target, (2, 3))) == "cheap"


def test_an_unknown_operator_in_a_traced_model_is_refused_not_counted_as_zero() -> None:
    operator = torch.library.custom_op(
        "collapse_tests::twice", lambda x: x @ x.mT, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    operator.register_fake(lambda x: x @ x.mT)
    program = trace(llama(num_hidden_layers=1), dynamic=False, batch=1, new=17, past=36)
    graph = program.graph.graph
    first = next(node for node in graph.nodes if node.op == "call_function")
    with graph.inserting_after(first):
        graph.call_function(torch.ops.collapse_tests.twice.default, (first,))
    with pytest.raises(UnsupportedError, match=r"collapse_tests\.twice"):
        matrix_work(program, Call(1, 17, 36))


@pytest.mark.parametrize(
    ("target", "shapes", "macs"),
    [
        (torch.ops.aten.mm.default, ((3, 4), (4, 5)), 60),
        (torch.ops.aten.addmm.default, ((5,), (3, 4), (4, 5)), 60),
        (torch.ops.aten.bmm.default, ((2, 3, 4), (2, 4, 5)), 120),
        (torch.ops.aten.matmul.default, ((7, 1, 3, 4), (2, 4, 5)), 840),
        (torch.ops.aten.matmul.default, ((4,), (4,)), 4),
        (torch.ops.aten.matmul.default, ((2, 3, 4), (4,)), 24),
        (torch.ops.aten.linear.default, ((2, 3, 4), (5, 4)), 120),
        (torch.ops.aten._grouped_mm.default, ((6, 4), (3, 4, 5)), 120),
        (torch.ops.aten.scaled_dot_product_attention.default, ((1, 2, 3, 4), (1, 2, 7, 4), (1, 2, 7, 5)), 378),
    ],
)
def test_rules(target: Any, shapes: tuple[tuple[int, ...], ...], macs: int) -> None:
    node = _call(target, *shapes)
    name = f"aten.{target._opname}"
    assert RULES[name](node, lambda item: tuple(item.meta["val"].shape)) == macs


def _rewrite(kind: type[Any], **fields: Any) -> Any:
    evidence = Evidence(grade="measured", claim="c", method="m")
    return kind.model_validate({"pass": "p", "evidence": evidence, **fields})


def test_a_rewritten_program_is_counted_by_the_same_counter(program: Program, found: Cost) -> None:
    axes = (Axis(tensor="model.embed_tokens.weight", dim=0),)
    plan = Plan.model_validate(
        {
            "source": "s", "model_type": "llama", "schema": {}, "schema_digest": "d",
            "rewrites": [
                _rewrite(Narrow, site="v", axes=axes, size=96, kept=IndexSet.of(range(40)), relabels="tokens"),
                _rewrite(ShortCircuit, site="model.layers.1.mlp", by="zero", tensors=()),
            ],
        }
    )  # fmt: skip
    after = cost(rewrite_program(program, plan), prompt=PROMPT, element_bytes=2)
    layer = 2 * 3 * 48 * 80
    assert found.prefill_flops - after.prefill_flops == PROMPT * layer + 2 * 48 * (96 - 40)
    assert found.decode_flops_per_token - after.decode_flops_per_token == layer + 2 * 48 * (96 - 40)
    assert found.params - after.params == 3 * 48 * 80 + 48 + 48 * (96 - 40)  # with the norm before it
    assert "model.layers.1.mlp" not in after.modules


def test_a_dynamic_program_is_counted_by_its_symbols_rewritten_or_not() -> None:
    config = llama(num_hidden_layers=1)
    dynamic = trace(config, dynamic=True)
    before = cost(dynamic, prompt=PROMPT, element_bytes=2)
    assert before == cost_of_config(config, prompt=PROMPT).cost
    cut = _rewrite(ShortCircuit, site="model.layers.0.mlp", by="zero", tensors=())
    fields = {"source": "s", "model_type": "llama", "schema": {}, "schema_digest": "d", "rewrites": [cut]}
    after = cost(rewrite_program(dynamic, Plan.model_validate(fields)), prompt=PROMPT, element_bytes=2)
    assert before.prefill_flops - after.prefill_flops == PROMPT * 2 * 3 * 48 * 80
    assert before.decode_flops_per_token - after.decode_flops_per_token == 2 * 3 * 48 * 80


def _state(model: torch.nn.Module) -> tuple[list[str], list[tuple[int, int, bool]]]:
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()]
    return sorted(dict(model.named_buffers())) + sorted(model.state_dict()), hooks


@pytest.mark.parametrize("training", [True, False])
def test_thop_sees_the_linear_layers_and_leaves_the_model_alone(program: Program, training: bool) -> None:
    model = meta_model(llama()).train(training)
    before = _state(model)
    opinion = second_opinion(model, matrix_work(program, Call(1, PROMPT, 0)), prompt=PROMPT)
    assert _state(model) == before
    assert opinion.macs == opinion.linear_macs
    assert opinion.gaps == {"aten.scaled_dot_product_attention in LlamaAttention": 4 * 2 * 40 * PROMPT**2}
    assert opinion.coverage == 2 * opinion.macs / opinion.flops < 1


def test_config_only_needs_no_weights_and_refuses_remote_code(tmp_path: Any) -> None:
    llama().save_pretrained(tmp_path)
    assert element_size(config_only(tmp_path)) == 2
    (tmp_path / "config.json").write_text('{"model_type": "llama", "auto_map": {}}')
    with pytest.raises(UnsupportedError, match="remote code"):
        config_only(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(UnsupportedError, match="no-such-model"):
        config_only(tmp_path)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        config_only(tmp_path / "absent")


def test_counting_leaves_the_config_alone() -> None:
    config = llama(num_hidden_layers=1)
    before = config.to_dict()
    meta_model(config)
    assert config.to_dict() == before
    assert element_size(config) == 2


def test_costs_are_frozen(found: Cost) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.params = 0  # type: ignore[misc]
