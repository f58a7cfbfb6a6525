"""The main job from end to end, on a tiny Llama with a real byte-level tokenizer, and on a trained GPT-2."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

from collapse import Options, export, load, make_plan
from collapse.analysis.call_sizes import LAST_ROWS
from collapse.checkpoint import Checkpoint
from collapse.corpus import builtin_corpus
from collapse.errors import OutputError, PlanError
from collapse.manifest import load_manifest
from collapse.plan import Narrow, Plan
from collapse.schema import load_schema
from tests.architectures import save_tiny
from tests.shared import SHARED, needs_shared

LOG = {"type": "log", "max_tokens": 64, "workload": {"prompt": 32, "new": 16}}
TINY = dict(num_hidden_layers=1, vocab_size=900, max_position_embeddings=128)


def digest_tree(root: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(root.iterdir())}


def save_tokenizer(root: Path) -> None:
    """A byte-level BPE of 880 tokens, trained on prose: many of them never occur in logs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=880,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(builtin_corpus(load_schema("text")).documents[:80], trainer)
    tokenizer.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"})
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    root = save_tiny("llama", tmp_path_factory.mktemp("source") / "tiny", bos_token_id=0, eos_token_id=1, **TINY)
    save_tokenizer(root)
    return root


@pytest.fixture(scope="module")
def result(source, tmp_path_factory):
    return export(source, tmp_path_factory.mktemp("out") / "tiny-log", LOG)


def test_the_source_is_untouched_and_the_output_verified(source, result):
    assert result.report.verified.status == "verified"
    assert load_manifest(result.output).source.digest == Checkpoint.open(source).digest


def test_what_the_graph_alone_saves_is_counted_apart_and_verified(result):
    graph, figures = result.report.graph, result.report.after
    assert graph.prefill_flops_before == figures.prefill_flops
    d, h, s, f, prompt = 16, 4, 4, 24, 32
    gone = prompt - LAST_ROWS
    last_layer = gone * 2 * (2 * d * h * s + 3 * d * f) + 4 * h * s * gone * prompt
    assert graph.prefill_flops_before - graph.prefill_flops_after == last_layer
    assert graph.nodes_after < graph.nodes_before
    checks = {check.name: check.passed for check in result.report.verified.checks}
    assert checks["graph: next token"] and checks["graph: next token, cache"]
    assert checks["graph: next token, left padding"]


def test_rows_are_gone_from_the_file_and_the_figures_say_how_many(source, result):
    (narrow,) = result.plan.of_kind(Narrow)
    before, after = Checkpoint.open(source), Checkpoint.open(result.output)
    rows = after.tensors["model.embed_tokens.weight"].shape[0]
    assert rows == len(narrow.kept) < 800
    report = json.loads((result.output / "report.json").read_text())
    assert report["before"]["params"] - report["after"]["params"] == (900 - rows) * 16
    assert report["before"]["bytes"] - report["after"]["bytes"] == before.weight_bytes - after.weight_bytes
    saved = 2 * 16 * (900 - rows)  # one position of the head, two FLOPs a multiply-add
    assert report["before"]["prefill_flops"] - report["after"]["prefill_flops"] == saved
    assert report["before"]["decode_flops_per_token"] - report["after"]["decode_flops_per_token"] == saved
    assert report["rewrites"][0]["grade"] == "certified"
    assert report["plan_digest"] == result.plan.digest


