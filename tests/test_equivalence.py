"""The prover: what it must take for equal, and above all what it must not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import fx

from collapse.analysis.config_values import config_values
from collapse.analysis.equivalence import Different, Equal, equal_under
from collapse.program import Program
from collapse.trace import trace
from tests.architectures import tiny_config, tiny_model, weights_of

aten = torch.ops.aten
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = 4  # of the tiny models; LongRoPE's original length is the same


@cache
def _traced(kind: str, changes: str) -> tuple[Program, dict[str, torch.Tensor]]:
    config = tiny_config(kind, **eval(changes))
    return trace(config), config_values(config)


def traced(kind: str, **changes) -> tuple[Program, dict[str, torch.Tensor]]:
    return _traced(kind, repr(changes))


def compared(kind: str, left: dict, right: dict, max_tokens: int | None = WINDOW, **options) -> Equal | Different:
    (one, values), (other, others) = traced(kind, **left), traced(kind, **right)
    return equal_under(one, other, max_tokens=max_tokens, values=(values, others), **options)


def itself(program: Program, other: Program, kind: str = "mistral", **options) -> Equal | Different:
    """Compare two versions of the graph of one config."""
    values = traced(kind)[1]
    return equal_under(program, other, max_tokens=WINDOW, values=(values, values), **options)


def every_call(kind: str, program: Program, longest: int) -> list[torch.Tensor]:
    """Run every (new, past) up to `longest` tokens, padded and not; return logits and caches that grow."""
    weights = weights_of(tiny_model(kind))
    found = []
    for total in range(1, longest + 1):
        ids = torch.randint(0, 48, (2, total), generator=torch.Generator().manual_seed(total))
        for past, padding in ((past, padding) for past in range(total) for padding in {0, total // 2}):
            mask = torch.ones_like(ids)
            mask[0, :padding] = 0
            held = program.run(weights, ids[:, :past], mask[:, :past])[1] if past else None
            logits, grown = program.run(weights, ids[:, past:], mask, held)
            found += [logits, *(leaf for leaf in grown if leaf.dim() == 4)]
    return found


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(left, right, strict=True))


def edited(program: Program, name: str, edit: Callable[[fx.Node], None]) -> Program:
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph.graph, val_map={}))
    edit(next(node for node in graph.nodes if node.name == name))
    return program.with_graph(fx.GraphModule(program.graph, graph))


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 100, None])
def test_a_window_is_full_attention_up_to_its_own_length_and_no_further(max_tokens):
    outcome = compared("mistral", {}, {"sliding_window": None}, max_tokens)
    assert isinstance(outcome, Equal) == (max_tokens is not None and max_tokens <= WINDOW)


@pytest.mark.parametrize(("longest", "agree"), [(WINDOW - 1, True), (WINDOW, True), (WINDOW + 1, False)])
def test_the_graphs_of_window_and_full_attention_do_agree_in_just_these_calls(longest, agree):
    windowed, full = traced("mistral")[0], traced("mistral", sliding_window=None)[0]
    assert same(every_call("mistral", windowed, longest), every_call("mistral", full, longest)) == agree


def test_two_windows_are_the_same_where_neither_is_reached():
    assert compared("mistral", {}, {"sliding_window": 6}) == Equal()
    assert isinstance(compared("mistral", {}, {"sliding_window": 6}, WINDOW + 1), Different)


@pytest.mark.parametrize("max_tokens", [WINDOW, WINDOW + 1])
def test_a_branch_of_the_rotary_table_counts_where_it_can_be_reached(max_tokens):
    rope = tiny_config("phi3").rope_parameters
    other = {"rope_parameters": {**rope, "long_factor": rope["short_factor"]}}
    assert isinstance(compared("phi3", {}, other, max_tokens), Equal) == (max_tokens == WINDOW)


def test_the_branch_that_is_reached_is_compared_by_value():
    rope = tiny_config("phi3").rope_parameters
    other = {"rope_parameters": {**rope, "short_factor": [1.0, 1.5]}}
    assert isinstance(compared("phi3", {}, other, 1), Different)


@pytest.mark.parametrize(("kind", "left", "right", "parted"), [
    ("mistral", {}, {"rope_theta": 5000.0}, "inv_freq"),
    ("mistral", {}, {"rms_norm_eps": 1e-5}, "1e-06"),
    ("mistral", {}, {"hidden_act": "gelu"}, "silu"),
    ("mistral", {}, {"num_hidden_layers": 2}, "the caches differ"),
    ("mistral", {}, {"tie_word_embeddings": True}, "lm_head_weight"),
    ("llama", {"attention_bias": True}, {}, "linear"),
    ("gemma2", {}, {"query_pre_attn_scalar": 64}, "mul.Tensor(matmul, 0.0625)"),
    ("gemma2", {}, {"final_logit_softcapping": 20.0}, "30.0"),
])  # fmt: skip
def test_other_arithmetic_is_different(kind, left, right, parted):
    outcome = compared(kind, left, right)
    assert isinstance(outcome, Different)
    assert parted in outcome.reason


def test_the_order_of_layer_types_counts_just_where_the_window_does():
    swapped = {"layer_types": [FULL, SLIDING]}
    assert compared("gemma2", {}, swapped, WINDOW) == Equal()
    assert isinstance(compared("gemma2", {}, swapped, WINDOW + 1), Different)


def test_swapped_weights_are_different_and_renamed_ones_are_not():
    program = traced("mistral")[0]
    one, other = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    names = {name: name for name in program.shapes}
    assert isinstance(itself(program, program, names=names | {one: other, other: one}), Different)
    renamed = replace(
        program,
        inputs=tuple(replace(item, target=item.target.replace("model.", "lm.", 1)) for item in program.inputs),
        shapes={name.replace("model.", "lm.", 1): shape for name, shape in program.shapes.items()},
    )
    constants = {name.replace("model.", "lm.", 1): value for name, value in traced("mistral")[1].items()}
    names = {name.replace("model.", "lm.", 1): name for name in program.shapes}
    options = {"max_tokens": WINDOW, "values": (traced("mistral")[1], constants)}
    assert equal_under(program, renamed, names=names, **options) == Equal()
    assert isinstance(equal_under(program, renamed, **options), Different)


def test_a_weight_of_another_shape_is_different():
    program = traced("mistral")[0]
    longer = replace(program, shapes={**program.shapes, "lm_head.weight": (50, 16)})
    assert isinstance(itself(program, longer), Different)


def test_a_constant_without_a_value_equals_no_other():
    program, values = traced("mistral")
    rest = {name: value for name, value in values.items() if not name.endswith("inv_freq")}
    outcome = equal_under(program, program, max_tokens=WINDOW, values=(rest, rest))
    assert isinstance(outcome, Different)
    assert "inv_freq" in outcome.reason


def test_a_buffer_that_files_hold_counts_by_its_name_and_not_by_its_first_value():
    program = traced("mistral")[0]
    read = next(node for node in program.graph.graph.nodes if node.name == "b_model_rotary_emb_inv_freq").users
    other = program.placeholder("b_model_rotary_emb_original_inv_freq").name

    def read_the_other(node: fx.Node) -> None:
        node.update_arg(0, next(one for one in node.graph.nodes if one.name == other))

    swapped = edited(program, next(iter(read)).name, read_the_other)
    assert itself(program, swapped) == Equal()  # both are made from the config, and hold the same bytes
    names = ("model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq")
    stored = {**program.shapes, **dict.fromkeys(names, (2,))}
    assert isinstance(itself(replace(program, shapes=stored), replace(swapped, shapes=stored)), Different)


def test_graphs_of_growing_frequencies_stand_for_their_original_length_only():
    config = tiny_config("llama", num_hidden_layers=1, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    program, values = trace(config), config_values(config)
    assert program.max_tokens == 64
    assert equal_under(program, program, max_tokens=64, values=(values, values)) == Equal()
    for longer in (65, None):
        outcome = equal_under(program, program, max_tokens=longer, values=(values, values))
        assert outcome == Different("cannot decide: a graph stands for at most 64 tokens")


def test_no_change_of_an_operator_or_a_number_is_missed():
    """Every change of one node either is found, or runs the same in every call up to the bound."""
    program, longest = traced("mistral")[0], 3
    expected = every_call("mistral", program, longest)
    missed = [name for name, mutant in mutants(program) if isinstance(itself(program, mutant), Equal)]
    for name, mutant in mutants(program):
        if name in missed:
            assert same(every_call("mistral", mutant, longest), expected), name
    assert {"gt_1 swapped", "sub_1 + 1"} <= set(missed)
    assert len(missed) < 8


SWAPS = {
    aten.add.Tensor: aten.sub.Tensor, aten.sub.Tensor: aten.add.Tensor, aten.gt.Tensor: aten.ge.Tensor,
    aten.le.Tensor: aten.lt.Tensor, aten.cos.default: aten.sin.default, aten.sin.default: aten.cos.default,
    aten.mul.Tensor: aten.add.Tensor, aten.silu.default: aten.relu.default, aten.__and__.Tensor: aten.__or__.Tensor,
}  # fmt: skip


def mutants(program: Program):
    """Yield copies in which one operator or one number is another; dead nodes and sizes are left alone."""
    for node in program.graph.graph.nodes:
        if node.op != "call_function" or not node.users or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if node.target in SWAPS:
            yield f"{node.name} swapped", edited(program, node.name, lambda n: setattr(n, "target", SWAPS[n.target]))
        if node.target in {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.pow.Tensor_Scalar}:
            for place, value in enumerate(node.args):
                if isinstance(value, int | float):
                    changed = lambda n, p=place, v=value: n.update_arg(p, v + 1)  # noqa: E731
                    yield f"{node.name} + 1", edited(program, node.name, changed)


def inserted(program: Program, after: str, *calls) -> Program:
    """Return a copy with calls on the node `after` that nothing uses: they count for what they write."""

    def edit(node: fx.Node) -> None:
        previous = node
        for target, arguments in calls:
            with node.graph.inserting_after(previous):
                base = previous if target is not aten.fill_.Scalar or previous is not node else node
                previous = node.graph.call_function(target, (base, *arguments))
                previous.meta = dict(node.meta)

    return edited(program, after, edit)


def test_a_write_to_a_whole_tensor_is_seen_by_what_reads_it_later():
    program = traced("mistral")[0]
    one = inserted(program, "linear", (aten.add_.Tensor, (1.0,)))
    assert isinstance(itself(program, one), Different)
    assert itself(one, inserted(program, "linear", (aten.add_.Tensor, (1.0,)))) == Equal()
    assert isinstance(itself(one, inserted(program, "linear", (aten.add_.Tensor, (2.0,)))), Different)


def test_a_write_to_a_part_of_a_tensor_is_not_followed():
    program = traced("mistral")[0]
    part = inserted(program, "linear", (aten.select.int, (2, 0)), (aten.fill_.Scalar, (1.0,)))
    assert isinstance(itself(program, part), Different)
    assert isinstance(itself(part, part), Different)


def test_a_write_to_what_the_caller_owns_is_refused():
    program = traced("mistral")[0]
    outcome = itself(program, inserted(program, "attention_mask", (aten.fill_.Scalar, (1,))))
    assert isinstance(outcome, Different)
    assert outcome.reason == "cannot decide: a tensor of the caller is written to"


@pytest.mark.parametrize(("target", "options"), [(aten.rand_like.default, ()), (aten.dropout.default, (0.1, True))])
def test_a_value_that_is_drawn_equals_nothing(target, options):
    def edit(node: fx.Node) -> None:
        node.target, node.args, node.kwargs = target, (*node.args[:1], *options), {}

    drawn = edited(traced("mistral")[0], "silu", edit)
    assert isinstance(itself(drawn, drawn), Different)


@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "gemma3_text"])
def test_a_graph_equals_itself_for_any_length(kind):
    assert compared(kind, {}, {}, None) == Equal()
