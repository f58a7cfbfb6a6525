"""Quantised checkpoints: a weight and its companions are one thing, and layers go without dequantising."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from collapse.checkpoint import Checkpoint
from collapse.dequantise import plain_tensors
from collapse.errors import CheckpointError, PlanError, UnsupportedError
from collapse.naming import naming_of
from collapse.plan import Axis, DropLayers, IndexSet, Narrow, Reroot
from collapse.quantised.modules import Selector, module_lists
from collapse.rewrite.module_lists import module_names, require_same_modules, with_modules
from collapse.rewrite.tensors import output_tensors
from collapse.source_model import load_plain, way_of
from collapse.trace import meta_model
from tests.architectures import tiny_config
from tests.quantised_models import EXCLUDED, LISTED, WRITERS, packed, plain_model, save_quantised
from tests.replacing import replacing
from tests.tiny import PROVED, erase, export, plan_for, state

SCHEMES = tuple(WRITERS)
IDS = torch.arange(3, 25).reshape(2, 11)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    @cache
    def make(scheme: str):
        return save_quantised(scheme, tmp_path_factory.mktemp(scheme) / "source")

    return make


def dropping(checkpoint: Checkpoint, *gone: int, size: int = 3) -> DropLayers:
    prefix = "model.layers."
    tensors = tuple(t for t in checkpoint.tensors if t.startswith(tuple(f"{prefix}{n}." for n in gone)))
    return DropLayers(
        **{"pass": "test"}, site="model.layers", evidence=PROVED, prefix=prefix, size=size, tensors=tensors,
        kept=IndexSet.of(set(range(size)) - set(gone)), config={"num_hidden_layers": size - len(gone)},
    )  # fmt: skip


def narrow(tensor: str, dim: int, size: int, *rows: tuple[int, int]) -> Narrow:
    return Narrow(
        **{"pass": "test"}, site=tensor, evidence=PROVED, axes=(Axis(tensor=tensor, dim=dim),), size=size,
        kept=IndexSet(runs=rows), relabels="channels",
    )  # fmt: skip


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_group_is_read_as_the_exact_weight(source, scheme):
    checkpoint, plain = source(scheme)
    found = dict(plain_tensors(checkpoint))
    assert found.keys() == plain.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, plain[name].float()), name
    quantised = checkpoint.quantisation
    assert quantised is not None and len(quantised.groups) == 21 - (scheme in LISTED)
    assert {g.weight for g in quantised.groups} <= plain.keys()
    assert checkpoint.parameters(checkpoint.tensors) == sum(tensor.numel() for tensor in plain.values())


@pytest.mark.parametrize("gone", [0, 1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_is_dropped_without_dequantising(source, scheme, gone, tmp_path):
    checkpoint, plain = source(scheme)
    kept = [n for n in range(3) if n != gone]
    out = export(checkpoint, plan_for(checkpoint, dropping(checkpoint, gone)), tmp_path / "out")
    before, after = state(checkpoint), state(out)
    for new, old in enumerate(kept):
        own = {name: value for name, value in before.items() if name.startswith(f"model.layers.{old}.")}
        assert own == {
            f"model.layers.{old}." + name.removeprefix(f"model.layers.{new}."): value
            for name, value in after.items()
            if name.startswith(f"model.layers.{new}.")
        }
    assert len(after) == len(before) - len(dropping(checkpoint, gone).tensors)
    assert torch.equal(logits(load_plain(out).model), logits(plain_model(plain, kept)))
    entries = [e for listed in module_lists(out.config["quantization_config"]).values() for e in listed]
    expected = {0: ["model.layers.0.mlp.down_proj"], 1: [], 2: [EXCLUDED]}[gone] if scheme in LISTED else []
    assert [entry for entry in entries if "layers" in entry] == expected


@pytest.mark.parametrize("scheme", ["fp8", "gptq"])
def test_experts_are_groups_too(scheme, tmp_path):
    sizes = dict(num_local_experts=4, num_hidden_layers=2, num_key_value_heads=2)
    checkpoint, plain = save_quantised(scheme, tmp_path / "source", kind="mixtral", **sizes)
    out = export(checkpoint, plan_for(checkpoint, dropping(checkpoint, 0, size=2)), tmp_path / "out")
    assert torch.equal(logits(load_plain(out).model), logits(plain_model(plain, [1], "mixtral", **sizes)))
    assert sum("experts" in group.main for group in out.quantisation.groups) == 12
    assert load_plain(out).way == ("transformers" if scheme == "fp8" else "reference")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_half_of_a_weight_cannot_be_edited(source, scheme):
    checkpoint, _ = source(scheme)
    for group in checkpoint.quantisation.groups[:2]:
        for name in group.members:
            with pytest.raises(PlanError, match="takes out .* without .*, but they are one quantised weight"):
                apply(checkpoint, erase(name))
            rest = tuple(member for member in group.members if member != name)
            with pytest.raises(PlanError, match="they are one quantised weight"):
                apply(checkpoint, erase(*rest))
        for name in group.companions:
            with pytest.raises(PlanError, match=f"is a companion of {group.main} and is never cut without it"):
                apply(checkpoint, narrow(name, 0, 2, (0, 1)))
        apply(checkpoint, erase(*group.members))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_weights_get_no_computed_data(source, scheme):
    checkpoint, _ = source(scheme)
    for name in checkpoint.quantisation.groups[0].members:
        with pytest.raises(PlanError, match=f"{name}: the tensor is part of a quantised weight, which cannot be"):
            apply(checkpoint, replacing({name: torch.ones(2)}))
    plain = next(name for name in checkpoint.tensors if checkpoint.group(name) is None)
    new = replacing({plain: torch.ones(2)})
    assert apply(checkpoint, new)[plain].digest == new.tensors[plain]


def apply(checkpoint: Checkpoint, *rewrites):
    return {tensor.name: tensor for tensor in output_tensors(checkpoint, plan_for(checkpoint, *rewrites))}


UP = "model.layers.0.mlp.up_proj"  # [64, 32]
CUTS = [
    ("fp8", "weight", 0, (16, 48)), ("fp8", "weight", 1, (16, 32)), ("gptq", "qweight", 0, (8, 40)),
    ("awq", "qweight", 0, (8, 40)), ("awq", "qweight", 1, (16, 32)), ("int8", "weight", 0, (3, 11)),
    ("int8", "weight", 1, (3, 11)), ("compressed-fp8", "weight", 0, (3, 11)), ("compressed-fp8", "weight", 1, (1, 9)),
]  # fmt: skip


def _others(tensors, cuts):
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(tuple(f"{one}." for one in cuts))}


@pytest.mark.parametrize(("scheme", "main", "dim", "rows"), CUTS)
def test_whole_blocks_are_cut_with_their_companions(source, scheme, main, dim, rows, tmp_path):
    checkpoint, plain = source(scheme)
    size = plain[f"{UP}.weight"].shape[dim]
    cuts = [name.removesuffix(f".{main}") for name in checkpoint.tensors if name.endswith(f"mlp.up_proj.{main}")]
    assert UP in cuts
    plan = plan_for(checkpoint, *(narrow(f"{one}.{main}", dim, size, rows) for one in cuts))  # like layers alike
    out = export(checkpoint, plan, tmp_path / "out")
    found = dict(plain_tensors(out))
    for one in cuts:
        expected = plain[f"{one}.weight"].index_select(dim, torch.arange(*rows))
        assert torch.equal(found[f"{one}.weight"], expected.float())
    assert _others(state(out), cuts) == _others(state(checkpoint), cuts)


@pytest.mark.parametrize(
    ("scheme", "main", "dim", "rows", "reason"),
    [
        ("fp8", "weight", 0, (8, 48), r"rows \[8, 48\) do not begin and end between blocks of 16"),
        ("fp8", "weight", 1, (0, 24), r"rows \[0, 24\) do not begin and end between blocks of 16"),
        ("gptq", "qweight", 0, (0, 12), r"blocks of 8 that share a scale or word"),
        ("gptq", "qweight", 1, (0, 16), r"cannot be cut here: its g_idx counts groups of input channels"),
        ("awq", "qweight", 1, (0, 8), r"blocks of 16"),
        ("compressed-int4", "weight_packed", 0, (0, 8), r"its weight_shape holds the shape"),
        ("nf4", "weight", 0, (0, 2), r"its quant_state holds the shape"),
    ],
)
def test_other_cuts_are_refused_with_the_reason(source, scheme, main, dim, rows, reason):
    checkpoint, plain = source(scheme)
    with pytest.raises(PlanError, match=reason):
        apply(checkpoint, narrow(f"{UP}.{main}", dim, plain[f"{UP}.weight"].shape[dim], rows))


def test_rows_are_counted_as_the_weight_has_them(source):
    checkpoint, _ = source("gptq")
    with pytest.raises(PlanError, match="has 64 rows, the plan says 4"):
        apply(checkpoint, narrow(f"{UP}.qweight", 0, 4, (0, 2)))
    with pytest.raises(PlanError, match="the tensor has 2 dimensions"):
        apply(checkpoint, narrow(f"{UP}.qweight", 2, 4, (0, 2)))


def edited(checkpoint: Checkpoint, root, quantization=None, tensors=None) -> None:
    """Copy a checkpoint with another quantization_config, or with other tensors."""
    root.mkdir()
    config = dict(checkpoint.config) | {"quantization_config": quantization or checkpoint.config["quantization_config"]}
    if quantization == {}:
        del config["quantization_config"]
    (root / "config.json").write_text(json.dumps(config))
    held = load_file(checkpoint.root / "model.safetensors")
    save_file(tensors(held) if tensors else held, root / "model.safetensors")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"quant_method": "quip"}, "quant_method 'quip' of quantization_config is not known"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
        ({"bits": 4}, "quant_method None"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3 is not known"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int64"}, "pack_dtype 'int64'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic '\\+:"),
        ({"quant_method": "compressed-tensors", "quantization_status": "initialized"}, "status 'initialized'"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparse-24-bitmask",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"g": {"weights": {"num_bits": 4}}},
            },
            "format 'nvfp4-pack-quantized'",
        ),
        ({"quant_method": "fp8", "weight_block_size": 3}, "weight_block_size 3"),
        ({"quant_method": ["gptq"]}, "quantization_config is not understood"),
        ({"quant_method": "gptq", "bits": [4]}, "quantization_config is not understood"),
        ({"quant_method": "fp8", "weight_block_size": ["a", 1]}, "quantization_config is not understood"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "quantization_config is not understood"),
    ],
)
def test_what_is_not_known_is_refused_by_name_before_anything_is_read(tmp_path, values, named):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": values}))
    with pytest.raises(UnsupportedError, match=named):  # there are no weights here at all
        Checkpoint.open(tmp_path)
    text = {"model_type": "llava", "text_config": {"quantization_config": values}}
    (tmp_path / "config.json").write_text(json.dumps(text))
    with pytest.raises(UnsupportedError, match="text_config.quantization_config"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_tensors_without_a_config_are_refused(source, scheme, tmp_path):
    checkpoint, _ = source(scheme)
    edited(checkpoint, tmp_path / "bare", quantization={})
    with pytest.raises(
        UnsupportedError, match="is quantised, as .* beside it says, but there is no quantization_config"
    ):
        Checkpoint.open(tmp_path / "bare")
    other = {"quant_method": "fp8"} if scheme in {"gptq", "awq"} else {"quant_method": "gptq", "bits": 4}
    edited(checkpoint, tmp_path / "other", quantization=other)
    with pytest.raises(UnsupportedError, match="but quant_method is (gptq|fp8)"):
        Checkpoint.open(tmp_path / "other")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_weight_without_a_companion_is_refused(source, scheme, tmp_path):
    checkpoint, _ = source(scheme)
    group = checkpoint.quantisation.groups[0]
    needed = group.stem + group.form.required[0]
    edited(checkpoint, tmp_path / "half", tensors=lambda held: {n: t for n, t in held.items() if n != needed})
    with pytest.raises(CheckpointError, match=f"the quantised weight has no {needed}"):
        Checkpoint.open(tmp_path / "half")
    edited(checkpoint, tmp_path / "rest", tensors=lambda held: {n: t for n, t in held.items() if n != group.main})
    with pytest.raises(CheckpointError, match="is a companion of a quantised weight that is not there"):
        Checkpoint.open(tmp_path / "rest")


@pytest.mark.parametrize("gone", [("absmax",), ("quant_map",), ("absmax", "quant_map")])
def test_scales_that_are_quantised_need_both_of_their_own_companions(source, gone, tmp_path):
    checkpoint, _ = source("double-nf4")
    names = {f"{checkpoint.quantisation.groups[0].stem}weight.nested_{part}" for part in gone}
    edited(checkpoint, tmp_path / "half", tensors=lambda held: {n: t for n, t in held.items() if n not in names})
    with pytest.raises(CheckpointError, match=f"the quantised weight has no {min(names)}"):
        Checkpoint.open(tmp_path / "half")


@pytest.mark.parametrize("scheme", ["gptq", "awq"])
@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_a_packed_weight_without_rows_and_columns_is_refused(source, scheme, part, tmp_path):
    checkpoint, _ = source(scheme)
    name = next(name for name in checkpoint.tensors if name.endswith(part))
    edited(checkpoint, tmp_path / "flat", tensors=lambda held: held | {name: held[name].flatten()})
    with pytest.raises(CheckpointError, match="not rows and columns"):
        Checkpoint.open(tmp_path / "flat")


def test_an_expression_that_would_speak_of_another_layer_is_refused(source, tmp_path):
    checkpoint, _ = source("compressed-fp8")
    values = checkpoint.config["quantization_config"] | {"ignore": [r"re:.*layers\.1\.mlp\.down_proj"]}
    edited(checkpoint, tmp_path / "re", quantization=values)
    changed = Checkpoint.open(tmp_path / "re")
    with pytest.raises(PlanError, match=r"ignore: speaks of model.layers.1.mlp.down_proj, but of model.layers.0.mlp"):
        apply(changed, dropping(changed, 0))
    with pytest.raises(PlanError, match=r"quantization_config\.ignore"):
        apply(changed, dropping(changed, 1))  # what was layer 2 would be left alone, but it is quantised
    apply(changed, dropping(changed, 2))


def test_half_of_a_weight_cannot_be_renamed(source):
    checkpoint, _ = source("fp8")
    group = checkpoint.quantisation.groups[0]
    whole = dict(
        site="model", evidence=PROVED, config_root="", fields=("model_type", "quantization_config"), tensors=()
    )
    wrong = Reroot(**{"pass": "test"}, **whole, names=((group.companions[0], "elsewhere"), ("", "")))
    with pytest.raises(PlanError, match="would call one quantised weight .* and elsewhere"):
        apply(checkpoint, wrong)


def test_entries_of_lists_are_paths_their_ends_or_expressions():
    select = Selector(["lm_head", "layers.1.mlp", r"re:.*gate$", r"-:model\.visual.*"])
    assert [select(m) for m in ("lm_head", "model.layers.1.mlp", "a.b.gate", "model.visual.x")] == [True] * 4
    assert not any(map(select, ("model.layers.11.mlp", "a.gate_proj", "model.layers.1")))


def biased(value: float):
    return lambda written: {"model.layers.0.self_attn.q_proj.bias": torch.full((32,), value)}


def test_a_bias_that_the_plain_model_has_no_place_for_must_be_zero(tmp_path):
    found = load_plain(save_quantised("gptq", tmp_path / "zero", extra=biased(0.0))[0])
    assert set(found.keys["unexpected_keys"]) == {"model.layers.0.self_attn.q_proj.bias"}
    with pytest.raises(CheckpointError, match="q_proj.bias: is not zero"):
        load_plain(save_quantised("gptq", tmp_path / "one", extra=biased(1.0))[0])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["model.language_model.layers.2.mlp", "lm_head"], ["model.language_model.layers.1.mlp", "lm_head"]),
        (["language_model.model.layers.2"], ["language_model.model.layers.1"]),
        (["layers.2.mlp.gate", "layers.1.mlp.gate"], ["layers.1.mlp.gate"]),
        (["visual.layers.2.mlp", "mlp.gate", "fc1"], ["visual.layers.2.mlp", "mlp.gate", "fc1"]),
        (["model.layers.7.mlp", r"re:.*layers\.2\.x"], ["model.layers.7.mlp", r"re:.*layers\.2\.x"]),
    ],
)
@pytest.mark.parametrize("place", ["", "text_config."])
def test_numbers_of_layers_in_lists_follow(before, after, place):
    """Layer 1 of 3 goes; the files call the list one thing and the model another."""
    part = {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": before}}
    drop = DropLayers(
        **{"pass": "test"}, site="model.language_model.layers", evidence=PROVED, tensors=(), size=3,
        prefix="language_model.model.layers.", kept=IndexSet.of([0, 2]),
    )  # fmt: skip
    changed = with_modules({"text_config": part} if place else part, [drop], [])
    found = changed["text_config"] if place else changed
    assert found["quantization_config"]["modules_to_not_convert"] == after
    assert part["quantization_config"]["modules_to_not_convert"] == before


def test_an_expression_in_the_models_names_is_looked_at_too():
    """The files call it language_model.model.layers; the list has what the model calls it."""
    values = {"quant_method": "fp8", "modules_to_not_convert": [r"model\.language_model\.layers\.2\.mlp"]}
    drop = DropLayers(
        **{"pass": "test"}, site="model.language_model.layers", evidence=PROVED, tensors=(), size=3,
        prefix="language_model.model.layers.", kept=IndexSet.of([0, 2]),
    )  # fmt: skip
    config = {"quantization_config": values}
    names = [
        module_names([drop], [], f"{drop.prefix}{old}.mlp", f"{drop.prefix}{new}.mlp") for old, new in ((0, 0), (2, 1))
    ]
    with pytest.raises(PlanError, match="speaks of model.language_model.layers.2.mlp, but of .*layers.1.mlp"):
        require_same_modules(config, with_modules(config, [drop], []), names)


def test_towers_leave_the_lists_with_their_tensors():
    from_whole = dict(names=(("language_model.", ""),), modules=(("model.language_model.", "model."), ("", "")))
    rooted = Reroot(
        **{"pass": "test"}, site="text_config", evidence=PROVED, config_root="text_config", fields=(), **from_whole,
        tensors=("vision_tower.blocks.0.proj.weight", "vision_tower.blocks.0.proj.weight_scale_inv"),
    )  # fmt: skip
    entries = ["model.vision_tower", "vision_tower.blocks.0", "lm_head", "model.language_model.layers.0", "mlp.gate"]
    config = {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": [*entries, "re:.*visual.*"]}}
    config["quantization_config"]["block_name_to_quantize"] = "model.language_model.layers"
    found = with_modules(config, [], [rooted])["quantization_config"]
    assert found["modules_to_not_convert"] == ["lm_head", "model.layers.0", "mlp.gate", "re:.*visual.*"]
    assert found["block_name_to_quantize"] == "model.layers"


def read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    return dict(plain_tensors(checkpoint))[name]


def bare(root, values, tensors) -> Checkpoint:
    """A checkpoint of a few tensors; no model is built of it."""
    root.mkdir()
    (root / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": values}))
    save_file(tensors, root / "model.safetensors")
    return Checkpoint.open(root)


def test_a_last_block_may_be_smaller(tmp_path):
    """transformers takes rows / scales for the block's size, 12 here, so the reference reads it."""
    weight, scale = torch.ones(24, 32).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    values = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    checkpoint = bare(tmp_path / "source", values, {"a.weight": weight, "a.weight_scale_inv": scale})
    assert way_of(checkpoint) == "reference"
    expected = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)[:24]
    assert torch.equal(read(checkpoint, "a.weight"), expected)
    out = export(checkpoint, plan_for(checkpoint, narrow("a.weight", 0, 24, (16, 24))), tmp_path / "out")
    assert torch.equal(read(out, "a.weight"), expected[16:])
    with pytest.raises(PlanError, match=r"rows \[0, 20\) do not begin and end between blocks of 16"):
        apply(checkpoint, narrow("a.weight", 0, 24, (0, 20)))


