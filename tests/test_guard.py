"""The guard of a loaded model: what is outside the schema is refused by name, what is inside runs as before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, StaticCache
from transformers.generation.configuration_utils import CompileConfig

from collapse import load
from collapse.analysis.stand_in import StandIn, short_circuited
from collapse.checkpoint import Checkpoint
from collapse.errors import CollapseError, SchemaError
from collapse.manifest import load_manifest
from collapse.plan import DropLayers, Evidence, IndexSet, Plan, Reroot, ShortCircuit, Specialise
from collapse.runtime.fuse import SiteCounts
from collapse.runtime.guard import check, make_guard
from collapse.runtime.reliance import reliance
from collapse.schema import InputSchema
from tests.exported import EMBEDDING, KEPT
from tests.tiny import PROVED, export, plan_for, positions, tiny_gpt2, tiny_llama, vocabulary

LIMIT, ROWS = 24, len(KEPT)
FULL = CompileConfig(backend="eager", mode=None, fullgraph=True)
FULL._compile_all_devices = True
CERTIFIED = Evidence(grade="certified", claim="it is so", method="by hand")
BOUNDED = Evidence(grade="proved", claim="it is so", method="by hand", figures={"max_tokens": LIMIT})
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def planned(source: Checkpoint, *rewrites: Any, **clauses: Any) -> Plan:
    schema = InputSchema(**{"type": "log", **clauses})
    return plan_for(source, *rewrites, schema=schema.to_json(), schema_digest=schema.digest)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny_llama(tmp_path_factory.mktemp("source") / "llama")


@pytest.fixture(scope="module")
def narrowed(source: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 39 of 64 ids, for at most 24 tokens."""
    plan = planned(source, vocabulary(KEPT, EMBEDDING), max_tokens=LIMIT, charset="ascii")
    return export(source, plan, tmp_path_factory.mktemp("narrowed") / "out").root


@pytest.fixture(scope="module")
def model(narrowed: Path) -> PreTrainedModel:
    return load(narrowed)


@pytest.fixture(scope="module")
def unguarded(narrowed: Path) -> PreTrainedModel:
    return load(narrowed, guard="off")


def ids(length: int, *rows: int) -> torch.Tensor:
    return torch.stack([torch.arange(start, start + length) % ROWS for start in rows or (3,)])


def padded(*zeros: tuple[int, ...], length: int = 8) -> torch.Tensor:
    """A mask with one row for each tuple of columns that are padding."""
    return torch.tensor([[int(column not in row) for column in range(length)] for row in zeros])


# --- Within the schema: nothing is raised, and the logits are those of the unguarded model. ---------------


@pytest.mark.parametrize(
    "call",
    [
        {"input_ids": ids(LIMIT)},
        {"input_ids": ids(1)},
        {"input_ids": torch.tensor([[0, ROWS - 1]])},
        {"input_ids": ids(8), "attention_mask": padded(())},
        {"input_ids": ids(8, 3, 5), "attention_mask": padded((0, 1, 2), ())},
        {"input_ids": ids(8, 3, 5), "attention_mask": padded(tuple(range(8)), ()).bool()},
        {"input_ids": ids(8), "labels": ids(8), "position_ids": torch.arange(8)[None]},
        {"input_ids": ids(8), "token_type_ids": torch.zeros(1, 8), "pixel_values": None, "images": []},
        {"input_ids": ids(8), "output_attentions": False, "num_items_in_batch": torch.tensor(8)},
    ],
)
def test_calls_within_the_schema_are_left_alone(
    model: PreTrainedModel, unguarded: PreTrainedModel, call: dict[str, Any]
) -> None:
    assert torch.equal(model(**call).logits, unguarded(**call).logits)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 2},
        {"cache_implementation": "static", "compile_config": FULL},
    ],
)
def test_generation_up_to_the_limit_is_unchanged_and_beyond_it_is_refused(
    model: PreTrainedModel, unguarded: PreTrainedModel, options: dict[str, Any]
) -> None:
    prompt = ids(10, 3) if "prompt_lookup_num_tokens" in options else ids(10, 3, 6)
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    call = {"attention_mask": mask, **GREEDY, **options}
    found = model.generate(prompt, max_new_tokens=LIMIT - 10, **call)
    assert found.shape[1] == LIMIT
    assert torch.equal(found, unguarded.generate(prompt, max_new_tokens=LIMIT - 10, **call))
    with pytest.raises(SchemaError, match=f"break max_tokens {LIMIT}"):
        model.generate(prompt, max_new_tokens=LIMIT, **call)


