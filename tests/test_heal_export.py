"""Healing within a run: in the plan, the files, verification and audit; and where there is nothing to heal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from collapse import Options, export
from collapse.audit import audit
from collapse.budget import parse_budgets
from collapse.checkpoint import Checkpoint
from collapse.corpus import builtin_corpus, split
from collapse.errors import PlanError, UnsupportedError
from collapse.heal.propose import _tries, enough, heal_plan
from collapse.heal.settings import Settings
from collapse.heal.texts import PIECE, encoder_of, starts, windows
from collapse.heal.touched import costly_rewrites, touched, trainable
from collapse.manifest import load_manifest
from collapse.passes.shrink_task import HELD_OUT, MEASURED_EVERY
from collapse.pipeline import Result, make_plan
from collapse.plan import Evidence, Plan, Replace
from collapse.report.data import notes
from collapse.rewrite.values import load_values, save_plan, values_of
from collapse.schema import load_schema
from collapse.sequences import encoder
from collapse.trace import load_config, trace
from tests.architectures import save_tiny
from tests.audit_cases import dropped
from tests.command import Command
from tests.exported import EMBEDDING, KEPT
from tests.replacing import MEASURED, drawn, replacing
from tests.test_collapsed_model import neurons
from tests.test_export import LOG, save_tokenizer
from tests.tiny import erase, plan_for, tiny_llama, vocabulary

SIZES = dict(num_hidden_layers=4, vocab_size=900, max_position_embeddings=256)
SETTINGS = Settings(tokens=20 * 4 * 64, rows=4, rate=3e-3)
OPTIONS = Options(
    passes=("vocabulary", "layers"), budgets=parse_budgets("flops=-30%"), heal=SETTINGS, prompts=2, new_tokens=4
)
CERTIFIED = Options(passes=("layers",), budgets=parse_budgets("kl<=0.45,flops=-20%"), heal=SETTINGS)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of which each block adds little to the stream, in bf16 as most checkpoints are."""
    root = save_tiny("llama", tmp_path_factory.mktemp("source") / "tiny", bos_token_id=0, eos_token_id=1, **SIZES)
    save_tokenizer(root)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(root / "model.safetensors").items()}
    save_file(weights, root / "model.safetensors", metadata={"format": "pt"})
    return root


@pytest.fixture(scope="module")
def result(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return export(source, tmp_path_factory.mktemp("out") / "healed", LOG, OPTIONS)


def healing_of(plan: Plan) -> Replace:
    (found,) = plan.of_kind(Replace)
    return found


def test_the_output_is_verified_and_audited_and_its_blocks_beside_the_gap_are_other_ones(
    source: Path, result: Result
) -> None:
    assert result.report.verified is not None and result.report.verified.status == "verified"
    report = audit(result.output, source=Checkpoint.open(source))
    assert report.findings == ()
    plan = load_manifest(result.output).plan
    (drop,) = [one for one in plan.rewrites if one.kind == "drop-layers"]
    kept = list(drop.kept)
    beside = {n for n in kept if (n - 1 not in kept and n > 0) or (n + 1 not in kept and n < 3)}
    found = healing_of(plan)
    assert {int(name.split(".")[2]) for name in found.tensors} == beside
    assert len(found.tensors) == 9 * len(beside), "seven projections and two norms of each"
    before, after = load_file(source / "model.safetensors"), load_file(result.output / "model.safetensors")
    for new, old in enumerate(kept):
        for name in (name for name in after if name.startswith(f"model.layers.{new}.")):
            origin = name.replace(f"layers.{new}.", f"layers.{old}.")
            assert after[name].dtype == before[origin].dtype == torch.bfloat16
            assert torch.equal(after[name], before[origin]) == (origin not in found.tensors)


def test_the_evidence_has_what_was_measured_and_is_never_proved(result: Result) -> None:
    evidence = healing_of(result.plan).evidence
    assert evidence.grade == "measured" and "with no bound" in evidence.method
    figures = evidence.figures
    assert 0 < figures["held_out_kl"] < figures["held_out_kl_before"]
    assert figures["calibration_kl"] < figures["calibration_kl_before"]
    assert (figures["steps"], figures["tokens"], figures["seed"], figures["scope"]) == (20, 20 * 4 * 64, 0, "touched")


def test_the_figures_are_those_of_the_written_model(source: Path, result: Result) -> None:
    """Once more, from the files alone."""
    plan = result.plan
    kept = torch.tensor(list(next(one for one in plan.rewrites if one.kind == "narrow").kept))
    held_out = split(builtin_corpus(load_schema(LOG)), 0).held_out
    ids = starts(held_out, encoder_of(Checkpoint.open(source), plan), 64, HELD_OUT)[::MEASURED_EVERY]
    models = [AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32) for one in (source, result.output)]
    with torch.no_grad():
        p = models[0](kept[ids]).logits[:, :-1, kept].double().log_softmax(-1)
        q = models[1](ids).logits[:, :-1].double().log_softmax(-1)
    found = float((p.exp() * (p - q)).sum(-1).mean())
    assert found == pytest.approx(healing_of(plan).evidence.figures["held_out_kl"], rel=1e-4)


