"""The distillation itself, on random Llamas: what it lowers, what it leaves, what it holds, and when it gives up."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from collapse.checkpoint import Checkpoint
from collapse.errors import PlanError
from collapse.heal.losses import divergence, stream_distance
from collapse.heal.pair import Pair, divergences, run
from collapse.heal.settings import Settings, parse_tokens
from collapse.heal.texts import windows
from collapse.heal.train import divide, heal, own_parameters
from collapse.sequences import encoder
from tests.healing import BLOCKS, FAST, FFN, IDS, LENGTH, drawn_windows, hurt, kl, pair_of, source_model
from tests.shared import SHARED, needs_shared

NONE = torch.zeros(0, LENGTH, dtype=torch.long)


def ignore(done: int, total: int) -> None:
    pass


def state(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def healed(pair: Pair, protected=NONE, settings: Settings = FAST, seed: int = 0):
    return heal(pair, drawn_windows(160, seed=seed), protected, settings, ignore)


# What is made small.


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_divergence_is_that_of_the_definition(temperature: float) -> None:
    made = torch.Generator().manual_seed(0)
    source, student = (torch.randn(2, 3, 7, generator=made, dtype=torch.float64) for _ in range(2))
    found = divergence(source, student, temperature)
    p, q = (logits.div(temperature).softmax(-1) for logits in (source, student))
    expected = temperature**2 * (p * (p / q).log()).sum(-1).mean(-1)
    assert found.shape == (2,)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(divergence(source, source + 5.0).abs() < 1e-6, torch.tensor([True, True]))


def test_the_streams_distance_counts_every_token_by_its_own_size() -> None:
    source = torch.tensor([[[3.0, 4.0], [3000.0, 4000.0]]])
    student = torch.tensor([[[3.0, 9.0], [3000.0, 4000.0]]])
    assert float(stream_distance([source, source], [student, source])) == pytest.approx((1 / 2 + 0) / 2)
    assert float(stream_distance([source], [2 * source])) == pytest.approx(1.0)


def test_what_leaves_the_blocks_is_seen_and_nothing_stays_hooked() -> None:
    model, ids = source_model(), drawn_windows(2)
    blocks = [model.get_submodule(path) for path, _ in BLOCKS]
    seen = run(model, ids, blocks)
    assert all(not block._forward_hooks for block in blocks)
    plain = model(input_ids=ids, output_hidden_states=True)
    assert torch.equal(seen.logits, plain.logits)
    assert torch.equal(seen.streams[0], plain.hidden_states[1]) and len(seen.streams) == len(blocks)


# What healing does.


def test_the_divergence_on_unseen_text_falls_and_other_tensors_stay() -> None:
    source = source_model()
    student, unseen = hurt(source), drawn_windows(40, seed=9)
    before, kept, original = kl(source, student, unseen), state(student), state(source)
    found = healed(pair_of(source, student))
    assert kl(source, student, unseen) < 0.5 * before
    assert found.weights.keys() == FFN and found.figures["steps"] == 40 and found.figures["tokens"] == 40 * 4 * LENGTH
    now = state(student)
    assert all(torch.equal(now[name], found.weights[name]) for name in FFN)
    assert all(torch.equal(now[name], kept[name]) for name in now.keys() - FFN)
    assert all(not torch.equal(now[name], kept[name]) for name in FFN)
    assert all(torch.equal(tensor, original[name]) for name, tensor in source.state_dict().items())
    assert found.figures["calibration_kl"] < found.figures["calibration_kl_before"]


def test_two_runs_give_the_same_weights_and_another_seed_others() -> None:
    source = source_model()
    first, second = (healed(pair_of(source, hurt(source))) for _ in range(2))
    other = healed(pair_of(source, hurt(source)), settings=replace(FAST, seed=1))
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in FFN)
    assert first.figures == second.figures
    assert not all(torch.equal(first.weights[name], other.weights[name]) for name in FFN)


def test_the_hidden_state_term_brings_the_streams_nearer() -> None:
    source, ids = source_model(), drawn_windows(20, seed=5)

    def distance(hidden: float) -> float:
        student = hurt(source)
        healed(pair_of(source, student), settings=replace(FAST, hidden=hidden))
        seen = [run(one, ids, [one.get_submodule(path) for path, _ in BLOCKS]).streams for one in (source, student)]
        return stream_distance(*seen).item()

    assert distance(10.0) < distance(0.0)


@pytest.mark.parametrize("rate", [30.0, 1e30])
def test_a_course_that_diverges_leaves_the_weights_as_they_were(rate: float) -> None:
    source = source_model()
    student = hurt(source, 0.02)
    before = state(student)
    found = healed(pair_of(source, student), settings=replace(FAST, rate=rate, clip=1e9))
    assert found.weights == {}
    assert all(torch.equal(tensor, before[name]) for name, tensor in student.state_dict().items())
    assert found.figures["kept_step"] == 0
    assert found.figures["calibration_kl"] == found.figures["calibration_kl_before"]


def test_a_student_that_says_what_the_source_says_is_left() -> None:
    source = source_model()
    student = hurt(source, 0.0)
    found = healed(pair_of(source, student))
    assert found.weights == {} and found.figures["calibration_kl"] == 0
    assert torch.equal(state(student)["lm_head.weight"], state(source)["lm_head.weight"])


def test_a_tensor_that_both_models_share_is_trained_in_the_student_alone() -> None:
    source = source_model()
    student = hurt(source)
    shared = "model.layers.0.self_attn.q_proj"
    student.get_submodule(shared).weight = source.get_submodule(shared).weight
    before = source.get_submodule(shared).weight.detach().clone()
    healed(pair_of(source, student, FFN | {f"{shared}.weight"}))
    assert torch.equal(source.get_submodule(shared).weight, before)
    assert not torch.equal(student.get_submodule(shared).weight, before)


def test_tied_parameters_stay_tied_and_are_trained_once() -> None:
    model = source_model()
    model.lm_head.weight = model.model.embed_tokens.weight
    found = own_parameters(model, frozenset({"lm_head.weight"}))
    assert list(found) == ["model.embed_tokens.weight"]
    assert model.lm_head.weight is model.model.embed_tokens.weight is found["model.embed_tokens.weight"]
    assert [name for name, one in model.named_parameters() if one.requires_grad] == list(found)


@needs_shared
def test_a_trained_model_without_a_block_is_healed_alike_in_fp32_and_bf16() -> None:
    """Blocks 1 and 3 learn to do without block 2 of a model of short stories, on prose that it reads."""
    root = SHARED / "models" / "stories260K"
    encode = encoder(Checkpoint.open(root))
    text = (SHARED / "data" / "prose" / "tinyshakespeare.txt").read_text(encoding="utf-8")
    learnt, unseen = (windows([part], encode, 64, 400) for part in (text[:200_000], text[-20_000:]))
    source = AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32).eval()
    before, after = {}, {}
    for bf16 in (False, True):
        student = AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32).eval()
        del student.model.layers[2]
        blocks = tuple((f"model.layers.{old}", f"model.layers.{new}") for new, old in enumerate((0, 1, 3, 4)))
        beside = frozenset(
            n for n, _ in student.named_parameters() if n.startswith(("model.layers.1.", "model.layers.2."))
        )
        before[bf16] = kl(source, student, unseen)
        settings = Settings(tokens=100 * 4 * 64, length=64, rows=4, rate=2e-3, bf16=bf16)
        heal(Pair(source, student, beside, blocks), learnt, learnt[:0], settings, ignore)
        after[bf16] = kl(source, student, unseen)
    assert before[True] == before[False] and after[False] < 0.5 * before[False]
    assert after[True] == pytest.approx(after[False], rel=0.05)


# The text that is held.

PROTECTED = partial(drawn_windows, low=IDS // 2)
DOMAIN = partial(drawn_windows, high=IDS // 4)


def course(protect: bool) -> tuple[list[float], list[float]]:
    """Return the divergence before and after on unseen protected text, and on unseen text of the domain.

    The student reads the domain's ids wrongly, and may change only what it does with all ids alike.
    """
    source = source_model()
    student, made = hurt(source, 0.3), torch.Generator().manual_seed(1)
    with torch.no_grad():
        rows = student.model.embed_tokens.weight[: IDS // 4]
        rows += torch.rand(rows.shape, generator=made) - 0.5
    unseen = PROTECTED(40, seed=8), DOMAIN(40, seed=9)
    before = [kl(source, student, windows) for windows in unseen]
    held = PROTECTED(200, seed=7) if protect else NONE
    heal(pair_of(source, student), DOMAIN(160), held, replace(FAST, tokens=2 * FAST.tokens), ignore)
    after = [kl(source, student, windows) for windows in unseen]
    return [before[0], after[0]], [before[1], after[1]]


def test_protected_text_is_held_where_plain_healing_forgets_it() -> None:
    forgotten, better = course(protect=False)
    assert forgotten[1] > forgotten[0] and better[1] < better[0]
    held, still_better = course(protect=True)
    assert held[0] == forgotten[0] and held[1] <= held[0]
    assert still_better[1] < still_better[0]


def test_text_that_nothing_endangers_lets_the_multiplier_fall_to_nothing() -> None:
    source = source_model()
    found = healed(pair_of(source, hurt(source)), drawn_windows(60, seed=4))
    assert found.figures["multiplier"] == 0
    assert found.figures["protected_kl"] < found.figures["protected_kl_before"]


# Windows and settings.


def test_what_decides_is_not_trained_on() -> None:
    texts = divide(torch.arange(100)[:, None], torch.arange(7)[:, None])
    assert texts.check.flatten().tolist() == [8, 25, 41, 58, 75, 91]
    assert sorted([*texts.train.flatten().tolist(), *texts.check.flatten().tolist()]) == list(range(100))
    assert (len(texts.protect), texts.protect_check.tolist()) == (6, [[3]])
    assert [len(part) for part in (divide(torch.arange(1000)[:, None], NONE).check, divide(NONE, NONE).train)] == [
        16,
        0,
    ]


def test_the_rate_rises_and_falls_to_a_tenth() -> None:
    settings = Settings(tokens=100 * 4096)
    factors = [settings.factor(step) for step in range(settings.steps)]
    assert settings.steps == 100 and factors[:3] == [0.1, 0.2, pytest.approx(0.3)]
    assert max(factors) == factors[9] == factors[10] == 1 and factors[55] == pytest.approx(0.55)
    assert factors[-1] == pytest.approx(0.1, abs=0.001) and factors[10:] == sorted(factors[10:], reverse=True)


@pytest.mark.parametrize(("text", "tokens"), [("5000", 5000), ("200k", 200_000), ("1.5M", 1_500_000), (" 3K ", 3000)])
def test_numbers_of_tokens(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "0", "-5", "many", "5 k k", "1e9", "0.0001", "k", "nan"])
def test_what_is_no_number_of_tokens_is_one_line(text: str) -> None:
    with pytest.raises(PlanError, match="is no number of tokens; write for example 200k"):
        parse_tokens(text)


@pytest.mark.parametrize(
    "wrong", [{"tokens": 0}, {"rate": 0.0}, {"rate": math.inf}, {"hidden": -1.0}, {"scope": "some"}, {"temperature": 0}]
)
def test_settings_that_mean_nothing_are_refused(wrong: dict) -> None:
    with pytest.raises(PlanError):
        Settings(**({"tokens": 1000} | wrong))


def test_divergences_are_by_window() -> None:
    source = source_model()
    student, windows = hurt(source), drawn_windows(3)
    found = divergences(source, student, windows)
    with torch.no_grad():
        p, q = (one(windows).logits.log_softmax(-1) for one in (source, student))
    expected = functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean(-1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert divergences(source, student, NONE).shape == (0,)


def test_a_step_is_the_mean_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two windows at a time or all together: the same gradients but for rounding."""
    found = []
    for together in (1, 4):
        monkeypatch.setattr("collapse.heal.train.TOGETHER", together)
        source = source_model()
        found.append(healed(pair_of(source, hurt(source)), settings=replace(FAST, tokens=2 * 4 * LENGTH, checks=1)))
    assert found[0].weights.keys() == found[1].weights.keys() != set()
    for name, tensor in found[0].weights.items():
        assert torch.allclose(tensor, found[1].weights[name], atol=2e-4), name
