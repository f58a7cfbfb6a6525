"""What each pass takes, and what it must leave alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from collapse.passes.dead_module import DeadModule, candidate_sites, native_switch
from collapse.passes.positions import Positions
from collapse.passes.unread_weights import UnreadWeights
from collapse.passes.vocabulary import Vocabulary
from collapse.schema import InputSchema
from collapse.sequences import Sequences
from tests.architectures import save_tiny, tiny_model
from tests.contexts import context_of
from tests.test_trace import program_of


def bounded(length: int) -> InputSchema:
    return InputSchema(type="text", tokens=tuple(range(48)), max_tokens=length)


def edit_weights(root, change):
    path = root / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def unread(root, kind="llama"):
    return UnreadWeights().propose(context_of(root, bounded(16), program=program_of(kind)))


def test_a_whole_checkpoint_has_nothing_unread_and_says_so(tmp_path):
    proposal = unread(save_tiny("llama", tmp_path))
    assert proposal.rewrites == ()
    assert [s.reason for s in proposal.skipped] == [
        "every tensor in the files is claimed by a module and read by the traced graph"
    ]


def test_a_tensor_that_no_module_claims_goes_as_proved(tmp_path):
    root = save_tiny("llama", tmp_path)
    edit_weights(root, lambda t: t.update({"visual.extra.weight": torch.ones(3, 2)}))
    proposal = unread(root)
    (erase,) = proposal.rewrites
    assert (erase.site, erase.tensors) == ("visual", ("visual.extra.weight",))
    assert (erase.evidence.grade, erase.evidence.figures["bytes"]) == ("proved", 24)


def test_an_auxiliary_head_goes_as_one_site_though_transformers_passes_over_it_silently(tmp_path):
    root = save_tiny("deepseek_v3", tmp_path)
    head = {f"model.layers.61.{name}": torch.ones(2, 2) for name in ("enorm.weight", "shared_head.head.weight")}
    edit_weights(root, lambda t: t.update(head))
    (erase,) = UnreadWeights().propose(context_of(root, bounded(16))).rewrites
    assert (erase.site, erase.tensors) == ("model.layers.61", tuple(sorted(head)))
    assert erase.evidence.figures == {"bytes": 32, "parameters": 8}


def test_stored_buffers_that_the_model_computes_go(tmp_path):
    root = save_tiny("llama", tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(root, lambda t: t.update({name: torch.ones(2)}))
    (erase,) = unread(root).rewrites
    assert erase.tensors == (name,)
    assert "the model computes this buffer itself" in erase.evidence.claim


def test_experts_that_are_merged_on_loading_are_claimed(tmp_path):
    assert unread(save_tiny("mixtral", tmp_path), "mixtral").rewrites == ()


def test_a_tied_copy_of_the_same_bytes_goes_and_the_embedding_stays(tmp_path):
    root = save_tiny("llama", tmp_path)
    edit_weights(root, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    (erase,) = unread(root).rewrites
    assert erase.tensors == ("lm_head.weight",)


def test_a_tied_copy_with_other_bytes_stays(tmp_path):
    root = save_tiny("llama", tmp_path)
    edit_weights(root, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    assert unread(root).rewrites == ()


@pytest.mark.parametrize(("kind", "table", "field", "offset"), [
    ("gpt2", "transformer.wpe.weight", "n_positions", 0),
    ("opt", "model.decoder.embed_positions.weight", "max_position_embeddings", 2),
])  # fmt: skip
def test_positions_beyond_the_bound_go(tmp_path, kind, table, field, offset):
    context = context_of(save_tiny(kind, tmp_path), bounded(10), program=program_of(kind))
    (narrow,) = Positions().propose(context).rewrites
    assert [axis.tensor for axis in narrow.axes] == [table]
    assert narrow.kept.runs == ((0, 10 + offset),)
    assert narrow.config == {field: 10}
    assert narrow.evidence.grade == "proved"


@pytest.mark.parametrize("length", [32, 40])
def test_positions_stay_when_the_bound_reaches_the_last_row(tmp_path, length):
    context = context_of(save_tiny("gpt2", tmp_path), bounded(length), program=program_of("gpt2"))
    proposal = Positions().propose(context)
    assert proposal.rewrites == ()
    assert "every row can occur" in proposal.skipped[0].reason


def test_positions_stay_without_a_bound(tmp_path):
    schema = InputSchema(type="text", tokens=tuple(range(48)))
    drawn = Sequences(((1, 2),), ((1, 2),))
    context = context_of(save_tiny("gpt2", tmp_path), schema, program=program_of("gpt2"), drawn=drawn)
    proposal = Positions().propose(context)
    assert proposal.rewrites == ()
    assert "no max_tokens" in proposal.skipped[0].reason


def test_rotary_models_have_no_position_table(tmp_path):
    context = context_of(save_tiny("llama", tmp_path), bounded(10), program=program_of("llama"))
    assert Positions().propose(context).skipped[0].reason == "the graph looks up no learned position table"


def test_no_module_of_a_model_in_use_is_dead(tmp_path):
    context = context_of(save_tiny("llama", tmp_path), bounded(16), program=program_of("llama"))
    proposal = DeadModule().propose(context)
    assert proposal.rewrites == ()
    assert len(proposal.skipped) == 5
    assert all(skipped.reason.startswith("alive") for skipped in proposal.skipped)


def test_a_dead_module_that_the_layout_cannot_leave_out_is_a_near_miss(tmp_path):
    root = save_tiny("llama", tmp_path)
    edit_weights(root, lambda t: t["model.layers.1.mlp.down_proj.weight"].zero_())
    proposal = DeadModule().propose(context_of(root, bounded(16), program=program_of("llama")))
    assert proposal.rewrites == ()
    (stuck,) = [s for s in proposal.skipped if s.site == "model.layers.1.mlp"]
    assert "cannot leave this module out" in stuck.reason


def test_candidates_lie_in_blocks_and_neither_embedding_nor_head_is_one():
    sites = candidate_sites(tiny_model("llama"))
    assert "model.layers.0" in sites
    assert "model.layers.2.self_attn.q_proj" in sites
    assert not {"model", "model.embed_tokens", "lm_head", "model.norm"} & set(sites)


def test_the_switch_is_the_architectures_to_declare():
    from collapse.models import AdaptiveLlamaConfig

    adaptive = AdaptiveLlamaConfig(num_hidden_layers=2)
    site = "model.layers.1.self_attn.position_adaptive_bias"
    assert native_switch(adaptive, site) == {"position_adaptive_bias.1": False}
    assert native_switch(adaptive, "model.layers.1.self_attn") is None
    assert native_switch(tiny_model("llama").config, site) is None


def vocabulary(root, kind="llama", **changes):
    schema = InputSchema(type="text", tokens=(0, 1, 5, 9), max_tokens=16)
    drawn = Sequences(calibration=(), held_out=())
    context = context_of(root, schema, drawn=drawn, program=program_of(kind))
    return Vocabulary().propose(replace(context, **changes))


def test_token_tables_are_cut_where_the_padding_id_is_renumbered_too(tmp_path):
    (narrow,) = vocabulary(save_tiny("llama", tmp_path, pad_token_id=40)).rewrites
    assert (list(narrow.kept), narrow.config) == ([0, 1, 2, 5, 9, 40], {"vocab_size": 6})


def test_a_token_table_whose_rows_no_field_says_stays(tmp_path):
    program = program_of("llama")
    wide = replace(program, shapes={**program.shapes, "model.norm.weight": (48,)})
    (skipped,) = vocabulary(save_tiny("llama", tmp_path), program=wide).skipped
    assert "no fields that give all token tables fewer rows" in skipped.reason


def test_token_tables_of_different_sizes_stay(tmp_path):
    root = save_tiny("llama", tmp_path, tie_word_embeddings=False)
    edit_weights(root, lambda t: t.update({"lm_head.weight": torch.ones(50, 16)}))
    (skipped,) = vocabulary(root).skipped
    assert "different numbers of rows: [48, 50]" in skipped.reason