def test_the_plan_and_its_values_are_two_files_for_review(source: Path, result: Result, tmp_path: Path) -> None:
    assert result.output is not None
    plan = load_manifest(result.output).plan
    written = values_of(result.output, Checkpoint.open(result.output).tensors.values(), plan)
    save_plan(plan, written, tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    values = load_values(again, tmp_path / "plan.json")
    assert again == plan == result.plan and values is not None
    assert {name: values.digest(name) for name in values.tensors} == healing_of(plan).tensors
    with pytest.raises(PlanError, match="a reviewed plan is applied as it is"):
        export(source, tmp_path / "more", LOG, OPTIONS, plan=again, values=values)


def test_budgets_of_losses_are_certified_of_the_healed_model_and_protected_text_is_held(
    source: Path, tmp_path: Path
) -> None:
    prose = tmp_path / "prose.txt"
    prose.write_text("It was a bright cold day, and the clocks were about to strike. " * 300)
    plan = make_plan(source, LOG, replace(CERTIFIED, protect=(prose,))).plan
    (drop,) = [one for one in plan.rewrites if one.kind == "drop-layers"]
    evidence, rank = healing_of(plan).evidence, drop.evidence.figures["rank"]
    assert evidence.figures["tries"] == rank * (rank + 1)
    assert evidence.figures["kl_estimate"] == pytest.approx(evidence.figures["held_out_kl"])
    assert evidence.grade == ("certified" if evidence.figures["kl_at_most"] <= 0.45 else "measured")
    assert evidence.claim.startswith("healed, the model loses on average over text like the held-out sequences")
    assert evidence.figures["protected_kl"] <= evidence.figures["protected_kl_before"]


def test_a_cut_of_the_vocabulary_counts_among_what_the_healed_model_loses(source: Path) -> None:
    """Ids that went have a part of the source's probability, and some are its choice: those are flips."""
    options = replace(CERTIFIED, passes=("vocabulary", "layers"), budgets=parse_budgets("flips<=90%,flops=-20%"))
    plan = make_plan(source, LOG, options).plan
    narrow = next(one for one in plan.rewrites if one.kind == "narrow")
    (drop,) = [one for one in plan.rewrites if one.kind == "drop-layers"]
    kept = torch.tensor(list(narrow.kept))
    held_out = split(builtin_corpus(load_schema(LOG)), 0).held_out
    ids = kept[starts(held_out, encoder_of(Checkpoint.open(source), plan), 64, HELD_OUT)]
    with torch.no_grad():
        p = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(ids).logits[:, :-1].double().softmax(-1)
    figures = healing_of(plan).evidence.figures
    assert figures["lost_mass"] == pytest.approx(float(1 - p[..., kept].sum(-1).mean()), rel=1e-4)
    assert figures["lost_mass"] > 0.05
    gone = float((~torch.isin(p.argmax(-1), kept)).double().mean())
    assert figures["flips_estimate"] >= gone > 0
    assert drop.evidence.claim.startswith("these rewrites alone lose on average over text")


# Nothing to heal.


def test_without_a_costly_rewrite_one_line_says_so_and_nothing_is_trained(llama_and_program) -> None:
    source, _ = llama_and_program
    plan = plan_for(source, vocabulary(KEPT, EMBEDDING), erase("old.bias"))
    found = heal_plan(SimpleNamespace(), plan, None, SETTINGS)
    assert found.values == {} and found.plan.rewrites == plan.rewrites
    said = "Not healed: nothing was removed at a cost, so there is nothing to make good."
    same = SimpleNamespace(prefill_flops=1, kv_bytes_per_token=1)
    assert said in notes(found.plan, same, same)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--heal", "5k"], "add --budget"),
        (["--heal", "many", "--budget", "flops=-30%"], "is no number of tokens"),
        (["--protect", "x.txt", "--budget", "flops=-30%"], "add --heal"),
        (["--heal", "5k", "--budget", "flops=-30%", "--protect", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_what_makes_no_sense_is_one_line(source: Path, command: Command, given: list[str], said: str) -> None:
    outcome = command("plan", source, *given)
    assert outcome.code == 2 and len(outcome.err.strip().splitlines()) == 1 and said in outcome.err


def test_too_little_text_is_one_line() -> None:
    with pytest.raises(
        UnsupportedError, match="--protect: the text is less than two windows of 64 tokens; give more of it"
    ):
        enough(torch.zeros(1, 64), "--protect")
    assert enough(torch.zeros(2, 64), "--protect").shape == (2, 64)


# What is touched.


@pytest.fixture(scope="module")
def llama_and_program(tmp_path_factory: pytest.TempPathFactory):
    source = tiny_llama(tmp_path_factory.mktemp("tiny") / "source", extra={"old.bias": torch.ones(4)})
    return source, trace(load_config(source))


def test_a_cut_of_the_vocabulary_and_what_is_proved_touch_nothing(llama_and_program) -> None:
    source, program = llama_and_program
    plan = plan_for(source, vocabulary(KEPT, EMBEDDING), erase("old.bias"), dropped(source, 0))
    assert costly_rewrites(plan) == () and touched(source, program, plan) == frozenset()


def test_what_is_narrowed_replaced_or_beside_a_gap_is_touched(llama_and_program) -> None:
    source, program = llama_and_program
    cut = neurons()
    assert touched(source, program, plan_for(source, cut)) == {axis.tensor for axis in cut.axes}
    norm = "model.norm.weight"
    assert touched(source, program, plan_for(source, replacing(drawn(source, norm)))) == {norm}
    gone = dropped(source, 0).model_copy(update={"evidence": MEASURED})
    assert touched(source, program, plan_for(source, gone)) == {
        n for n in source.tensors if n.startswith("model.layers.1.")
    }
    everything = trainable(source, program, plan_for(source, gone, erase("old.bias")))
    assert everything == {n for n in source.tensors if not n.startswith(("model.layers.0.", "old."))}


@pytest.mark.parametrize(("ranks", "tries"), [((), 1), ((1,), 2), ((3,), 12), ((1, 3), 24)])
def test_delta_is_shared_by_all_models_that_the_held_out_text_could_have_led_to(
    llama_and_program, ranks: tuple[int, ...], tries: int
) -> None:
    source, _ = llama_and_program
    names = ("model.norm.weight", EMBEDDING)
    rewrites = [
        replacing(
            drawn(source, name), evidence=Evidence(grade="certified", claim="c", method="m", figures={"rank": rank})
        )
        for name, rank in zip(names, ranks, strict=False)
    ]
    assert _tries(plan_for(source, *rewrites)) == tries
    dead = rewrites[:1] and [rewrites[0].model_copy(update={"pass_name": "dead-module"})]
    assert _tries(plan_for(source, *rewrites[1:], *dead)) == tries * (1 + len(dead))


# Text as the collapsed model reads it.


def test_text_is_read_with_the_ids_that_stay(source: Path, result: Result) -> None:
    checkpoint = Checkpoint.open(source)
    kept = list(next(one for one in result.plan.rewrites if one.kind == "narrow").kept)
    text = "2024-01-05 12:00:01 ERROR disk full\n"
    read = encoder_of(checkpoint, result.plan)(text)
    assert tuple(kept[token] for token in read) == encoder(checkpoint)(text)
    assert encoder_of(checkpoint, plan_for(checkpoint))(text) == encoder(checkpoint)(text)
    strings = Tokenizer.from_file(str(source / "tokenizer.json")).get_vocab()
    gone = next(
        word for word, number in sorted(strings.items()) if number not in kept and word.isalpha() and len(word) > 4
    )
    word = gone.replace("\u0120", " ")
    assert not set(encoder(checkpoint)(word)) <= set(kept)
    assert len(encoder_of(checkpoint, result.plan)(word)) > 1


def test_windows_follow_each_other_and_each_begins_as_a_text_does() -> None:
    def encode(text: str) -> tuple[int, ...]:
        return (99, *map(ord, text))

    found = windows(["abcd", "efgh", "ij"], encode, 4, 10)
    assert found.tolist() == [[99, 97, 98, 99], [99, 100, 101, 102], [99, 103, 104, 105]]
    assert windows(["abcd", "efgh", "ij"], encode, 4, 2).tolist() == [found[0].tolist(), found[1].tolist()]
    assert windows(["abcdefg"], lambda text: tuple(map(ord, text)), 3, 9).tolist() == [[97, 98, 99], [100, 101, 102]]
    long = windows(["x" * PIECE] * 9, encode, 1 << 14, 3)
    assert long.shape == (3, 1 << 14), "of more pieces of text than windows some are not read"
    assert windows(["ab"], encode, 8, 10).shape == (0, 8)
