"""The peers' criteria, each against a property that its paper states."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.peers.calibration import Calibration
from benchmarks.peers.cut import Removal
from benchmarks.peers.flap import compensated_bias, flap_adaptive, flap_uniform, fluctuation, standardised
from benchmarks.peers.methods import METHODS
from benchmarks.peers.moments import Moments, moments
from benchmarks.peers.replaceme import fold, last_leaf
from benchmarks.peers.shortgpt import block_influence, shortgpt
from benchmarks.peers.sleb import losses_without, sleb
from benchmarks.peers.streams import least_run
from benchmarks.peers.structure import parameters
from benchmarks.peers.uidl import uidl
from benchmarks.peers.wanda_sp import importance, in_turn, wanda_sp
from benchmarks.peers.widths import adaptive
from tests.peer_models import calibration, identity, ids, logits, model, structure

EXACT = 1e-12  # double precision
SAME_LOGITS = 1e-5  # fp32 sums in another order


def moments_of(values: torch.Tensor) -> Moments:
    shift = values[0].double()
    moved = values.double() - shift
    return Moments(len(values), shift, moved.sum(0), (moved**2).sum(0))


# ShortGPT


def test_block_influence_is_one_minus_the_mean_cosine_of_input_and_output() -> None:
    found = calibration("llama")
    seen: list[torch.Tensor] = []
    block = found.model.model.layers[2]
    block.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    block.register_forward_hook(lambda _, __, output: seen.append(output))
    logits(found.model, found.ids)
    cosine = torch.cosine_similarity(seen[0].double(), seen[1].double(), dim=-1).mean()
    assert float(block_influence(found.turns)[2]) == pytest.approx(1 - float(cosine), abs=EXACT)


@pytest.mark.parametrize("number", [0, 3])
def test_an_identity_block_has_no_influence_and_goes_first(number: int) -> None:
    found = calibration("llama", identity(number))
    assert float(block_influence(found.turns)[number]) == pytest.approx(0, abs=EXACT)
    removal = shortgpt(found, 0.2)
    assert removal.gone == (number,)
    smaller = removal.apply(found.model, found.structure)
    assert torch.equal(logits(smaller, found.ids), logits(found.model, found.ids))


def test_shortgpt_drops_the_least_influential_blocks_wherever_they_are() -> None:
    found = calibration("llama", identity(1, 4))
    assert shortgpt(found, 0.4).gone == (1, 4)


# UIDL


def test_the_angle_is_that_of_the_last_token() -> None:
    found = calibration("llama")
    seen: list[torch.Tensor] = []
    found.model.model.layers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0][:, -1].double()))
    found.model.model.layers[3].register_forward_hook(lambda _, __, output: seen.append(output[:, -1].double()))
    logits(found.model, found.ids)
    expected = (torch.cosine_similarity(*seen, dim=-1).arccos() / math.pi).mean()
    assert float(found.turns.angle[1, 4]) == pytest.approx(float(expected), abs=EXACT)


def test_a_run_of_identities_has_distance_zero_and_goes() -> None:
    found = calibration("llama", identity(2, 3))
    assert float(found.turns.angle[2, 4]) == pytest.approx(0, abs=1e-7)  # arccos is steep at one
    assert uidl(found, 0.4).gone == (2, 3)


def test_uidl_takes_one_run_where_shortgpt_takes_two_blocks() -> None:
    found = calibration("llama", identity(0, 3))
    gone = uidl(found, 0.4).gone
    assert gone in {(0, 1), (2, 3), (3, 4)}
    assert shortgpt(found, 0.4).gone == (0, 3)


def test_the_least_run_is_that_of_least_distance() -> None:
    distance = torch.tensor([[0.0, 9, 1, 9], [9, 0, 9, 2], [9, 9, 0, 9], [9, 9, 9, 0]])
    assert least_run(distance, 2) == 0
    assert least_run(distance, 2, first=1) == 1


# SLEB


def loss(own: PreTrainedModel, rows: torch.Tensor) -> float:
    found = logits(own, rows)[:, :-1].flatten(0, 1)
    return float(torch.nn.functional.cross_entropy(found, rows[:, 1:].flatten(), reduction="sum"))


def test_losses_without_a_block_are_those_of_the_model_without_it() -> None:
    found = calibration("llama")
    losses = losses_without(found.model, found.structure, found.search, [1])
    assert losses.keys() == {0, 2, 3, 4}
    for number, value in losses.items():
        smaller = Removal("sleb", gone=(1, number)).apply(found.model, found.structure)
        assert value == pytest.approx(loss(smaller, found.search), rel=1e-6)


def test_each_choice_of_sleb_is_the_brute_force_one() -> None:
    found = calibration("llama")
    gone: tuple[int, ...] = ()
    for _ in range(2):
        rest = [number for number in range(5) if number not in gone]
        costs = {
            n: loss(Removal("brute", gone=(*gone, n)).apply(found.model, found.structure), found.search) for n in rest
        }
        gone = (*gone, min(costs, key=lambda n: costs[n]))
    assert sleb(found, 0.4).gone == tuple(sorted(gone))
    assert sleb(found, 0.2).gone == gone[:1]


def test_a_search_leaves_the_model_as_it_was() -> None:
    found = calibration("llama")
    before = logits(found.model, found.ids)
    sleb(found, 0.2)
    assert torch.equal(logits(found.model, found.ids), before)


# ReplaceMe


def test_a_cut_run_that_is_linear_in_the_feed_forward_output_is_reproduced() -> None:
    found = calibration("llama", identity(2, 3))
    own, matrix = found.model, torch.eye(16) + 0.1 * torch.rand(16, 16, generator=torch.Generator().manual_seed(0))
    weight = own.model.layers[1].mlp.down_proj.weight.detach().clone()
    hidden = found.structure.blocks(own)[3]
    made: list[torch.Tensor] = []
    own.model.layers[1].mlp.register_forward_hook(lambda _, __, output: made.append(output))
    hidden.register_forward_hook(lambda _, __, output: output + made[-1] @ matrix - made[-1])
    rows = ids(rows=12)
    removal = fold(own, found.structure, rows, 2, 2)
    smaller = removal.apply(own, found.structure)
    assert torch.equal(own.model.layers[1].mlp.down_proj.weight, weight)
    torch.testing.assert_close(removal.weights["model.layers.1.mlp.down_proj.weight"], matrix.T @ weight)
    wanted = logits(own, ids(seed=9))
    torch.testing.assert_close(logits(smaller, ids(seed=9)), wanted, rtol=0, atol=1e-4)
    assert parameters(smaller) == parameters(Removal("x", gone=(2, 3)).apply(own, found.structure))


def test_the_map_is_the_least_squares_one() -> None:
    found = calibration("llama")
    removal = fold(found.model, found.structure, found.ids, 2, 2)
    made: dict[str, torch.Tensor] = {}
    layers = found.model.model.layers
    layers[1].mlp.register_forward_hook(lambda _, __, output: made.update(m=output.flatten(0, 1).double()))
    layers[1].register_forward_hook(lambda _, __, output: made.update(out=output.flatten(0, 1).double()))
    layers[3].register_forward_hook(lambda _, __, output: made.update(wanted=output.flatten(0, 1).double()))
    logits(found.model, found.ids)
    m, target = made["m"], made["wanted"] - (made["out"] - made["m"])
    expected = torch.linalg.solve(m.T @ m, m.T @ target)
    weight = layers[1].mlp.down_proj.weight.double()
    torch.testing.assert_close(
        removal.weights["model.layers.1.mlp.down_proj.weight"].double(), expected.T @ weight, rtol=1e-4, atol=1e-4
    )


def test_behind_a_norm_the_map_is_a_matrix_of_its_own_and_counts() -> None:
    found = calibration("gemma3_text")
    assert last_leaf(found.model, found.structure, found.ids, 0).endswith("post_feedforward_layernorm")
    removal = fold(found.model, found.structure, found.ids, 1, 1)
    smaller = removal.apply(found.model, found.structure)
    plain = Removal("x", gone=(1,)).apply(found.model, found.structure)
    assert parameters(smaller) == parameters(plain) + 16 * 16
    assert logits(smaller, found.ids).isfinite().all()


# FLAP


def test_fluctuation_is_variance_times_the_squared_norm_of_the_column() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 2.0], [5.0, 2.0]])
    weight = torch.tensor([[1.0, 7.0], [2.0, 7.0]])
    assert fluctuation(weight, moments_of(values)).tolist() == [4.0 * 5.0, 0.0]


def constant_neuron(own: PreTrainedModel) -> None:
    """Let neuron 5 of either block give the same for every token, and much of it."""
    for block in own.model.layers:
        for product in (block.mlp.gate_proj, block.mlp.up_proj):
            product.weight[5] = 0
            product.bias[5] = 3.0


@pytest.mark.parametrize("method", [flap_uniform, flap_adaptive])
def test_a_constant_neuron_goes_first_and_the_bias_makes_up_for_it(
    method: Callable[[Calibration, float], Removal],
) -> None:
    found = calibration("biased", constant_neuron)
    units = [units for units in found.structure.units if units.kind == "neurons"]
    narrow = [units_and_kept for units_and_kept in method(found, 0.4).kept if units_and_kept[0] in units]
    assert narrow
    assert all(5 not in kept for _, kept in narrow)
    kept = tuple((one, tuple(n for n in range(one.size) if n != 5)) for one in units)
    biases = {
        f"{one.reader}.bias": compensated_bias(found.model, one, torch.tensor([5]), found.moments[one.reader])
        for one in units
    }
    smaller = Removal("flap", kept=kept, weights=biases).apply(found.model, found.structure)
    torch.testing.assert_close(logits(smaller, ids(seed=4)), logits(found.model, ids(seed=4)), rtol=0, atol=SAME_LOGITS)
    without = Removal("plain", kept=kept).apply(found.model, found.structure)
    assert (logits(without, ids(seed=4)) - logits(found.model, ids(seed=4))).abs().max() > 0.1


def test_new_biases_are_counted() -> None:
    found = calibration("llama")
    removal = flap_uniform(found, 0.3)
    narrowed = sum(units.parameters * (units.size - len(kept)) for units, kept in removal.kept)
    smaller = removal.apply(found.model, found.structure)
    assert parameters(found.model) - parameters(smaller) == narrowed - 16 * len(removal.kept)


def test_standardised_scores_have_mean_zero_and_deviation_one() -> None:
    found = standardised(torch.tensor([1.0, 2.0, 3.0]).double())
    assert found.tolist() == [-1.0, 0.0, 1.0]
    assert standardised(torch.ones(3).double()).tolist() == [0.0, 0.0, 0.0]


def test_moments_are_those_of_all_tokens_over_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.blocks.LOGITS", 12 * 48 * 2)
    own, reader = model("llama"), "model.layers.1.mlp.down_proj"
    seen: list[torch.Tensor] = []
    found = moments(own, [reader], ids())[reader]
    own.get_submodule(reader).register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1).double()))
    logits(own, ids())
    torch.testing.assert_close(found.mean, seen[0].mean(0))
    torch.testing.assert_close(found.variance, seen[0].var(0))
    torch.testing.assert_close(found.norm, seen[0].norm(dim=0))
    assert found.count == 72


# Wanda-sp


def test_importance_is_the_sum_of_weights_times_the_norm_of_the_input() -> None:
    weight = torch.tensor([[1.0, -2.0], [-3.0, 0.5]])
    values = torch.tensor([[3.0, 1.0], [4.0, 0.0]])
    assert importance(weight, moments_of(values)).tolist() == [4.0 * 5.0, 2.5 * 1.0]


def test_columns_of_zeros_go_first_at_no_cost() -> None:
    def zero(own: PreTrainedModel) -> None:
        for block in own.model.layers:
            block.mlp.down_proj.weight[:, [2, 7]] = 0

    found = calibration("llama", zero)
    kept = in_turn(found, {units: 2 for units in found.structure.units if units.kind == "neurons"})
    assert [set(range(24)) - set(rest) for _, rest in kept] == [{2, 7}] * 5
    smaller = Removal("wanda-sp", kept=kept).apply(found.model, found.structure)
    torch.testing.assert_close(logits(smaller, found.ids), logits(found.model, found.ids), rtol=0, atol=SAME_LOGITS)


def test_each_block_is_judged_after_those_before_it_were_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.blocks.LOGITS", 12 * 48 * 4)
    found = calibration("gemma3_text")
    kept = wanda_sp(found, 0.3).kept
    units, rest = kept[-1]
    assert units.block == 2
    cut = Removal("x", kept=kept[:-1]).apply(found.model, found.structure)
    read = moments(cut, [units.reader], found.ids)[units.reader]
    scores = importance(cut.get_submodule(units.reader).weight, read)
    assert set(rest) == set(scores.topk(len(rest)).indices.tolist())


# Sizes


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_gives_a_smaller_model_that_runs_and_leaves_the_source_alone(method: str, kind: str) -> None:
    found = calibration(kind)
    before = {name: value.clone() for name, value in found.model.state_dict().items()}
    shapes = logits(found.model, found.ids).shape
    smaller = METHODS[method](found, 0.3).apply(found.model, found.structure)
    assert parameters(smaller) < parameters(found.model)
    result = logits(smaller, found.ids)
    assert result.shape == shapes
    assert result.isfinite().all()
    after = found.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("method", ["flap", "flap-ul", "wanda-sp"])
@pytest.mark.parametrize("share", [0.1, 0.2, 0.3])
def test_widths_reach_the_share_to_within_a_neuron(method: str, share: float) -> None:
    found = calibration("llama")
    own, blocks = found.model, found.structure
    smaller = METHODS[method](found, share).apply(own, blocks)
    total = blocks.decoder_parameters(own)
    lost = total - blocks.decoder_parameters(smaller)
    neuron = next(units for units in blocks.units if units.kind == "neurons").parameters
    spare = 16 * len(blocks.units)  # biases that were expected, and are not there where a module lost nothing
    assert abs(lost - share * total) <= neuron / 2 + spare * (method != "wanda-sp")


def test_dropped_blocks_are_exactly_their_parameters() -> None:
    found = calibration("llama")
    block = parameters(found.model.model.layers[0])
    smaller = Removal("x", gone=(0, 3)).apply(found.model, found.structure)
    assert parameters(smaller) == parameters(found.model) - 2 * block
    assert smaller.config.num_hidden_layers == 3
    assert found.model.config.num_hidden_layers == 5
    assert [layer.self_attn.layer_idx for layer in smaller.model.layers] == [0, 1, 2]


def test_layer_types_go_with_their_blocks() -> None:
    found = calibration("gemma3_text")
    smaller = Removal("x", gone=(0,)).apply(found.model, found.structure)
    assert smaller.config.layer_types == ["full_attention", "sliding_attention"]
    assert [layer.self_attn.is_sliding for layer in smaller.model.layers] == [False, True]


def test_the_adaptive_choice_leaves_one_unit_everywhere() -> None:
    units = structure("llama").units
    scores = {one: torch.zeros(one.size) for one in units}
    kept = adaptive(scores, 1e9)
    assert len(kept) == len(units)
    assert all(len(rest) == 1 for _, rest in kept)


def test_kv_groups_go_with_their_query_heads() -> None:
    found = calibration("llama")
    groups = next(units for units in found.structure.units if units.kind == "kv-groups")
    smaller = Removal("x", kept=((groups, (1,)),)).apply(found.model, found.structure)
    attention, before = smaller.model.layers[0].self_attn, found.model.model.layers[0].self_attn
    assert torch.equal(attention.q_proj.weight, before.q_proj.weight[8:])
    assert torch.equal(attention.k_proj.weight, before.k_proj.weight[4:])
    assert torch.equal(attention.o_proj.weight, before.o_proj.weight[:, 8:])
    zeroed = model("llama")
    with torch.no_grad():
        zeroed.model.layers[0].self_attn.o_proj.weight[:, :8] = 0
    torch.testing.assert_close(logits(smaller, found.ids), logits(zeroed, found.ids), rtol=0, atol=SAME_LOGITS)


def test_the_choice_follows_the_calibration_text() -> None:
    found = calibration("llama")
    other = replace(found, ids=ids(seed=7))
    assert not torch.equal(found.turns.cosine, other.turns.cosine)