def test_a_last_token_that_is_never_fed_back_is_not_counted(model: PreTrainedModel) -> None:
    assert model.generate(ids(10), max_new_tokens=LIMIT - 9, **GREEDY).shape[1] == LIMIT + 1


def test_what_fills_the_padding_is_no_token_of_the_input(tmp_path: Path, source: Checkpoint) -> None:
    listed = load(export(source, planned(source, tokens=[3, 4]), tmp_path / "out").root)
    tokens, mask = torch.tensor([[9, 9, 3, 4]]), torch.tensor([[0, 0, 1, 1]])
    assert listed(tokens, attention_mask=mask).logits.shape == (1, 4, 64)
    with pytest.raises(SchemaError, match="token id 9 breaks tokens"):
        listed(tokens)


def test_listed_ids_are_those_of_inputs_outputs_and_config(tmp_path: Path, source: Checkpoint) -> None:
    plan = planned(source, tokens=[3, 4], output={"tokens": [7]})
    listed = load(export(source, plan, tmp_path / "out").root)
    assert (listed.config.bos_token_id, listed.config.eos_token_id) == (1, 2)
    listed(torch.tensor([[1, 3, 4, 7, 2]]))
    with pytest.raises(SchemaError) as caught:
        listed(torch.tensor([[3, 3], [4, 5]]))
    assert str(caught.value) == (
        "input_ids, row 1, position 1: token id 5 breaks tokens: it is not among the 2 ids of the schema; "
        'change the input, or load with guard="off", which promises nothing'
    )


def test_listed_ids_follow_the_renumbering(tmp_path: Path, source: Checkpoint) -> None:
    plan = planned(source, vocabulary(KEPT, EMBEDDING), tokens=[5, 6, 63])
    listed = load(export(source, plan, tmp_path / "out").root)
    listed(torch.tensor([[3, 4, ROWS - 1, 1, 2]]))  # 5, 6, 63, and the config's own
    with pytest.raises(SchemaError, match=r"token id 5 \(id 7 of the source\) breaks tokens: .* the 3 ids"):
        listed(torch.tensor([[3, 5]]))


