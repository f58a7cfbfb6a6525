"""Heads, neurons and experts as units: found by structure, narrowed in graph and files alike (cases B02, B19)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from collapse import pipeline
from collapse.analysis.channels import channels_of, narrow_channels
from collapse.analysis.experts import Experts, drop_experts, experts_of
from collapse.analysis.layers import Layers, drop_layers, layer_lists
from collapse.analysis.units import Channels
from collapse.checkpoint import Checkpoint
from collapse.errors import PlanError, RefutedError
from collapse.plan import DropLayers, IndexSet, Narrow, Skipped
from collapse.program import Program
from collapse.rewrite.graph import rewrite_program, rewrite_weights
from collapse.schema import InputSchema
from collapse.trace import load_config, trace
from collapse.verify.blame import tensors_blamed
from tests.architectures import tiny_config, tiny_model, weights_of
from tests.tiny import PROVED, export, plan_for

ODD = {"24/8": (24, 8, 4, 168), "28/4": (28, 4, 2, 84), "14/2": (14, 2, 8, 14)}  # heads, groups, width, hidden size
BLOCK = "model.layers.0"


def shape_of(ratio: str) -> dict[str, int]:
    heads, groups, width, hidden = ODD[ratio]
    sizes = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": width, "hidden_size": hidden}
    return {"num_hidden_layers": 1, **sizes}


@cache
def program(kind: str, *changes: tuple[str, object]) -> Program:
    return trace(tiny_config(kind, **dict(changes)))


def saved(root: Path, model) -> Checkpoint:
    model.save_pretrained(root)
    return Checkpoint.open(root)


def one(found, kind: str) -> Channels:
    (channels,) = [c for c in found if isinstance(c, Channels) and c.kind == kind]
    return channels


def both_paths(checkpoint: Checkpoint, traced: Program, model, plan, out: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the reloaded output, and of the rewritten graph on weights in memory."""
    export(checkpoint, plan, out)
    again, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ids = torch.randint(3, 48, (2, 9), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    graph = rewrite_program(traced, plan, checkpoint.config)
    weights = rewrite_weights(traced, weights_of(model), plan)
    with torch.no_grad():
        reloaded = again(input_ids=ids).logits
    found = graph.run(weights, ids, mask)[0]
    _, cache_ = graph.run(weights, ids[:, :5], mask[:, :5])
    decoded = graph.run(weights, ids[:, 5:], mask, cache_)[0]
    torch.testing.assert_close(decoded, reloaded[:, 5:], rtol=1e-5, atol=1e-4)
    return reloaded, found


@pytest.mark.parametrize("ratio", ODD)
def test_b02_a_dead_kv_group_goes_with_its_query_heads(ratio: str, tmp_path: Path) -> None:
    heads, groups, width, _ = ODD[ratio]
    model, traced = tiny_model("llama", **shape_of(ratio)), program("llama", *shape_of(ratio).items())
    each = heads // groups * width
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[:, each : 2 * each] = 0
    checkpoint = saved(tmp_path / "source", model)
    channels = one(channels_of(traced, checkpoint, BLOCK), "kv-groups")
    assert (channels.site, channels.size) == (f"{BLOCK}.self_attn", groups)
    kept = set(range(groups)) - {1}
    rewrites = narrow_channels([(channels, kept)], traced, load_config(checkpoint), PROVED, "test")
    assert not isinstance(rewrites, Skipped)
    assert rewrites[0].config == {
        "num_attention_heads": heads - heads // groups, "num_key_value_heads": groups - 1, "head_dim": width,
    }  # fmt: skip
    reloaded, found = both_paths(checkpoint, traced, model, plan_for(checkpoint, *rewrites), tmp_path / "out")
    ids = torch.randint(3, 48, (2, 9), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        torch.testing.assert_close(reloaded, model(input_ids=ids).logits, rtol=1.3e-6, atol=1e-5)
    torch.testing.assert_close(found, reloaded, rtol=1.3e-6, atol=1e-5)


def test_b02_a_number_of_heads_that_the_config_class_refuses_is_declined(tmp_path: Path) -> None:
    shape = shape_of("14/2") | {"hidden_size": 16, "num_attention_heads": 16, "num_key_value_heads": 4}
    checkpoint, traced = saved(tmp_path, tiny_model("llama", **shape)), program("llama", *shape.items())
    channels = one(channels_of(traced, checkpoint, BLOCK), "kv-groups")
    found = narrow_channels([(channels, [0, 1, 3])], traced, load_config(checkpoint), PROVED, "test")
    assert isinstance(found, Skipped), "a hidden size of 16 is no multiple of 12 heads"
    assert found.site == f"{BLOCK}.self_attn"


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory):
    changes = {"num_hidden_layers": 1, "pad_token_id": 0}
    model = tiny_model("phi3", **changes)
    return model, program("phi3", *changes.items()), saved(tmp_path_factory.mktemp("phi3") / "source", model)


def test_fused_projections_have_several_ranges_of_one_axis(phi3, tmp_path: Path) -> None:
    model, traced, checkpoint = phi3
    found = channels_of(traced, checkpoint, BLOCK)
    neurons, groups = one(found, "neurons"), one(found, "kv-groups")
    fused = next(part for part in neurons.parts if len(part.ranges) == 2)
    assert (fused.axes[0].tensor, fused.ranges) == (f"{BLOCK}.mlp.gate_up_proj.weight", ((0, 1), (24, 1)))
    assert len(next(part for part in groups.parts if part.axes[0].tensor.endswith("qkv_proj.weight")).ranges) == 3
    kept = [n for n in range(24) if n % 3]
    rewrites = narrow_channels([(neurons, kept)], traced, load_config(checkpoint), PROVED, "test")
    assert not isinstance(rewrites, Skipped) and rewrites[0].config == {"intermediate_size": 16}
    reloaded, graph = both_paths(checkpoint, traced, model, plan_for(checkpoint, *rewrites), tmp_path / "out")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[:, ::3] = 0
        ids = torch.randint(3, 48, (2, 9), generator=torch.Generator().manual_seed(5))
        torch.testing.assert_close(reloaded, model(input_ids=ids).logits, rtol=1.3e-6, atol=1e-5)
    torch.testing.assert_close(graph, reloaded, rtol=1.3e-6, atol=1e-5)


MOE = {"num_hidden_layers": 1, "num_local_experts": 5}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory):
    model = tiny_model("mixtral", **MOE)
    return model, program("mixtral", *MOE.items()), saved(tmp_path_factory.mktemp("moe") / "source", model)


