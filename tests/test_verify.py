"""The verifier: it accepts what is right, and refutes every planted fault, saying which."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from collapse.checkpoint import Checkpoint
from collapse.errors import CheckpointError
from collapse.manifest import load_manifest
from collapse.plan import Evidence, Plan, ShortCircuit, Specialise
from collapse.schema import InputSchema
from collapse.sequences import Sequences
from collapse.verdict import Verdict
from collapse.verify import Settings, verify
from collapse.verify.compare import EQ, Block, Continuation, compare_greedy, compare_logits, rounding
from collapse.verify.dynamic import dynamic_checks
from collapse.verify.job import cuts, make_job
from collapse.verify.samples import inside
from tests.command import Command
from tests.exported import EMBEDDING, KEPT, SMALL, WEIGHTS, check, details
from tests.tiny import (
    PROVED,
    VOCABULARY,
    erase,
    export,
    plan_for,
    positions,
    samples,
    tiny_gpt2,
    tiny_llama,
    vocabulary,
)

# What is right is accepted.


def test_erasing_unread_weights_changes_no_bit(llama: Checkpoint, tmp_path: Path) -> None:
    out = export(llama, plan_for(llama, erase("old.bias")), tmp_path / "out", max_shard_size=20_000).root
    verdict = verify(out, llama, samples=samples(range(VOCABULARY), 40, 9, 1, 60), settings=SMALL)
    assert verdict.status == "verified", details(verdict)
    for name in ("logits: prefill", "logits: cache", "logits: left padding"):
        figures = check(verdict, name).figures
        assert figures["bit_equal_positions"] == figures["positions"] > 0
    assert check(verdict, "logits: prefill").figures["positions"] == 40 + 9 + 1 + 48, "cut at the context"
    assert check(verdict, "greedy").figures == {"prompts": 2, "stayed": 2, "left": 0, "near_ties": 0, "tokens": 8}
    assert check(verdict, "load").figures == {"missing": 0, "mismatched": 0, "unexpected": 0, "declared": 0}


def test_kept_rows_say_what_they_said(llama: Checkpoint, exported: Path, plan: Plan) -> None:
    verdict = verify(exported, llama, samples=samples(KEPT, 30, 12, 5, 7), plan=plan, settings=SMALL)
    assert (details(verdict), check(verdict, "load").passed) == ("", True)
    assert check(verdict, "logits: prefill").figures["logits"] == (30 + 12 + 5 + 7) * len(KEPT)
    assert (exported / "config.json").read_bytes() != (llama.root / "config.json").read_bytes()


def test_gpt2_with_fewer_rows_and_positions(tmp_path: Path) -> None:
    source = tiny_gpt2(tmp_path / "source")
    rewrites = (vocabulary(KEPT, "transformer.wte.weight"), positions(16))
    short = InputSchema(type="log", tokens=tuple(range(VOCABULARY)), max_tokens=16)
    plan = plan_for(source, *rewrites, schema=short.to_json(), schema_digest=short.digest)
    out = export(source, plan, tmp_path / "out").root
    verdict = verify(out, source, samples=samples(KEPT, 40, 16, 3), settings=SMALL)
    assert details(verdict) == ""
    assert check(verdict, "logits: prefill").figures["positions"] == 16 + 16 + 3


def test_a_table_of_positions_shorter_than_the_schema_allows_is_refuted(tmp_path: Path) -> None:
    source = tiny_gpt2(tmp_path / "source")
    out = export(source, plan_for(source, positions(16)), tmp_path / "out").root
    verdict = verify(out, source, samples=samples(range(VOCABULARY), 40, 16, 3), settings=SMALL)
    assert details(verdict) == "context: the output takes 16 tokens, schema and source allow 48"


def test_a_tie_stored_twice_and_mixed_dtypes(tmp_path: Path) -> None:
    extra = {"f8": torch.ones(4, 4).to(torch.float8_e4m3fn)}
    source = tiny_llama(tmp_path / "source", both_names=True, dtype=torch.bfloat16, extra=extra)
    tensors = load_file(source.root / WEIGHTS)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, source.root / WEIGHTS, {"format": "pt"})
    source = Checkpoint.open(source.root)
    plan = plan_for(source, erase("f8", "lm_head.weight"), vocabulary(KEPT, EMBEDDING))
    out = export(source, plan, tmp_path / "out").root
    verdict = verify(out, source, samples=samples(KEPT, 20, 6), settings=SMALL)
    assert details(verdict) == ""


class EagerProgram:
    """Has the interface of a traced program, without the seconds that tracing takes; export's tests have real ones."""

    cache = ("grows",)
    model_name = staticmethod(lambda name: None if name == "old.bias" else name)

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.weights = dict(self.model.named_parameters(remove_duplicate=False))

    def run(self, weights: dict, ids: torch.Tensor, mask: torch.Tensor, cache: object) -> tuple:
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        inputs = {"input_ids": ids, "attention_mask": mask, "past_key_values": cache, "position_ids": places}
        output = torch.func.functional_call(self.model, weights, (), inputs)
        return output.logits, output.past_key_values