def test_special_tokens_of_the_tokenizer_may_occur_and_others_may_not(tmp_path: Path, source: Checkpoint) -> None:
    plan = planned(source, tokens=[3])
    out = export(source, plan, tmp_path / "out").root
    added = [{"id": 9, "content": "<a>", "special": True}, {"id": 8, "content": "b", "special": False}]
    (out / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    listed = load(out)
    listed(torch.tensor([[3, 9]]))
    with pytest.raises(SchemaError, match="token id 8 breaks tokens"):
        listed(torch.tensor([[3, 8]]))


@pytest.mark.parametrize("output", [{"charset": "ascii"}, {"corpus": ["answers.txt"]}])
def test_outputs_that_are_not_listed_can_be_any_id(tmp_path: Path, source: Checkpoint, output: Any) -> None:
    listed = load(export(source, planned(source, tokens=[3], output=output), tmp_path / "out").root)
    listed(torch.tensor([[3, 50]]))


def test_without_a_bound_every_length_that_the_model_takes_is_right(tmp_path: Path, source: Checkpoint) -> None:
    unbounded = load(export(source, planned(source, charset="ascii"), tmp_path / "out").root)
    unbounded(torch.arange(60)[None])


def test_off_means_off(unguarded: PreTrainedModel) -> None:
    assert not unguarded._forward_pre_hooks
    assert unguarded(ids(LIMIT + 1), pixel_values=torch.ones(1)).logits.shape == (1, LIMIT + 1, ROWS)


# --- Outside of it: one line, with the clause, the reason and what to do. ---------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            {"input_ids": ids(LIMIT + 1)},
            "input_ids: 25 tokens (0 in the cache, 25 new) break max_tokens 24; shorten the input or generate less, "
            'or load with guard="off", which promises nothing',
        ),
        (
            {"input_ids": torch.tensor([[1, 2], [3, ROWS]])},
            "input_ids, row 1, position 1: token id 39 is outside the model's 39 ids (vocabulary kept 39 of 64 ids); "
            "encode with the tokenizer that was written beside the model",
        ),
        (
            {"input_ids": torch.tensor([[1, -100]])},
            "input_ids, row 0, position 1: token id -100 is outside the model's 39 ids (vocabulary kept 39 of 64 ids); "
            "encode with the tokenizer that was written beside the model",
        ),
        (
            {"input_ids": ids(8), "pixel_values": torch.ones(1, 3, 4, 4)},
            "pixel_values: breaks modality text: the model was collapsed for token ids alone; give input_ids without "
            'it, or load with guard="off", which promises nothing',
        ),
        (
            {"input_ids": ids(1), "position_ids": torch.tensor([[LIMIT]])},
            "position_ids: position 24 breaks max_tokens 24: the last one is 23; give smaller ones, or load with "
            'guard="off", which promises nothing',
        ),
        (
            {"inputs_embeds": torch.ones(1, 8, 32)},
            "inputs_embeds: breaks modality text: of embeddings nobody can say which tokens they are; give input_ids "
            'without it, or load with guard="off", which promises nothing',
        ),
        (
            {"input_ids": ids(8), "attention_mask": padded((6, 7))},
            "attention_mask: zeros after a token break padding left; pad on the left, or load with "
            'guard="off", which promises nothing',
        ),
    ],
)
def test_each_clause_has_its_line(model: PreTrainedModel, call: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        model(**call)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image_grid_thw", torch.ones(1, 3, dtype=torch.long)),
        ("images", [np.zeros((2, 2, 3))]),
        ("pixel_values_videos", torch.ones(1)),
        ("input_features", torch.ones(1, 80, 4)),
        ("audio_values", torch.ones(1)),
        ("encoder_hidden_states", torch.ones(1, 2, 32)),
        ("something_else", torch.ones(1)),
    ],
)
def test_no_other_data_than_token_ids_is_swallowed(model: PreTrainedModel, name: str, value: Any) -> None:
    with pytest.raises(SchemaError, match=f"^{name}: breaks modality text"):
        model(input_ids=ids(8), **{name: value})


def test_positions_within_the_bound_and_an_old_name_for_them_are_left_alone(
    model: PreTrainedModel, unguarded: PreTrainedModel
) -> None:
    call = {"input_ids": ids(2), "position_ids": torch.tensor([[LIMIT - 2, LIMIT - 1]])}
    found = model(**call, cache_position=torch.tensor([LIMIT - 2, LIMIT - 1])).logits
    assert torch.equal(found, unguarded(**call).logits)


def test_a_mask_may_be_given_by_position(model: PreTrainedModel) -> None:
    model(ids(8), padded(()))
    with pytest.raises(SchemaError, match="break padding left"):
        model(ids(8), padded((7,)))


def test_the_cache_counts(model: PreTrainedModel) -> None:
    grown = model(ids(LIMIT - 1), use_cache=True)
    cache = getattr(grown, "cache", None) or grown.past_key_values
    name = "cache" if hasattr(grown, "cache") else "past_key_values"
    model(ids(1), **{name: cache})
    with pytest.raises(SchemaError, match=r"25 tokens \(24 in the cache, 1 new\)"):
        model(ids(1), **{name: cache})
    static = StaticCache(config=model.config, max_cache_len=40)
    model(ids(20), **{name: static})
    with pytest.raises(SchemaError, match=r"25 tokens \(20 in the cache, 5 new\)"):
        model(ids(5), **{name: static})


def test_a_cache_that_does_not_count_is_as_long_as_the_mask_says(model: PreTrainedModel, narrowed: Path) -> None:
    guard, states = make_guard(load_manifest(narrowed).plan, model, narrowed), object()
    check(guard, (ids(8),), {"cache_params": states})
    check(guard, (ids(1),), {"cache_params": states, "attention_mask": padded((), length=LIMIT)})
    with pytest.raises(SchemaError, match=r"25 tokens \(24 in the cache, 1 new\)"):
        check(guard, (ids(1),), {"cache_params": states, "attention_mask": padded((), length=LIMIT + 1)})