def test_merged_experts_are_cut_by_expert_and_by_block(tmp_path):
    weight = torch.randint(-8, 9, (4, 32, 16)).float().to(torch.float8_e4m3fn)
    scale = torch.randint(1, 9, (4, 2, 1)).float()
    tensors = {"experts.gate_up_proj": weight, "experts.gate_up_proj_scale_inv": scale}
    values = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    checkpoint = bare(tmp_path / "source", values, tensors)
    expected = weight.float() * scale.repeat_interleave(16, 1)
    assert torch.equal(read(checkpoint, "experts.gate_up_proj"), expected)
    cuts = (narrow("experts.gate_up_proj", 0, 4, (1, 3)), narrow("experts.gate_up_proj", 1, 32, (16, 32)))
    out = export(checkpoint, plan_for(checkpoint, *cuts), tmp_path / "out")
    assert torch.equal(read(out, "experts.gate_up_proj"), expected[1:3, 16:])
    assert out.tensors["experts.gate_up_proj_scale_inv"].shape == (2, 1, 1)


@pytest.mark.parametrize(
    ("shape", "spread", "weights"),
    [((1,), (32, 32), {"strategy": "tensor"}), ((32, 2), (1, 16), {"strategy": "group", "group_size": 16}),
     ((2, 2), (16, 16), {"strategy": "block", "block_structure": [16, 16]})],
)  # fmt: skip
def test_scales_for_all_groups_and_blocks(tmp_path, shape, spread, weights):
    weight, scale = torch.randint(-100, 100, (32, 32)).to(torch.int8), torch.randint(1, 9, shape) / 8
    zero = torch.randint(-9, 9, shape).to(torch.int8)
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", **weights}}
    values = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"g": group}}
    tensors = {"a.weight": weight, "a.weight_scale": scale, "a.weight_zero_point": zero}
    checkpoint = bare(tmp_path / "source", values, tensors)
    large, moved = (t.float().reshape(-1, shape[-1]).repeat_interleave(spread[0], 0) for t in (scale, zero))
    large, moved = (t.repeat_interleave(spread[1], 1) for t in (large, moved))
    assert torch.equal(read(checkpoint, "a.weight"), (weight - moved) * large)
    out = export(checkpoint, plan_for(checkpoint, narrow("a.weight", 0, 32, (16, 32))), tmp_path / "out")
    assert torch.equal(read(out, "a.weight"), ((weight - moved) * large)[16:])