def experts(mixtral) -> Experts:
    _, traced, checkpoint = mixtral
    (found,) = experts_of(traced, checkpoint, BLOCK)
    assert isinstance(found, Experts)
    return found


def test_experts_that_the_files_have_in_parts_are_renumbered(mixtral, tmp_path: Path) -> None:
    model, traced, checkpoint = mixtral
    rewrites = drop_experts(
        [(experts(mixtral), [0, 2, 4])], traced, checkpoint, load_config(checkpoint), PROVED, "test"
    )
    assert not isinstance(rewrites, Skipped)
    router, dropped = rewrites
    assert isinstance(router, Narrow) and isinstance(dropped, DropLayers)
    assert router.config == {"num_local_experts": 3}
    assert {name.split(".")[5] for name in dropped.tensors} == {"1", "3"}
    reloaded, graph = both_paths(checkpoint, traced, model, plan_for(checkpoint, *rewrites), tmp_path / "out")
    torch.testing.assert_close(graph, reloaded, rtol=1.3e-6, atol=1e-5)
    names = {name.split(".")[5] for name in Checkpoint.open(tmp_path / "out").tensors if ".experts." in name}
    assert names == {"0", "1", "2"}


def test_of_merged_parts_the_wrong_expert_is_named(mixtral, tmp_path: Path) -> None:
    model, traced, checkpoint = mixtral
    rewrites = drop_experts(
        [(experts(mixtral), [0, 2, 4])], traced, checkpoint, load_config(checkpoint), PROVED, "test"
    )
    assert not isinstance(rewrites, Skipped)
    weights = weights_of(model)
    with torch.no_grad():  # experts 1 and 3 are not dead; what is asked here is what is said of expert 4
        plan = plan_for(checkpoint, *rewrites)
        out = export(checkpoint, plan, tmp_path / "out").root
        name = f"{BLOCK}.block_sparse_moe.experts.2.w2.weight"
        tensors = load_file(out / "model.safetensors")
        tensors[name][3] += 1
        save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (found,) = tensors_blamed(out, checkpoint, plan, traced, weights)
    assert found.site == f"{BLOCK}.block_sparse_moe.experts.4.w2.weight"
    assert found.reason.startswith(
        "the reloaded model.layers.0.mlp.experts.down_proj is not what plan and source make of"
    )