def test_the_graph_is_a_second_opinion(llama: Checkpoint, exported: Path) -> None:
    program = EagerProgram(exported)
    ids = samples(KEPT, 20, 6)
    verdict = verify(exported, llama, samples=ids, program=lambda: (program, program.weights), settings=SMALL)
    assert details(verdict) == ""
    assert check(verdict, "graph: cache").figures["positions"] == 8
    wrong = program.weights | {"model.norm.weight": program.weights["model.norm.weight"] * 1.001}
    verdict = verify(exported, llama, samples=ids, program=(program, wrong), settings=SMALL)
    assert {found.name for found in verdict.failures} >= {"graph: weights", "graph: prefill", "graph and source: cache"}
    assert "model.norm.weight" in check(verdict, "graph: weights").detail
    assert verdict.counterexample is not None and verdict.counterexample["check"] == "graph: prefill"


def test_the_graph_may_differ_by_what_rounding_makes_of_the_source(
    llama: Checkpoint, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights that differ are found out all the same."""
    program, ids = EagerProgram(exported), samples(KEPT, 20, 6)
    wrong = program.weights | {"model.norm.weight": program.weights["model.norm.weight"] * 1.00001}
    ways = ("graph: prefill", "graph and source: prefill", "graph: left padding", "graph and source: left padding")
    for allowed, passed in ((0.0, False), (1.0, True)):
        monkeypatch.setattr("collapse.verify.dynamic.rounding", lambda pieces, allowed=allowed: allowed)
        verdict = verify(exported, llama, samples=ids, program=(program, wrong), settings=SMALL)
        assert [check(verdict, way).passed for way in ways] == [passed] * 4
        assert check(verdict, "graph: weights").passed is False


def test_the_output_may_differ_by_what_rounding_makes_of_the_source(
    llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite = bias("erase", "measured", figures={"tolerance": 1e-6}, config={"rms_norm_eps": 0.01})
    out = export(llama, plan_for(llama, rewrite), tmp_path / "out").root
    ways = ("logits: prefill", "logits: cache", "logits: left padding")
    for allowed, passed in ((0.0, False), (1.0, True)):
        monkeypatch.setattr("collapse.verify.dynamic.rounding", lambda pieces, allowed=allowed: allowed)
        verdict = verify(out, llama, samples=samples(range(VOCABULARY), 12, 6), settings=SMALL)
        assert [check(verdict, way).passed for way in ways] == [passed] * 3


def bias(stage: str, grade: str = "proved", **fields: object) -> ShortCircuit:
    evidence = Evidence(grade=grade, claim="c", method="m", figures=fields.pop("figures", {}))
    whole = {"pass": "dead-module", "site": "old", "evidence": evidence, "by": "zero", "tensors": ("old.bias",)}
    return ShortCircuit(**(whole | {"stage": stage} | fields))


@pytest.mark.parametrize("rewrite", [bias("fuse"), bias("short-circuit"), bias("erase", placeholder=True)])
def test_weights_that_the_plan_leaves_are_declared(llama: Checkpoint, tmp_path: Path, rewrite: ShortCircuit) -> None:
    out = export(llama, plan_for(llama, rewrite, stage=rewrite.stage), tmp_path / "out").root
    verdict = verify(out, llama, samples=samples(range(VOCABULARY), 12), settings=SMALL)
    assert verdict.status == "verified", details(verdict)
    assert check(verdict, "load").figures == {"missing": 0, "mismatched": 0, "unexpected": 0, "declared": 1}


@pytest.mark.parametrize(
    ("grade", "stage", "tolerance", "passes"),
    [("measured", "erase", 10.0, True), ("certified", "short-circuit", 10.0, True), ("measured", "erase", 1e-6, False),
     ("proved", "erase", 10.0, False), ("measured", "fuse", 10.0, False)],
)  # fmt: skip
def test_a_loss_is_allowed_as_far_as_its_evidence_says(
    llama: Checkpoint, tmp_path: Path, grade: str, stage: str, tolerance: float, passes: bool
) -> None:
    rewrite = bias(stage, grade, figures={"tolerance": tolerance}, config={"rms_norm_eps": 0.01})
    out = export(llama, plan_for(llama, rewrite), tmp_path / "out").root
    verdict = verify(out, llama, samples=samples(range(VOCABULARY), 12, 6), settings=SMALL)
    assert float(check(verdict, "logits: prefill").figures["max_abs_diff"]) > 1e-3
    assert (check(verdict, "logits: prefill").passed, verdict.status != "refuted") == (passes, passes)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_plan_may_not_choose_another_token_id(llama: Checkpoint, tmp_path: Path, file: str) -> None:
    edits = {"eos_token_id": 2} if file == "config.json" else {}
    kept = [token for token in KEPT if token != 0]  # the end-of-sequence token, 2, becomes 1
    plan = plan_for(llama, vocabulary(kept, EMBEDDING, config={"vocab_size": len(kept)} | edits))
    out = export(llama, plan, tmp_path / "out").root
    if not edits:
        edit(out, file, eos_token_id=2)
    found = [check for check in verify(out, llama, static_only=True).checks if check.name == "token ids"]
    assert [(check.passed, check.detail) for check in found] == [
        (False, f"{file}: eos_token_id is 2, the source's token is 1 there")
    ]


# Known-wrong rewrites: the files are taken as they are, and running the model must tell.


def run(out: Path, llama: Checkpoint, plan: Plan, ids: Sequence[Sequence[int]]) -> Verdict:
    checks, example = dynamic_checks(out, llama, plan, ids, settings=SMALL)
    return Verdict(checks=checks, counterexample=example)


def edit(out: Path, file: str, **values: object) -> None:
    value = json.loads((out / file).read_bytes()) | values
    (out / file).write_text(json.dumps(value, indent=2))


def swap_rows(out: Path, first: int, second: int) -> None:
    tensors = load_file(out / WEIGHTS)
    tensors[EMBEDDING][[first, second]] = tensors[EMBEDDING][[second, first]]
    save_file(tensors, out / WEIGHTS, {"format": "pt"})


def flip(out: Path, name: str = EMBEDDING) -> None:
    info = Checkpoint.open(out).tensors[name]
    raw = bytearray((out / WEIGHTS).read_bytes())
    raw[info.start + 5] ^= 1
    (out / WEIGHTS).write_bytes(raw)


def shift_rows(out: Path) -> None:
    tensors = load_file(out / WEIGHTS)
    tensors[EMBEDDING] = tensors[EMBEDDING].roll(1, 0)
    save_file(tensors, out / WEIGHTS, {"format": "pt"})


WRONG: dict[str, Callable[[Path], object]] = {
    "two rows swapped": lambda out: swap_rows(out, 3, 4),
    "ids shifted by one": shift_rows,
    "activation": lambda out: edit(out, "config.json", hidden_act="gelu"),
    "rope theta": lambda out: edit(out, "config.json", rope_parameters={"rope_type": "default", "rope_theta": 9999.0}),
    "untied": lambda out: edit(out, "config.json", tie_word_embeddings=False),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_known_wrong_rewrites_are_refuted_by_running(llama: Checkpoint, out: Path, plan: Plan, wrong: str) -> None:
    ids = samples(KEPT, 24, 10)
    WRONG[wrong](out)
    verdict = run(out, llama, plan, ids)
    assert verdict.status == "refuted"
    if wrong == "untied":
        assert "missing lm_head.weight" in check(verdict, "load").detail
        return
    assert check(verdict, "logits: prefill").passed is False
    example = verdict.counterexample
    assert example is not None and example["ids"] in ids
    assert example["id"] in KEPT and example["expected"] != example["found"]


def test_a_dropped_row_that_is_used_is_refuted(llama: Checkpoint, out: Path, plan: Plan) -> None:
    verdict = run(out, llama, plan, [[5, 6], [7, 41, 8]])
    assert details(verdict) == "samples: sample 1 has token 41 at position 1, which the output does not have"
    assert verdict.counterexample == {
        "check": "samples", "ids": [7, 41, 8], "position": 1, "expected": 41, "found": None
    }  # fmt: skip


def test_a_certified_claim_may_leave_some_samples_out(llama: Checkpoint, out: Path, plan: Plan) -> None:
    evidence = Evidence(grade="certified", claim="c", method="m")
    narrow = plan.rewrites[1].model_copy(update={"evidence": evidence})
    certified = plan.model_copy(update={"rewrites": (plan.rewrites[0], narrow)})
    verdict = run(out, llama, certified, [[5, 6, 9], [7, 41, 8]])
    assert check(verdict, "samples").figures == {"samples": 2, "outside": 1}
    assert check(verdict, "samples").passed
    assert run(out, llama, certified, [[41]]).status == "refuted"


def test_erasing_a_weight_that_is_read_is_refuted(llama: Checkpoint, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    out = export(llama, plan_for(llama, erase(name, "old.bias")), tmp_path / "out").root
    verdict = verify(out, llama, samples=samples(KEPT, 12), settings=SMALL)
    assert f"missing {name}" in check(verdict, "load").detail
    assert verdict.status == "refuted"


def test_a_config_that_does_not_fit_the_tensors_is_refuted(llama: Checkpoint, tmp_path: Path) -> None:
    plan = plan_for(llama, vocabulary(KEPT, EMBEDDING, config={"vocab_size": 64}))
    out = export(llama, plan, tmp_path / "out").root
    verdict = verify(out, llama, samples=samples(KEPT, 12), settings=SMALL)
    assert (verdict.status, [found.name for found in verdict.failures]) == ("refuted", ["load"])


def test_a_source_with_weights_missing_proves_nothing(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source")
    tensors = load_file(source.root / WEIGHTS)
    del tensors["model.norm.weight"]
    save_file(tensors, source.root / WEIGHTS, {"format": "pt"})
    source = Checkpoint.open(source.root)
    out = export(source, plan_for(source), tmp_path / "out").root
    with pytest.raises(CheckpointError, match=r"no fitting model\.norm\.weight in the source"):
        verify(out, source, samples=[[1, 2]])


def test_a_source_that_gives_no_numbers_proves_nothing(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source", extra={})
    data = bytearray((source.root / "model.safetensors").read_bytes())
    norm = source.tensors["model.norm.weight"]
    data[norm.start : norm.stop] = torch.full((32,), float("nan")).numpy().tobytes()
    (source.root / "model.safetensors").write_bytes(data)
    source = Checkpoint.open(source.root)
    out = export(source, plan_for(source), tmp_path / "out").root
    with pytest.raises(CheckpointError, match="no numbers"):
        verify(out, source, samples=samples(range(VOCABULARY), 9), settings=SMALL)


def test_a_narrowed_model_is_continued_among_the_kept_ids(llama: Checkpoint, tmp_path: Path) -> None:
    plan = plan_for(llama, vocabulary((0, 1, 2, 9), EMBEDDING))
    out = export(llama, plan, tmp_path / "out").root
    verdict = verify(out, llama, samples=samples((1, 9), 8, 8), plan=plan, settings=SMALL)
    figures = check(verdict, "greedy").figures
    assert verdict.status == "verified", details(verdict)
    assert (figures["left"], figures["stayed"], figures["tokens"]) == (2, 0, 8)


@pytest.mark.parametrize(("grade", "expected"), [("proved", [[1, 9, 5, 9]]), ("certified", [[1, 9]])])
def test_samples_of_a_proved_claim_keep_the_tokens_that_would_refute_it(
    llama: Checkpoint, grade: str, expected: list[list[int]]
) -> None:
    evidence = PROVED.model_copy(update={"grade": grade})
    plan = plan_for(llama, vocabulary((1, 2, 9), EMBEDDING, evidence=evidence))
    assert inside(Sequences(calibration=(), held_out=((1, 9, 5, 9),)), plan, 1) == expected


def test_a_switch_without_effect_is_verified_and_one_with_effect_is_not(llama: Checkpoint, tmp_path: Path) -> None:
    for value, status in ((1e-6, "verified"), (1e-2, "refuted")):
        switch = Specialise(**{"pass": "p"}, site="norm", evidence=PROVED, config={"rms_norm_eps": value})
        out = export(llama, plan_for(llama, switch), tmp_path / status).root
        assert verify(out, llama, samples=samples(KEPT, 12), settings=SMALL).status == status


# The comparisons themselves.


def block(reference: list[float], found: list[float]) -> Block:
    return Block((1, 2), (1,), torch.tensor([reference]), torch.tensor([found]))


@pytest.mark.parametrize(
    ("reference", "found", "passed"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0], [1.0, 2.0 + 1.2e-5], True),
        ([1.0, 2.0], [1.0, 2.0 + 1.4e-5], False),
        ([1.0, float("nan")], [1.0, float("nan")], False),
        ([1.0, 2.0], [1.0, float("nan")], False),
        ([1.0, float("-inf")], [1.0, float("-inf")], True),
        ([1.0, float("-inf")], [1.0, float("inf")], False),
        ([1.0, float("inf")], [1.0, 2.0], False),
    ],
)
def test_logits_agree_within_the_tolerance_only(reference: list[float], found: list[float], passed: bool) -> None:
    outcome, example = compare_logits("x", [block(reference, found)], EQ, [10, 20])
    assert (outcome.passed, example is None) == (passed, passed)
    assert example is None or (example["id"], example["position"]) == (20, 1)


@pytest.mark.parametrize(
    ("own", "gap", "passed"),
    [
        (0.0, 1.2e-5, True),
        (0.0, 1.4e-5, False),
        (3.6e-5, 4.0e-5, True),  # Gemma 3 270M on a machine with AVX-512
        (3.6e-5, 7.4e-5, False),
        (8e-5, 9.9e-5, True),
        (8e-5, 1.1e-4, False),
        (3.0, 1.1e-4, False),  # a source whose cache is wrong excuses nothing
        (float("nan"), 1.1e-4, False),
    ],
)
def test_another_way_to_compute_may_differ_by_twice_what_the_source_s_pieces_do(
    own: float, gap: float, passed: bool
) -> None:
    pieces = [block([0.0, 0.0], [0.0, 0.0]), block([0.0, 0.0], [own, 0.0])]
    outcome, _ = compare_logits("x", [block([1.0, 2.0], [1.0, 2.0 + gap])], EQ.rounded(rounding(pieces)), [10, 20])
    assert outcome.passed is passed
    assert rounding([]) == 0


@pytest.mark.parametrize(
    ("expected", "margins", "found", "passed", "figures"),
    [
        ((4, 5, 6), (9.0, 9.0, 9.0), (0, 1, 2), True, (1, 0, 0, 3)),
        ((4, 5, 6), (9.0, 9.0, 9.0), (0, 2, 2), False, (0, 0, 0, 1)),
        ((4, 5, 6), (9.0, 0.1, 9.0), (0, 2, 0), True, (1, 0, 1, 1)),
        ((4, 5, 6), (0.1, 9.0, 9.0), (2, 2, 0), None, (1, 0, 1, 0)),
    ],
)
@pytest.mark.parametrize("leaves", [False, True])
def test_greedy_is_compared_up_to_a_near_tie(
    expected: tuple[int, ...], margins: tuple[float, ...], found: tuple[int, ...], passed: bool | None, figures: tuple,
    leaves: bool,
) -> None:  # fmt: skip
    pair = (Continuation((1,), expected, margins, leaves), Continuation((1,), found, margins))
    outcome, example = compare_greedy("g", [pair], [4, 5, 6], 0.2)
    if leaves:
        figures = (0, figures[0], *figures[2:])
    assert outcome.passed is passed
    assert tuple(outcome.figures[name] for name in ("stayed", "left", "near_ties", "tokens")) == figures
    assert (example is not None) == (passed is False)


def test_a_job_looks_at_bounded_positions_and_cuts_at_the_context() -> None:
    ids = [list(range(50)), [1, 2, 3], [4]]
    job = make_job(ids, columns=10, context=20, settings=Settings(logit_bytes=4 * 10 * 3 * 5, cached=1, padded=0))
    assert [len(sequence) for sequence in job.sequences] == [20, 3, 1]
    assert job.positions[1:] == ((0, 1, 2), (0,))
    assert set(job.positions[0]) == {3, 7, 11, 15, 19} | {cut - 1 for cut in cuts(20, 4)}
    assert all(len(prompt) <= 4 for group in job.prompts for prompt in group), "16 new tokens have room"


# The command.


def test_the_command_exits_with_the_verdict(command: Command, llama: Checkpoint, out: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(samples(KEPT, 12, 6)))
    base = ("verify", out, "--source", llama.root)
    found = command(*base, "--ids", tmp_path / "ids.json", "--new", 3, "--json")
    value = json.loads(found.out)
    assert (found.code, value["status"]) == ({"verified": 0, "inconclusive": 2}[value["status"]], value["status"])
    assert "logits: cache" in [entry["name"] for entry in value["checks"]]
    quick = command(*base, "--quick")
    assert (quick.code, "verified (files only" in quick.out) == (0, True)
    assert command("verify", out).code == 2
    flip(out)
    quick = command(*base, "--quick")
    assert (quick.code, "FAIL  tensor bytes" in quick.out) == (1, True)


def test_quiet_leaves_the_exit_code_alone(command: Command, llama: Checkpoint, out: Path) -> None:
    arguments = ("verify", out, "--source", llama.root, "--quick", "--quiet")
    assert (command(*arguments).code, command(*arguments).out) == (0, "")
    flip(out)
    assert (command(*arguments).code, command(*arguments).out) == (1, "")


def test_the_field_of_a_corpus_is_taken_from_jsonl_only(
    command: Command, llama: Checkpoint, out: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.log").write_text("line\n")
    found = command("verify", out, "--source", llama.root, "--corpus", tmp_path / "a.log", "--field", "text")
    assert (found.code, found.err.count("\n")) == (2, 1)
    assert "field 'text' needs a .jsonl file" in found.err


def test_samples_are_drawn_from_the_schemas_tokens(command: Command, llama: Checkpoint, tmp_path: Path) -> None:
    out = export(llama, plan_for(llama, erase("old.bias")), tmp_path / "out").root
    found = command("verify", out, "--source", llama.root, "--prompts", 2, "--new", 2)
    assert (found.code, found.out.splitlines()[-1]) == (0, "verified")
    assert "8 of 8 samples" in found.out


@pytest.mark.parametrize("text", ["[]", "[[]]", '[["a"]]', "{", "[[1.5]]"])
def test_bad_samples_are_one_line(command: Command, llama: Checkpoint, out: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "ids.json").write_text(text)
    found = command("verify", out, "--source", llama.root, "--ids", tmp_path / "ids.json")
    assert (found.code, found.err.count("\n")) == (2, 1)


def test_manifest_lists_every_file(exported: Path) -> None:
    assert set(load_manifest(exported).files) == {WEIGHTS, "config.json", "generation_config.json"}