def test_inputs_embeds_are_refused_in_generation(model: PreTrainedModel) -> None:
    with pytest.raises(SchemaError, match=r"^inputs_embeds: breaks modality text"):
        model.generate(inputs_embeds=torch.ones(1, 4, 32), max_new_tokens=2, **GREEDY)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}])
def test_padding_none_takes_no_padding(tmp_path: Path, source: Checkpoint, options: dict[str, Any]) -> None:
    strict = load(export(source, planned(source, padding="none", charset="ascii"), tmp_path / "out").root)
    whole, left = padded((), ()), padded((), (0,))
    assert strict.generate(ids(8, 3, 5), attention_mask=whole, max_new_tokens=4, **GREEDY, **options).shape == (2, 12)
    with pytest.raises(SchemaError) as caught:
        strict.generate(ids(8, 3, 5), attention_mask=left, max_new_tokens=4, **GREEDY, **options)
    assert str(caught.value) == (
        "attention_mask: zeros break padding none; give one length at a time without padding, or load with "
        'guard="off", which promises nothing'
    )


def test_masks_of_a_sliding_window_are_no_padding(source: Checkpoint, tmp_path: Path) -> None:
    out = export(source, planned(source, padding="none", charset="ascii"), tmp_path / "out").root
    built = load(out, guard="off")
    guard = make_guard(planned(source, padding="none", charset="ascii"), built, out)
    band = torch.ones(8, 8).tril().triu(-2).bool()[None, None]
    additive = torch.zeros(1, 1, 8, 8).masked_fill(~band, torch.finfo(torch.float32).min)
    for mask in (band, additive, {"full_attention": band}, {"sliding_attention": band}, {"full_attention": None}):
        check(guard, (ids(8),), {"attention_mask": mask})
    for mask in (band, additive):
        hidden = mask.clone()
        hidden[..., 0] = mask.min()
        with pytest.raises(SchemaError, match="zeros break padding none"):
            check(guard, (ids(8),), {"attention_mask": hidden})


def test_a_wrong_setting_is_one_line(narrowed: Path) -> None:
    with pytest.raises(CollapseError) as caught:
        load(narrowed, guard="maybe")
    assert str(caught.value) == "guard = 'maybe': allowed are on, off; give one of them"


# --- What leaned on a clause. -----------------------------------------------------------------------------


def test_positions_are_named_where_they_dropped_rows(tmp_path: Path) -> None:
    source = tiny_gpt2(tmp_path / "source")
    plan = planned(source, positions(LIMIT), max_tokens=LIMIT, charset="ascii")
    short = load(export(source, plan, tmp_path / "out").root)
    short(ids(LIMIT))
    with pytest.raises(SchemaError) as caught:
        short(ids(LIMIT + 1))
    assert str(caught.value) == (
        "input_ids: 25 tokens (0 in the cache, 25 new) break max_tokens 24 (positions dropped rows from 24 on); "
        'shorten the input or generate less, or load with guard="off", which promises nothing'
    )


def rewrite(kind: type[Any], grade: Evidence = PROVED, **fields: Any) -> Any:
    return kind(**{"pass": "the-pass"}, site="a.site", evidence=grade, **fields)


def test_each_rewrite_leans_on_its_own_clause(source: Checkpoint) -> None:
    plan = planned(
        source,
        vocabulary(KEPT, EMBEDDING),
        rewrite(Specialise, graph="fold-constants", max_tokens=LIMIT, unpadded=True),
        rewrite(Specialise, config={"rope_parameters": None}, max_tokens=LIMIT),
        rewrite(
            Reroot, BOUNDED, config_root="text_config", fields=("vocab_size",), names=(("a", "b"),), tensors=("v", "w")
        ),
        rewrite(ShortCircuit, CERTIFIED, by="zero", tensors=()),
        rewrite(DropLayers, CERTIFIED, prefix="layers.", size=4, kept=IndexSet.of([0, 1]), tensors=()),
    )
    sampled = "the-pass collapsed 2 sites, certified on such inputs only"
    assert reliance(plan) == {
        "max_tokens": (
            f"the-pass folded what is constant in at most {LIMIT} tokens",
            f"the-pass set rope_parameters for at most {LIMIT} tokens",
            f"the-pass was proved up to {LIMIT} tokens",
            sampled,
        ),
        "tokens": (f"vocabulary kept {ROWS} of 64 ids", sampled),
        "modality": ("the-pass left out 2 tensors that text does not reach", sampled),
        "padding": ("the-pass folded what is constant without padding", sampled),
    }