def test_the_output_loads_in_plain_transformers_and_speaks_as_before(source, result):
    model, info = AutoModelForCausalLM.from_pretrained(result.output, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    old, old_tokens = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    tokens = AutoTokenizer.from_pretrained(result.output)
    text = "2024-01-02 03:04:05 INFO server started on port 8080"
    (narrow,) = result.plan.of_kind(Narrow)
    kept = list(narrow.kept)
    ids, old_ids = tokens(text)["input_ids"], old_tokens(text)["input_ids"]
    assert [kept[i] for i in ids] == old_ids
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits
        expected = old(torch.tensor([old_ids])).logits[..., kept]
    torch.testing.assert_close(logits, expected, rtol=1.3e-6, atol=1e-5)
    assert tokens.decode(ids) == old_tokens.decode(old_ids) == text


def test_load_gives_the_same_logits_as_plain_transformers(result):
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(result.output)(ids).logits
        assert torch.equal(load(result.output)(ids).logits, plain)


def test_the_output_holds_what_a_review_needs(result):
    names = {path.name for path in result.output.iterdir()}
    assert {"collapse.json", "REPORT.md", "report.json", "graph.svg", "tokenizer.json", "config.json"} <= names
    assert (result.output / "graph.svg").read_text().startswith("<?xml")


def test_a_reviewed_plan_is_applied_exactly_and_only_to_its_source(source, result, tmp_path):
    result.plan.save(tmp_path / "plan.json")
    again = export(source, tmp_path / "again", plan=Plan.load(tmp_path / "plan.json"))
    assert again.plan.digest == result.plan.digest
    assert digest_tree(again.output) == digest_tree(result.output)
    other = save_tiny("llama", tmp_path / "other", seed=5, bos_token_id=0, eos_token_id=1, **TINY)
    save_tokenizer(other)
    with pytest.raises(PlanError, match="was made for a source with digest"):
        export(other, tmp_path / "never", plan=result.plan)
    assert not (tmp_path / "never").exists()


def test_a_dry_run_agrees_with_the_export_and_writes_nothing(source, result, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dry = make_plan(source, LOG)
    assert dry.plan.digest == result.plan.digest
    assert dry.report.after == result.report.after
    assert list(tmp_path.iterdir()) == []


def test_an_output_in_use_is_refused_before_any_work(source, result):
    before = digest_tree(result.output)
    with pytest.raises(OutputError, match="exists and is not empty"):
        export(source, result.output, LOG)
    assert digest_tree(result.output) == before


def test_zero_savings_are_reported_as_zero_with_the_reason(source, tmp_path):
    found = export(source, tmp_path / "same", LOG, Options(passes=("positions",)))
    assert found.report.before == found.report.after
    assert found.plan.rewrites == ()
    assert "no learned position table" in (found.output / "REPORT.md").read_text()


def test_two_exports_are_byte_identical_from_other_folders_and_hash_seeds(source, tmp_path):
    trees = []
    for seed in ("0", "4242"):
        place = tmp_path / f"place{seed}"
        place.mkdir()
        root = str(Path(__file__).resolve().parent.parent)
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
        arguments = ["export", str(source), "--schema", json.dumps(LOG), "-o", "out", "--quiet"]
        done = subprocess.run(
            [sys.executable, "-m", "collapse", *arguments], cwd=place, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        trees.append(digest_tree(place / "out"))
    assert trees[0] == trees[1]


@needs_shared
def test_two_letters_of_three_still_sort_in_all_64_cases(tmp_path):
    schema = {"type": "text", "tokens": [0, 1], "max_tokens": 11, "workload": {"prompt": 6, "new": 5}}
    found = export(SHARED / "models" / "gpt2-nano-sort", tmp_path / "sort", schema)
    assert Checkpoint.open(found.output).tensors["transformer.wte.weight"].shape == (2, 48)
    assert found.plan.rewrites[0].evidence.grade == "proved"
    model = AutoModelForCausalLM.from_pretrained(found.output)
    inputs = torch.tensor(list(itertools.product((0, 1), repeat=6)))
    with torch.no_grad():
        ids = inputs
        for _ in range(6):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(ids[:, 6:], inputs.sort(dim=1).values)


def test_a_head_that_the_files_untie_is_narrowed_on_its_own(tmp_path):
    """config.json says that embedding and head are tied, the files hold two tables, and transformers believes them."""
    source = save_tiny("llama", tmp_path / "source", vocab_size=48)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    schema = {"type": "text", "tokens": list(range(0, 48, 2)), "max_tokens": 16}
    result = export(source, tmp_path / "out", schema, Options(prompts=2, new_tokens=4))
    (narrow,) = result.plan.of_kind(Narrow)
    assert [axis.tensor for axis in narrow.axes] == ["lm_head.weight", "model.embed_tokens.weight"]
    ids = torch.tensor([[2, 8, 4]])
    new = torch.tensor([[list(narrow.kept).index(token) for token in ids[0]]])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(source)(ids).logits[..., list(narrow.kept)]
        found = AutoModelForCausalLM.from_pretrained(result.output)(new).logits
    torch.testing.assert_close(found, expected, rtol=1.3e-6, atol=1e-5)