@pytest.mark.parametrize("bits", [2, 8])
def test_other_widths_and_the_second_format_of_gptq(tmp_path, bits):
    codes, zeros = torch.randint(0, 1 << bits, (16, 32)), torch.randint(0, 1 << bits, (1, 16))
    scale = torch.randint(1, 9, (1, 16)).half()
    tensors = {
        "a.qweight": packed(codes, bits).T.contiguous(), "a.qzeros": packed(zeros, bits), "a.scales": scale,
        "a.g_idx": torch.zeros(32, dtype=torch.int32),
    }  # fmt: skip
    values = {"quant_method": "gptq", "bits": bits, "group_size": -1, "checkpoint_format": "gptq_v2"}
    checkpoint = bare(tmp_path / "source", values, tensors)
    expected = (codes - zeros.T).float() * scale.T.float()
    assert torch.equal(read(checkpoint, "a.weight"), expected)
    out = export(checkpoint, plan_for(checkpoint, narrow("a.qweight", 1, 32, (16, 32))), tmp_path / "out")
    assert torch.equal(read(out, "a.weight"), expected[:, 16:])  # one group: its channels can go


def test_numbers_of_dropped_layers_and_of_dropped_experts_both_follow():
    entries = ["model.layers.2.mlp.experts.3.w1", "model.layers.2.mlp.experts.0", "model.layers.0.mlp", "mlp.experts.3"]
    layers = DropLayers(
        **{"pass": "test"}, site="model.layers", evidence=PROVED, tensors=(), size=3, prefix="model.layers.",
        kept=IndexSet.of([0, 2]),
    )  # fmt: skip
    path = "model.layers.2.mlp.experts"
    experts = layers.model_copy(update={"site": path, "prefix": f"{path}.", "size": 4, "kept": IndexSet.of([1, 2, 3])})
    config = {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": entries}}
    for order in ([layers, experts], [experts, layers]):
        found = with_modules(config, order, [])["quantization_config"]["modules_to_not_convert"]
        assert found == ["model.layers.1.mlp.experts.2.w1", "model.layers.0.mlp", "mlp.experts.3"]


def test_a_scheme_that_is_not_known_does_not_stop_the_counting_of_a_config():
    config = tiny_config("llama", quantization_config={"quant_method": "quip"})
    assert naming_of(meta_model(config)).scheme is None


def test_scales_can_be_exponents(tmp_path):
    weight, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.tensor([[129]], dtype=torch.uint8)
    values = {"quant_method": "fp8", "weight_block_size": [16, 16], "scale_fmt": "ue8m0"}
    checkpoint = bare(tmp_path / "source", values, {"a.weight": weight, "a.weight_scale_inv": scale})
    assert torch.equal(read(checkpoint, "a.weight"), torch.full((16, 16), 4.0))


def test_a_weight_that_only_simulates_quantisation_is_refused(tmp_path):
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
    values = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": group}}
    tensors = {"a.weight": torch.ones(4, 4).half(), "a.weight_scale": torch.ones(4, 1)}
    with pytest.raises(UnsupportedError, match=r"a\.weight: is F16 and yet has a\.weight_scale"):
        bare(tmp_path / "source", values, tensors)
