"""The sites of a model: found by structure, named, and worth what they hold."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from collapse.analysis.flops import cost
from collapse.analysis.layers import block_lists
from collapse.analysis.residual import Sublayer, sublayers_of
from collapse.analysis.sites import Group, Places, Sizes, places_of, sites_of
from collapse.analysis.traffic import element_bytes
from collapse.checkpoint import Checkpoint
from collapse.errors import UnsupportedError
from collapse.plan import Skipped
from collapse.program import Program
from collapse.trace import trace
from tests.architectures import save_tiny, tiny_config

# By kind, what the second block adds to the stream: (module, writer, attends), paths within the block.
SUBLAYERS = {
    "llama": [("self_attn", "self_attn", True), ("mlp", "mlp", False)],
    "gpt2": [("attn", "attn", True), ("mlp", "mlp", False)],
    "opt": [("self_attn", "self_attn", True), ("fc1", "fc2", False)],
    "gemma3_text": [("self_attn", "post_attention_layernorm", True), ("mlp", "post_feedforward_layernorm", False)],
    "bloom": [("self_attention", "self_attention.dense", True), ("mlp", "mlp.dense_4h_to_h", False)],
    "falcon": [("self_attention", "self_attention", True), ("mlp", "mlp", False)],
    "phi": [("self_attn", "self_attn", True), ("mlp", "mlp", False)],
    "granite": [("self_attn", "self_attn", True), ("mlp", "mlp", False)],
    "mixtral": [("self_attn", "self_attn", True), ("mlp", "mlp", False)],
    "mamba": [("mixer", "mixer", False)],
}


@cache
def program(kind: str, dynamic: bool = True) -> Program:
    return trace(tiny_config(kind), dynamic=dynamic)


def block_of(traced: Program) -> str:
    ((site, _),) = block_lists(traced)
    return f"{site}.1"


def places(tmp_path: Path, kind: str) -> tuple[Places, Checkpoint, Program]:
    checkpoint = Checkpoint.open(save_tiny(kind, tmp_path / kind))
    return places_of(program(kind), checkpoint), checkpoint, program(kind)


def groups(found: Places, kind: str) -> list[Group]:
    return [group for group in found.groups if group.kind == kind]


@pytest.mark.parametrize("kind", SUBLAYERS)
def test_sublayers_are_found_by_what_is_added_to_the_stream(kind: str) -> None:
    traced = program(kind, dynamic=False)
    block = block_of(traced)
    found = sublayers_of(traced, block)
    assert all(isinstance(one, Sublayer) for one in found)
    shown = [(one.path.removeprefix(f"{block}."), one.writer.removeprefix(f"{block}."), one.attends) for one in found]
    assert shown == SUBLAYERS[kind]


def test_blocks_that_do_more_than_add_are_left_alone_with_a_reason() -> None:
    (one,) = sublayers_of(program("gemma3n_text", dynamic=False), "model.layers.1")
    assert isinstance(one, Skipped) and "not the stream that it got plus something" in one.reason


def test_a_norm_of_one_sublayer_goes_with_it_and_a_shared_one_stays() -> None:
    own = {one.path: one.tensors for one in sublayers_of(program("gemma3_text", dynamic=False), "model.layers.1")}
    block = "model.layers.1"
    assert f"{block}.input_layernorm.weight" in own[f"{block}.self_attn"]
    assert f"{block}.pre_feedforward_layernorm.weight" in own[f"{block}.mlp"]
    shared = {one.path: one.tensors for one in sublayers_of(program("phi", dynamic=False), block)}
    assert not any("input_layernorm" in name for names in shared.values() for name in names)


def test_sizes_of_a_llama_are_its_closed_form(tmp_path: Path) -> None:
    found, _, traced = places(tmp_path, "llama")
    d, f, kv, prompt = 16, 24, 2 * 4, 512
    attention = 2 * d * d + 2 * d * kv
    scores = 4 * d * prompt
    layer, *_ = groups(found, "layers")
    attends, feeds, *_ = groups(found, "sublayers")
    assert attends.unit == Sizes(attention + d, 2 * attention + scores, 4 * (attention + d))
    assert feeds.unit == Sizes(3 * d * f + d, 2 * 3 * d * f, 4 * (3 * d * f + d))
    assert layer.unit == Sizes(
        attends.unit.parameters + feeds.unit.parameters,
        attends.unit.flops + feeds.unit.flops,
        attends.unit.weight_bytes + feeds.unit.weight_bytes,
    )
    assert groups(found, "neurons")[0].unit == Sizes(3 * d, 2 * 3 * d, 4 * 3 * d)
    assert groups(found, "kv-groups")[0].unit == Sizes(attention // 2, attention + scores // 2, 4 * attention // 2)
    assert traced.shapes["model.layers.0.mlp.down_proj.weight"] == (d, f)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text"])
def test_sublayers_make_up_their_block(kind: str, tmp_path: Path) -> None:
    found, checkpoint, traced = places(tmp_path, kind)
    sizes = element_bytes(checkpoint, traced)
    whole = cost(traced, prompt=512, element_bytes=sizes)
    for layer in groups(found, "layers"):
        parts = [group.unit for group in groups(found, "sublayers") if group.block == layer.block]
        assert sum(one.parameters for one in parts) == layer.unit.parameters == whole.modules[layer.path].params
        assert sum(one.flops for one in parts) == layer.unit.flops
        assert layer.unit.flops == whole.modules[layer.path].decode_flops_per_token
        assert layer.unit.weight_bytes == whole.modules[layer.path].weight_bytes_per_decode_token


def test_an_expert_is_worth_its_weights_and_its_row_of_the_router(tmp_path: Path) -> None:
    found, _, _ = places(tmp_path, "mixtral")
    experts = groups(found, "experts")
    assert [group.size for group in experts] == [4, 4]
    assert experts[0].unit == Sizes(parameters=3 * 16 * 24 + 16)
    assert experts[0].router == ("model.layers.0.mlp.gate.weight",)
    assert [site.name for site in sites_of(experts[1], ())] == [
        f"model.layers.1.mlp.experts experts {number}/4" for number in range(4)
    ]


def test_neurons_are_divided_by_rank_into_nearly_equal_sites(tmp_path: Path) -> None:
    found, _, _ = places(tmp_path, "llama")
    group = groups(found, "neurons")[0]
    order = [*range(23, -1, -1)]
    sites = sites_of(group, order, 5)
    assert [len(site.units) for site in sites] == [4, 5, 5, 5, 5]
    assert list(sites[0].units) == [20, 21, 22, 23]
    assert sorted(unit for site in sites for unit in site.units) == list(range(24))
    assert sites[1].sizes == group.unit.times(5)
    assert sites[1].name == "model.layers.0.mlp neurons 1/5"
    assert len(sites_of(group, order, 100)) == 24


def test_names_of_all_sites_differ(tmp_path: Path) -> None:
    for kind in ("llama", "mixtral", "gpt2"):
        found, _, _ = places(tmp_path, kind)
        names = [site.name for group in found.groups for site in sites_of(group, range(group.size))]
        assert len(set(names)) == len(names)


def test_a_model_without_one_list_of_blocks_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save_tiny("llama", tmp_path / "llama"))
    traced = program("llama")
    bare = Program(
        traced.graph, traced.inputs, traced.outputs, traced.cache, traced.constants, traced.shapes, traced.tied, {}
    )
    with pytest.raises(UnsupportedError, match="has 0 lists of blocks, not one"):
        places_of(bare, checkpoint)
