"""Every mistake gets one line that says what, where and what to do, exit code 2, and leaves nothing behind."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from collapse.analysis.token_use import Samples, token_use
from collapse.checkpoint import Checkpoint
from collapse.errors import CheckpointError, PlanError, UnsupportedError
from collapse.pipeline import checked
from collapse.plan import Axis, DropLayers, IndexSet, Plan, Specialise
from collapse.progress import Stopwatch
from collapse.schema import InputSchema
from collapse.sequences import context_length, encoder
from collapse.source_model import load_source
from collapse.token_ids import names_in
from collapse.trace import load_config, meta_model
from tests.architectures import save_tiny
from tests.test_export import LOG, TINY, digest_tree, save_tokenizer
from tests.tiny import PROVED, plan_for, vocabulary


@pytest.fixture
def model(tmp_path) -> Path:
    root = save_tiny("llama", tmp_path / "model", bos_token_id=0, eos_token_id=1, **TINY)
    save_tokenizer(root)
    return root


@pytest.fixture
def refuse(command, model, tmp_path):
    """Export must fail with exit code 2 and one line that has all of `words`; the source stays as it is."""

    def check(*words: str, source: object = model, arguments: tuple[object, ...] = ()):
        before = digest_tree(model)
        found = command("export", source, "-o", tmp_path / "out", *(arguments or ("--schema", json.dumps(LOG))))
        assert found.code == 2, found
        assert found.out == ""
        lines = found.err.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("collapse: "), found.err
        for word in words:
            assert word in lines[0]
        assert not (tmp_path / "out").exists()
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
        assert digest_tree(model) == before

    return check


def corrupt(model: Path, change) -> None:
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    path.write_bytes(change(data))


def test_a_missing_directory(refuse, tmp_path):
    refuse("no such model", "nowhere", source=tmp_path / "nowhere")


def test_no_causal_model(refuse, model):
    config = {"model_type": "t5", "d_model": 8, "num_layers": 1, "num_heads": 1, "d_ff": 8, "vocab_size": 900}
    (model / "config.json").write_text(json.dumps(config))
    refuse("t5", "no causal LM")


def test_an_unknown_model_type(refuse, model):
    (model / "config.json").write_text(json.dumps({"model_type": "never-heard-of"}))
    refuse("never-heard-of")


def test_a_config_that_asks_for_remote_code(refuse, model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}))
    refuse("remote code")


def test_a_corrupt_header(refuse, model):
    corrupt(model, lambda data: data[:8] + b"\xff" * 40 + data[48:])
    refuse("header is damaged", "model.safetensors")


def test_a_truncated_file(refuse, model):
    corrupt(model, lambda data: data[:-100])
    refuse("cut short", "model.safetensors")


def test_bytes_after_the_data(refuse, model):
    corrupt(model, lambda data: data + b"hidden")
    refuse("6 bytes after the data")


def test_pickled_weights_only(refuse, model):
    (model / "model.safetensors").unlink()
    torch.save({}, model / "pytorch_model.bin")
    refuse("pickled weights", "pytorch_model.bin")


def test_a_config_of_another_size(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 901}))
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight has the shape \[900, 16\], .* \[901, 16\]"):
        load_source(Checkpoint.open(model), Stopwatch(quiet=True))


def test_a_checkpoint_that_lacks_a_weight(model):
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(CheckpointError, match="has no model.layers.0.mlp.up_proj.weight"):
        load_source(Checkpoint.open(model), Stopwatch(quiet=True))


def test_a_config_value_of_the_wrong_kind_names_what_is_allowed(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": "many"}))
    with pytest.raises(UnsupportedError, match="'vocab_size': .*int"):
        load_config(Checkpoint.open(model))


def test_warnings_about_the_config_are_not_printed(model, capfd):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 0}))
    meta_model(load_config(Checkpoint.open(model)))
    assert capfd.readouterr() == ("", "")


def test_a_context_of_no_tokens_is_no_bound():
    assert context_length({"max_position_embeddings": 0}) is None
    assert context_length({"max_position_embeddings": 0, "n_positions": 8}) == 8


def test_a_plan_whose_schema_was_changed_by_hand(model):
    plan = plan_for(Checkpoint.open(model))
    context = SimpleNamespace(checkpoint=Checkpoint.open(model), schema=InputSchema.model_validate(plan.input_schema))
    assert checked(plan, context) is plan
    with pytest.raises(PlanError, match="not the one it was made for"):
        checked(plan, SimpleNamespace(checkpoint=context.checkpoint, schema=InputSchema(type="text")))
    with pytest.raises(PlanError, match="the plan says model_type 'gpt2', config.json 'llama'"):
        checked(plan.model_copy(update={"model_type": "gpt2"}), context)


HUGE = 10**30
ROWS = vocabulary([0], "model.embed_tokens.weight")
LAYER = {"kind": "drop-layers", "pass": "p", "site": "model.layers", "evidence": PROVED, "prefix": "model.layers."}


@pytest.mark.parametrize(("rewrite", "message"), [
    (ROWS.model_copy(update={"axes": (Axis(tensor="model.embed_tokens.weight", dim=9),)}), "has 2 dimensions"),
    (ROWS.model_copy(update={"kept": IndexSet(runs=((0, HUGE),))}), "out of range for 64 rows"),
    (ROWS.model_copy(update={"size": HUGE, "kept": IndexSet(runs=((0, HUGE),))}), "the plan says"),
    (DropLayers(**LAYER, size=HUGE, kept=IndexSet(runs=((0, HUGE),)), tensors=("no.such",)), "has no tensor"),
    (DropLayers(**LAYER, size=HUGE, kept=IndexSet(runs=((0, 1), (2, HUGE))), tensors=("model.norm.weight",)),
     "does not list just the tensors"),
])  # fmt: skip
def test_a_plan_whose_numbers_were_changed_by_hand(model, rewrite, message):
    plan = plan_for(Checkpoint.open(model), rewrite)
    schema = InputSchema.model_validate(plan.input_schema)
    with pytest.raises(PlanError, match=message):
        checked(plan, SimpleNamespace(checkpoint=Checkpoint.open(model), schema=schema))


def test_a_longest_sequence_of_no_tokens_is_no_plan(model, tmp_path):
    folding = Specialise(**{"pass": "p"}, site="graph", evidence=PROVED, graph="fold-constants", max_tokens=1)
    plan = plan_for(Checkpoint.open(model), folding).to_json()
    plan["rewrites"][0]["max_tokens"] = -1
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(PlanError, match=r"max_tokens = -1: input should be greater than or equal to 1"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("option", ["--max-shard-size", "--prompts"])
@pytest.mark.parametrize("value", ["0", "-1"])
def test_a_number_that_is_none(command, model, tmp_path, option, value):
    found = command("export", model, "-o", tmp_path / "out", option, value)
    assert (found.code, found.out, (tmp_path / "out").exists()) == (2, "", False)
    assert option in found.err


def test_an_unknown_schema_field(refuse):
    refuse("max_tokenz", arguments=("--schema", '{"type": "log", "max_tokenz": 5}'))


def test_a_wrong_schema_value(refuse):
    refuse("'log', 'json', 'code' or 'text'", arguments=("--schema", '{"type": "logs"}'))


def test_an_empty_corpus(refuse, tmp_path):
    (tmp_path / "empty.log").write_text("")
    refuse("there is no text in it", arguments=("--schema", "log", "--corpus", tmp_path / "empty.log"))


def test_a_corpus_that_breaks_the_schema(refuse, tmp_path):
    (tmp_path / "long.log").write_text("short\n" + "x" * 200 + "\n")
    schema = '{"type": "log", "max_line_length": 120}'
    refuse("long.log", "200", "120", arguments=("--schema", schema, "--corpus", tmp_path / "long.log"))


def test_a_corpus_that_is_not_text(refuse, tmp_path):
    (tmp_path / "binary.log").write_bytes(b"line\n\xff\xfe\x00")
    refuse("binary.log", arguments=("--schema", "log", "--corpus", tmp_path / "binary.log"))


def test_an_unknown_stage(refuse):
    refuse("unknown stage 'melt'", "fuse, short-circuit, erase", arguments=("--schema", "log", "--stage", "melt"))


def test_an_unknown_pass(refuse):
    refuse("unknown pass 'magic'", "vocabulary", arguments=("--schema", "log", "--pass", "magic"))


def test_a_plan_that_is_none(refuse, tmp_path):
    (tmp_path / "plan.json").write_text('{"format": "collapse-plan/1"}')
    refuse("plan.json", "field", arguments=("--plan", tmp_path / "plan.json"))


def test_an_output_that_collapse_did_not_make_survives_even_force(command, model, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    for force in ((), ("--force",)):
        found = command("export", model, "-o", precious, "--schema", json.dumps(LOG), *force)
        assert found.code == 2
        assert (precious / "thesis.txt").read_text() == "years of work"
        assert [p.name for p in precious.iterdir()] == ["thesis.txt"]


def test_an_output_inside_the_source(command, model):
    before = digest_tree(model)
    found = command("export", model, "-o", model / "out", "--schema", json.dumps(LOG))
    assert (found.code, digest_tree(model)) == (2, before)
    assert "overlaps the source" in found.err


def test_an_output_that_cannot_be_made_is_refused_before_any_work(command, model, tmp_path, monkeypatch):
    monkeypatch.setattr("collapse.pipeline.prepare", lambda *given: pytest.fail("it began to work"))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for place, words in (("file/out", "file is no directory"), ("loop", "leads nowhere")):
        found = command("export", model, "-o", tmp_path / place)
        assert (found.code, found.out, len(found.err.splitlines())) == (2, "", 1)
        assert words in found.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop", "model"]


@pytest.mark.parametrize("place", ["", "nowhere/plan.json"])
def test_a_plan_that_cannot_be_written_is_refused_before_any_work(command, model, tmp_path, monkeypatch, place):
    monkeypatch.setattr("collapse.pipeline.prepare", lambda *given: pytest.fail("it began to work"))
    found = command("plan", model, "-o", tmp_path / place)
    assert (found.code, found.out, len(found.err.splitlines())) == (2, "", 1)
    assert "cannot be written" in found.err


@pytest.mark.parametrize("content", ["garbage", "{}", "[]"])
def test_a_tokenizer_that_is_none(model, content):
    (model / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="tokenizer.json: cannot be read"):
        encoder(Checkpoint.open(model))


@pytest.mark.parametrize("decoder", [5, {"a": {"content": "x"}}, {"1": {}}, {"1": "x"}])
def test_a_damaged_list_of_added_tokens(model, decoder):
    (model / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    with pytest.raises(CheckpointError, match="added_tokens_decoder is damaged"):
        token_use(Checkpoint.open(model), InputSchema(type="log", tokens=(1,)), Samples())


def test_special_tokens_of_no_kind_name_nothing():
    assert list(names_in({"extra_special_tokens": 5, "bos_token": "<s>"})) == [("bos_token", "<s>")]


@pytest.mark.parametrize("place", ["model", "nowhere"])
def test_a_directory_that_claims_nothing_is_not_refuted(command, model, tmp_path, place):
    found = command("verify", tmp_path / place, "--source", model)
    assert (found.code, found.out) == (2, "")
    assert "has no collapse.json" in found.err


def test_a_full_disk_leaves_nothing_behind(model, tmp_path):
    limit = 40_000  # bytes of one file: less than the weights, more than any other file that is written first

    def restrict() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    assert (model / "model.safetensors").stat().st_size > limit
    before = digest_tree(model)
    root = Path(__file__).resolve().parent.parent
    arguments = [sys.executable, "-m", "collapse", "export", str(model), "-o", str(tmp_path / "out"), "--quiet"]
    done = subprocess.run(
        [*arguments, "--schema", json.dumps(LOG)], cwd=root, capture_output=True, text=True, preexec_fn=restrict
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().startswith("collapse: ") and "cannot be written" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
    assert digest_tree(model) == before


@pytest.mark.parametrize("arguments", [("export",), ("nonsense",), ("export", "m", "--no-such-option")])
def test_wrong_usage_is_shown_with_exit_code_2(command, arguments):
    found = command(*arguments)
    assert found.code == 2
    assert "Traceback" not in found.err