def test_nothing_is_named_where_nothing_leaned(source: Checkpoint) -> None:
    plan = planned(source, rewrite(ShortCircuit, by="zero", tensors=()), rewrite(Specialise, graph="next-token"))
    assert set(reliance(plan).values()) == {()}


# --- Beside other hooks, and under compilers. -------------------------------------------------------------


def test_fused_modules_are_skipped_behind_the_guard_and_refused_calls_do_not_count(
    tmp_path: Path, source: Checkpoint, unguarded: PreTrainedModel
) -> None:
    site = "model.layers.1.mlp"
    fused = {"pass": "dead-module", "stage": "fuse", "threshold": 9.0, "by": "zero", "tensors": (), "site": site}
    plan = planned(
        source,
        vocabulary(KEPT, EMBEDDING),
        ShortCircuit(**fused, evidence=CERTIFIED),
        max_tokens=LIMIT,
        charset="ascii",
    )
    both = load(export(source, plan, tmp_path / "out").root)
    counts = both.collapse_fused.counts
    with short_circuited(unguarded, [StandIn(site, "zero")]):
        assert torch.equal(both(ids(8)).logits, unguarded(ids(8)).logits)
    with pytest.raises(SchemaError) as caught:
        both(ids(LIMIT + 1))
    assert str(caught.value).startswith(
        "input_ids: 25 tokens (0 in the cache, 25 new) break max_tokens 24 "
        "(dead-module collapsed 1 site, certified on such inputs only); shorten"
    )
    assert counts == {site: SiteCounts(skipped=1, ran=0)}
    assert both.generate(ids(8), max_new_tokens=3, **GREEDY).shape == (1, 11)
    assert counts == {site: SiteCounts(skipped=4, ran=0)}
    both.collapse_fused.remove()
    assert torch.equal(both(ids(8)).logits, unguarded(ids(8)).logits)
    with pytest.raises(SchemaError):
        both(ids(LIMIT + 1))


def compiled_ways(model: PreTrainedModel, fullgraph: bool) -> Iterator[Any]:
    yield torch.compile(model, backend="eager", fullgraph=fullgraph)
    model.compile(backend="aot_eager", fullgraph=fullgraph)
    yield model


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_model_says_the_same_and_is_still_guarded(
    narrowed: Path, unguarded: PreTrainedModel, fullgraph: bool
) -> None:
    torch._dynamo.reset()
    for compiled in compiled_ways(load(narrowed), fullgraph):
        assert torch.equal(compiled(ids(8)).logits, unguarded(ids(8)).logits)
        for call in (
            {"input_ids": ids(LIMIT + 1)},
            {"input_ids": torch.tensor([[ROWS]])},
            {"input_ids": ids(8), "attention_mask": padded((7,))},
            {"input_ids": ids(8), "pixel_values": torch.ones(1)},
        ):
            with pytest.raises(SchemaError):
                compiled(**call)
        assert torch.equal(compiled(ids(8)).logits, unguarded(ids(8)).logits)


def test_the_check_adds_no_graph(narrowed: Path) -> None:
    graphs: list[int] = []

    def count(module: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(len(module.graph.nodes))
        return module

    for guard in ("on", "off"):
        torch._dynamo.reset()
        torch.compile(load(narrowed, guard=guard), backend=count)(ids(8))
    assert len(graphs) == 2
    assert graphs[0] == graphs[1]


def test_an_exported_program_holds_no_check(model: PreTrainedModel, unguarded: PreTrainedModel) -> None:
    program = torch.export.export(model, (ids(8),), {"use_cache": False}, strict=False).module()
    assert torch.equal(program(ids(8), use_cache=False).logits, unguarded(ids(8)).logits)
