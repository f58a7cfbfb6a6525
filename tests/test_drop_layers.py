"""Dropped layers: the graph, the files and the reloaded model are one function (case B01)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from collapse.analysis.layers import Layers, drop_layers, layer_lists
from collapse.checkpoint import Checkpoint
from collapse.errors import PlanError
from collapse.plan import DropLayers, IndexSet, Skipped
from collapse.rewrite.graph import rewrite_program, rewrite_weights
from collapse.trace import load_config, trace
from tests.architectures import tiny_config, tiny_model, weights_of
from tests.tiny import PROVED, export, plan_for

WIDE = {
    "llama": dict(num_hidden_layers=4),
    "gemma3_text": dict(
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    ),
    "gpt2": dict(n_layer=4),
}
ENTRIES = {"llama": [2] * 4, "gpt2": [2] * 4, "gemma3_text": [3, 2, 3, 2]}  # a sliding layer also keeps a count
SHARED = dict(
    vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, head_dim=8,
    num_key_value_heads=1, global_head_dim=8, sliding_window=8, max_position_embeddings=64, num_kv_shared_layers=2,
    layer_types=WIDE["gemma3_text"]["layer_types"], vocab_size_per_layer_input=48, hidden_size_per_layer_input=4,
)  # fmt: skip


@cache
def program(kind: str):
    return trace(tiny_config(kind, **WIDE[kind]))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def save(kind: str) -> Checkpoint:
        root = tmp_path_factory.mktemp(kind) / "source"
        tiny_model(kind, **WIDE[kind]).save_pretrained(root)
        return Checkpoint.open(root)

    return save


def dropping(kind: str, checkpoint: Checkpoint, *dropped: int) -> DropLayers:
    config = load_config(checkpoint)
    (layers,) = layer_lists(program(kind), checkpoint, config)
    assert isinstance(layers, Layers)
    kept = set(range(layers.size)) - set(dropped)
    found = drop_layers(layers, kept, checkpoint, config, PROVED, "layers")
    assert isinstance(found, DropLayers), found
    return found


def eager(model, tokens, held=None):
    with torch.no_grad():
        found = model(input_ids=tokens, past_key_values=held, use_cache=True)
    return found.logits, found.past_key_values


@pytest.mark.parametrize("dropped", [(0,), (2,), (3,), (1, 2)], ids=str)
@pytest.mark.parametrize("kind", WIDE)
def test_b01_dropped_layers_are_renumbered_everywhere(kind: str, dropped: tuple[int, ...], source, tmp_path: Path):
    checkpoint = source(kind)
    rewrite = dropping(kind, checkpoint, *dropped)
    plan = plan_for(checkpoint, rewrite)
    out = export(checkpoint, plan, tmp_path / "out").root
    model, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    if kind == "gemma3_text":
        types = WIDE[kind]["layer_types"]
        assert model.config.layer_types == [types[n] for n in range(4) if n not in dropped]
    ids = torch.randint(3, 48, (2, 11), generator=torch.Generator().manual_seed(len(dropped)))
    whole, _ = eager(model, ids)
    start, held = eager(model, ids[:, :7])
    rest, _ = eager(model, ids[:, 7:], held)
    torch.testing.assert_close(torch.cat([start, rest], 1), whole, rtol=1.3e-6, atol=1e-5)

    rewritten = rewrite_program(program(kind), plan)
    weights = rewrite_weights(program(kind), weights_of(tiny_model(kind, **WIDE[kind])), plan)
    mask = torch.ones_like(ids)
    assert torch.equal(rewritten.run(weights, ids, mask)[0], whole)
    first, grown = rewritten.run(weights, ids[:, :7], mask[:, :7])
    second, _ = rewritten.run(weights, ids[:, 7:], mask, grown)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1.3e-6, atol=1e-5)
    assert len(rewritten.cache) == sum(ENTRIES[kind][n] for n in range(4) if n not in dropped)
    assert rewritten.outputs == ("logits", *(f"cache.{n}" for n in range(len(rewritten.cache))))
    prefix = rewrite.prefix
    assert not [i.target for i in rewritten.inputs if any(i.target.startswith(f"{prefix}{n}.") for n in dropped)]

    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    assert torch.equal(eager(again, ids)[0], whole)


def hand_made(size: int, kept: list[int], site: str = "model.layers", **fields) -> DropLayers:
    whole = {"pass": "test", "site": site, "evidence": PROVED, "prefix": "model.layers.", "size": size, "tensors": ()}
    return DropLayers(**(whole | {"kept": IndexSet.of(kept)} | fields))


@cache
def shared_program():
    return trace(AutoConfig.for_model("gemma4_text", **SHARED))


@pytest.mark.parametrize("dropped", [0, 1])
def test_b04_a_layer_whose_keys_others_read_is_not_dropped(source, dropped: int):
    kept = [n for n in range(4) if n != dropped]
    with pytest.raises(PlanError, match=rf"model\.layers\.{dropped}: other modules read 3 values of this block"):
        rewrite_program(shared_program(), plan_for(source("llama"), hand_made(4, kept)))


def test_b04_a_layer_that_only_reads_shared_keys_can_go_from_the_graph(source):
    rewritten = rewrite_program(shared_program(), plan_for(source("llama"), hand_made(4, [0, 1, 3])))
    assert len(rewritten.cache) == len(shared_program().cache)
    assert not [item for item in rewritten.inputs if item.target.startswith("model.layers.2.")]


def test_b04_the_config_cannot_say_it_and_the_pass_is_told_why(tmp_path: Path):
    config = AutoConfig.for_model("gemma4_text", **SHARED)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    (declined,) = layer_lists(shared_program(), checkpoint, config)
    assert isinstance(declined, Skipped)
    assert declined.reason == "no field of the config makes the model shorter by its first or last block"


def test_a_block_that_takes_a_constant_from_its_own_number_is_not_renumbered(tmp_path: Path):
    scaled = dict(WIDE["gpt2"], scale_attn_by_inverse_layer_idx=True)
    tiny_model("gpt2", **scaled).save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    config = load_config(checkpoint)
    (layers,) = layer_lists(program("gpt2"), checkpoint, config)
    assert isinstance(layers, Layers)
    declined = drop_layers(layers, [0, 2, 3], checkpoint, config, PROVED, "layers")
    assert isinstance(declined, Skipped), declined
    assert "block 2 would be built otherwise as block 1" in declined.reason
    assert isinstance(drop_layers(layers, [0, 1, 2], checkpoint, config, PROVED, "layers"), DropLayers)


@pytest.mark.parametrize(
    ("rewrite", "message"),
    [(hand_made(3, [0, 1]), "the model has 4 blocks here, the plan says 3"),
     (hand_made(4, [0, 1], site="model.blocks"), "model.blocks: the model has 0 blocks")],
)  # fmt: skip
def test_a_list_of_blocks_that_is_not_there_is_refused(source, rewrite: DropLayers, message: str):
    with pytest.raises(PlanError, match=message):
        rewrite_program(program("llama"), plan_for(source("llama"), rewrite))


def test_dropping_leaves_the_source_program_as_it_was(source):
    before = str(program("llama").graph.graph)
    rewrite_program(program("llama"), plan_for(source("llama"), hand_made(4, [3])))
    assert str(program("llama").graph.graph) == before


def test_the_writer_refuses_blocks_that_are_not_whole(source, tmp_path: Path):
    checkpoint = source("llama")
    whole = dropping("llama", checkpoint, 1)
    for tensors in (whole.tensors[1:], (*whole.tensors, "model.layers.0.mlp.up_proj.weight")):
        wrong = whole.model_copy(update={"tensors": tensors})
        with pytest.raises(PlanError, match=r"model\.layers: does not list just the tensors of its blocks"):
            export(checkpoint, plan_for(checkpoint, wrong), tmp_path / "out")


def test_a_list_of_token_ids_as_long_as_the_model_is_deep_is_not_sliced(tmp_path: Path):
    tiny_model("llama", **WIDE["llama"], eos_token_id=[2, 3, 4, 5]).save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    (layers,) = layer_lists(program("llama"), checkpoint, load_config(checkpoint))
    assert isinstance(layers, Layers) and "eos_token_id" not in layers.lists


def test_sizes_that_a_dropped_block_computed_stay(tmp_path: Path):
    model, traced = tiny_model("mixtral"), trace(tiny_config("mixtral"))
    model.save_pretrained(tmp_path / "source")
    checkpoint = Checkpoint.open(tmp_path / "source")
    config = load_config(checkpoint)
    (layers,) = layer_lists(traced, checkpoint, config)
    assert isinstance(layers, Layers)
    dropped = drop_layers(layers, [1], checkpoint, config, PROVED, "layers")
    assert isinstance(dropped, DropLayers), dropped
    plan = plan_for(checkpoint, dropped)
    out = export(checkpoint, plan, tmp_path / "out").root
    ids = torch.randint(3, 48, (2, 9), generator=torch.Generator().manual_seed(7))
    whole, _ = eager(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32), ids)
    found = rewrite_program(traced, plan).run(weights_of(model), ids, torch.ones_like(ids))[0]
    torch.testing.assert_close(found, whole, rtol=1.3e-6, atol=1e-5)