def test_b19_fewer_experts_than_a_token_is_sent_to_are_declined(mixtral) -> None:
    _, traced, checkpoint = mixtral
    found = drop_experts([(experts(mixtral), [3])], traced, checkpoint, load_config(checkpoint), PROVED, "test")
    assert isinstance(found, Skipped)
    assert found.reason == "1 experts are left, fewer than a token is sent to"


def test_a_config_edit_that_means_more_than_sizes_is_refused(mixtral) -> None:
    _, traced, checkpoint = mixtral
    rewrites = experts(mixtral).rewrites(IndexSet.of([0, 1, 2, 3]), checkpoint, PROVED, "test")
    for edits, message in (
        ({"num_local_experts": 4, "num_experts_per_tok": 3}, "changes more than sizes: topk is"),
        ({"num_local_experts": 4, "rms_norm_eps": 0.5}, "changes more than sizes: add"),
        ({"num_local_experts": 3}, r"the edited config gives .* the shape \(3,"),
        ({}, r"the edited config gives .* the shape \(5,"),
    ):
        plan = plan_for(checkpoint, rewrites[0].model_copy(update={"config": edits}), rewrites[1])
        with pytest.raises(PlanError, match=rf"model\.layers\.0\.mlp\.experts: {message}|{message}"):
            rewrite_program(traced, plan, checkpoint.config)
    with pytest.raises(PlanError, match="channels cannot be narrowed without the config"):
        rewrite_program(traced, plan_for(checkpoint, *rewrites))


def test_a_whole_export_of_fewer_layers_with_fewer_heads(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    model, traced = tiny_model("llama", **changes), program("llama", *changes.items())
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:, 8:] = 0
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
    checkpoint = saved(tmp_path / "source", model)
    config = load_config(checkpoint)
    groups = [one(channels_of(traced, checkpoint, f"model.layers.{n}"), "kv-groups") for n in range(2)]
    heads = narrow_channels([(group, [0]) for group in groups], traced, config, PROVED, "test")
    (layers,) = layer_lists(traced, checkpoint, config)
    assert isinstance(layers, Layers) and not isinstance(heads, Skipped)
    fewer = drop_layers(layers, [1], checkpoint, config, PROVED, "test")
    assert isinstance(fewer, DropLayers)
    schema = InputSchema(type="text", tokens=tuple(range(48)), max_tokens=16)
    plan = plan_for(checkpoint, *heads, fewer, schema=schema.to_json(), schema_digest=schema.digest)
    pipeline.export(checkpoint.root, tmp_path / "out", plan=plan)  # raises unless it is verified
    shapes = {name: info.shape for name, info in Checkpoint.open(tmp_path / "out").tensors.items()}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (8, 16)
    assert not [name for name in shapes if name.startswith("model.layers.1.")]
    alive = [n.model_copy(update={"kept": IndexSet.of(range(n.size // 2, n.size))}) for n in heads]
    wrong = plan.model_copy(update={"rewrites": (*alive, fewer)})
    with pytest.raises(RefutedError, match=r"model\.layers\.1\.self_attn \(test\): alone, in the graph, it moves"):
        pipeline.export(checkpoint.root, tmp_path / "wrong", plan=wrong)
    assert not (tmp_path / "wrong").exists()


def test_neurons_of_one_layer_alone_cannot_be_said_natively(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 2}
    checkpoint, traced = saved(tmp_path, tiny_model("llama", **changes)), program("llama", *changes.items())
    channels = one(channels_of(traced, checkpoint, BLOCK), "neurons")
    found = narrow_channels([(channels, range(20))], traced, load_config(checkpoint), PROVED, "test")
    assert isinstance(found, Skipped)
    assert found.reason.startswith("no edit of the config gives every layer just its kept units")


def test_heads_under_one_norm_are_left_alone(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 1}
    checkpoint, traced = saved(tmp_path, tiny_model("olmo2", **changes)), program("olmo2", *changes.items())
    (found,) = [c for c in channels_of(traced, checkpoint, BLOCK) if isinstance(c, Skipped)]
    assert found.reason == "a norm is taken over all heads together, so that each depends on the others"
