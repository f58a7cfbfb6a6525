"""Graph and reloaded checkpoint, compared in every way of running, past every attention window."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from collapse.checkpoint import Checkpoint
from collapse.rewrite.graph import rewrite_program, rewrite_weights
from collapse.schema import InputSchema
from collapse.sequences import PAST_WINDOW, attention_windows, sequences
from collapse.verdict import Verdict
from collapse.verify import verify
from collapse.verify.samples import inside
from tests.architectures import tiny_model, weights_of
from tests.exported import SMALL, check, details
from tests.test_drop_layers import WIDE, dropping, program
from tests.tiny import export, plan_for

WAYS = {f"{pair}: {way}" for pair in ("graph", "graph and source") for way in ("prefill", "cache", "left padding")}
IDS = tuple(range(3, 48))


FULL_LAYER = 1


def contract(**fields) -> InputSchema:
    return InputSchema(type="text", tokens=IDS, workload={"prompt": 6, "new": 1}, **fields)


def dead_layer_model():
    model = tiny_model("gemma3_text", **WIDE["gemma3_text"])
    layer = model.model.layers[FULL_LAYER]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    return model


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    root = tmp_path_factory.mktemp("gemma") / "source"
    dead_layer_model().save_pretrained(root)
    return Checkpoint.open(root)


def verdict_of(checkpoint: Checkpoint, out: Path, schema: InputSchema, **edits: object) -> Verdict:
    rewrite = dropping("gemma3_text", checkpoint, FULL_LAYER)
    rewrite = rewrite.model_copy(update={"config": {**rewrite.config, **edits}})
    plan = plan_for(checkpoint, rewrite, schema=schema.to_json(), schema_digest=schema.digest)
    export(checkpoint, plan, out)
    traced = program("gemma3_text")
    pair = (rewrite_program(traced, plan), rewrite_weights(traced, weights_of(dead_layer_model()), plan))
    samples = inside(sequences(checkpoint, schema, None), plan, 4)
    return verify(out, checkpoint, samples=samples, program=pair, plan=plan, settings=SMALL)


def test_both_paths_are_compared_in_every_way_and_past_the_window(gemma: Checkpoint, tmp_path: Path) -> None:
    assert attention_windows(gemma.config) == (8,)
    verdict = verdict_of(gemma, tmp_path / "out", contract())
    assert details(verdict) == ""
    assert {found.name for found in verdict.checks} >= WAYS
    assert check(verdict, "graph: left padding").figures["positions"] == SMALL.padded
    assert check(verdict, "coverage").figures == {
        "prefill": 5, "chunked_prefill": 2, "decode_steps": 2, "left_padded_rows": 2, "longest_sample": 8 + PAST_WINDOW,
        "longest_allowed": 64, "windows": 1, "windows_passed": 1,
    }  # fmt: skip


def test_a_window_that_is_too_wide_shows_past_the_right_one_only(gemma: Checkpoint, tmp_path: Path) -> None:
    verdict = verdict_of(gemma, tmp_path / "wide", contract(), sliding_window=9)
    assert verdict.status == "refuted"
    assert verdict.counterexample is not None and verdict.counterexample["position"] >= 8
    short = verdict_of(gemma, tmp_path / "short", contract(max_tokens=8), sliding_window=9)
    assert details(short) == "", "no input of at most eight tokens can tell"
    figures = check(short, "coverage").figures
    assert (figures["longest_sample"], figures["longest_allowed"], figures["windows_passed"]) == (8, 8, 0)


def test_the_schema_s_longest_length_is_run(gemma: Checkpoint) -> None:
    longest = InputSchema(type="text", tokens=IDS, max_tokens=30, workload={"prompt": 28, "new": 2})
    drawn = sequences(gemma, longest, None)
    assert (max(map(len, drawn.held_out)), drawn.long) == (30, ())
    assert [len(ids) for ids in sequences(gemma, contract(), None).long] == [20]
    assert sequences(gemma, contract(max_tokens=19), None).long == ()


def test_fields_that_are_no_windows_are_not_taken_for_them() -> None:
    config = {"sliding_window": None, "max_window_layers": 28, "attention_chunk_size": 16, "window_size": True}
    assert attention_windows(config) == (16,)
    assert attention_windows({"text_config": {"sliding_window": 512}, "sliding_window": 4}) == (512,)
