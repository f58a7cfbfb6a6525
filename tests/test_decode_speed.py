"""A budget of decode speed, confirmed by a clock that the test holds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from collapse import Options, export
from collapse.budget import parse_budgets
from collapse.errors import UnsupportedError
from collapse.manifest import load_manifest
from collapse.progress import Stopwatch
from collapse.report.data import Figures, Report
from collapse.report.speed import DecodeSpeed, decode_speed, sentence
from collapse.runtime import confirm as confirming
from collapse.runtime.decoding import FEWEST, Clock, Decoding, in_turns
from tests.architectures import save_tiny, tiny_model
from tests.test_export import LOG, save_tokenizer

SIZES = dict(num_hidden_layers=4, vocab_size=900, max_position_embeddings=256)


class Script:
    """A clock that stands still but within a step, which takes what the script says next."""

    def __init__(self, steps: Iterator[float]) -> None:
        self._steps, self._now, self._running = steps, 0.0, False

    def __call__(self) -> float:
        if self._running:
            self._now += next(self._steps)
        self._running = not self._running
        return self._now


def constant(seconds: float) -> Script:
    return Script(seconds for _ in count())


def ticking(seconds: float) -> Clock:
    """Return a clock that goes on by as much each time that it is read."""
    ticks = count()
    return lambda: seconds * next(ticks)


def decoding(layers: int = 1) -> Decoding:
    return Decoding(tiny_model("llama", num_hidden_layers=layers), torch.tensor([[1, 2, 3]]))


def test_a_step_sees_every_earlier_token() -> None:
    model = tiny_model("llama")
    one = Decoding(model, torch.tensor([[5, 6, 7]]))
    for _ in range(2):
        one.step()
    with torch.no_grad():
        whole = model(input_ids=torch.tensor([[5, 6, 7, 7, 7]])).logits[:, -1]
    assert torch.allclose(one._output.logits[:, -1], whole, atol=1e-6)
    assert one.length == 5


def test_models_take_turns_and_each_gets_its_own_times() -> None:
    # rounds begin with the last model, and turn around each time: 2 1 | 1 2 | 2 1 ...
    script = Script(iter([20.0, 10.0, 11.0, 21.0, 22.0, 12.0]))
    first, second = in_turns((decoding(), decoding(2)), 2, warm_up=1, clock=script)
    assert (first, second) == ((11.0, 12.0), (21.0, 22.0))


@pytest.mark.parametrize(("seconds", "steps"), [(0.0, FEWEST), (20.0, 10), (1e9, 16)])
def test_a_slow_model_is_measured_by_fewer_steps(seconds: float, steps: int) -> None:
    (found,) = in_turns((decoding(),), 16, warm_up=0, seconds=seconds, clock=constant(2.0))
    assert found == (2.0,) * steps


def test_a_model_without_a_cache_has_no_decode_step() -> None:
    model = tiny_model("llama")
    model.config.use_cache = False
    forward = model.forward
    model.forward = lambda **given: forward(**(given | {"use_cache": False}))
    with pytest.raises(UnsupportedError, match="no KV cache"):
        Decoding(model, torch.tensor([[1, 2]]))


def speed(*ratios: float, limit: float = 0.7) -> DecodeSpeed:
    before = tuple(2.0 for _ in ratios)
    after = tuple(2.0 * ratio for ratio in ratios)
    return decode_speed(before, after, limit=limit, predicted=0.68, prompt=64, threads=1, dtype="bfloat16")


def test_the_median_of_the_paired_ratios_decides() -> None:
    found = speed(0.5, 0.6, 0.69, 0.9, 5.0)
    assert found.measured == pytest.approx(0.69)
    assert found.quartiles == pytest.approx((0.6, 0.9))
    assert (found.source_seconds, found.output_seconds) == pytest.approx((2.0, 1.38))
    assert found.confirmation == "confirmed"
    assert speed(0.5, 0.6, 0.71, 0.9, 0.95).confirmation == "not confirmed on this machine"
    assert speed(0.7, 0.7).confirmation == "confirmed"


def test_a_drift_that_falls_on_both_changes_no_ratio() -> None:
    before = tuple(accumulate(1.0 for _ in range(9)))
    found = decode_speed(
        before, tuple(0.5 * one for one in before), limit=0.6, predicted=0.5, prompt=1, threads=1, dtype="float32"
    )
    assert (found.measured, found.quartiles) == (0.5, (0.5, 0.5))


def test_the_sentence_has_both_figures_and_what_was_asked() -> None:
    text = sentence(speed(0.75, 0.75))
    assert text.startswith("Decode budget not confirmed on this machine: a token takes 75.0% of the source's time")
    assert "68.0% as predicted from weight bytes; asked for was at most 70.0%" in text
    assert sentence(speed(0.6, 0.6)).startswith("Decode budget confirmed:")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = save_tiny("llama", tmp_path_factory.mktemp("source") / "tiny", bos_token_id=0, eos_token_id=1, **SIZES)
    save_tokenizer(root)
    return root


def exported(source: Path, output: Path, budget: str, clock: Clock) -> Report:
    options = Options(passes=("layers",), budgets=parse_budgets(budget))
    result = export(source, output, LOG, options, watch=Stopwatch(quiet=True, clock=clock))
    assert Report.load(output / "report.json") == result.report
    return result.report


class Halving(Script):
    """Source and output in turns: whichever model a step is of, the source takes 1/2 s and the output 1/4 s."""

    def __init__(self) -> None:
        turns = ((0.5, 0.25) if number % 2 else (0.25, 0.5) for number in count())
        super().__init__(one for turn in turns for one in turn)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the measurement a clock of its own: the stages of the run read the other one."""
    whole = confirming.confirm
    monkeypatch.setattr("collapse.pipeline.confirm", lambda *given: whole(*given[:-1], Halving()))


@pytest.mark.usefixtures("scripted")
def test_an_export_with_a_decode_budget_says_what_was_measured(source: Path, tmp_path: Path) -> None:
    report = exported(source, tmp_path / "out", "decode=-5%", ticking(1.0))
    found = report.decode_speed
    assert found is not None
    read = report.after.weight_bytes_per_decode_token / report.before.weight_bytes_per_decode_token
    assert (found.measured, found.predicted, found.limit) == (0.5, read, 0.95)
    assert (found.confirmation, found.prompt, found.steps) == ("confirmed", 32, FEWEST)
    assert sentence(found) in (tmp_path / "out" / "REPORT.md").read_text()
    plan = load_manifest(tmp_path / "out").plan
    assert "confirmed" not in str(plan.to_json())


def test_the_clock_of_the_run_is_the_one_that_is_read(source: Path, tmp_path: Path) -> None:
    report = exported(source, tmp_path / "out", "decode=-5%", ticking(0.25))
    assert report.decode_speed is not None
    assert (report.decode_speed.measured, report.decode_speed.source_seconds) == (1.0, 0.25)
    assert report.decode_speed.confirmation == "not confirmed on this machine"
    assert report.verified.status == "verified"


def test_without_a_decode_budget_nothing_is_measured(source: Path, tmp_path: Path) -> None:
    report = exported(source, tmp_path / "out", "params=-5%", ticking(1.0))
    assert report.decode_speed is None
    assert "Decode budget" not in (tmp_path / "out" / "REPORT.md").read_text()


def test_what_cannot_be_measured_is_a_note(source: Path, tmp_path: Path) -> None:
    short = LOG | {"max_tokens": 16, "workload": {"prompt": 8, "new": 8}}
    options = Options(passes=("layers",), budgets=parse_budgets("decode=-5%"))
    report = export(source, tmp_path / "out", short, options).report
    assert report.decode_speed is None
    assert report.notes[-1].startswith("The decode budget was not confirmed by measurement: there is no room for 8")


def test_quantised_weights_are_not_timed() -> None:
    quantised = SimpleNamespace(quantisation=object())
    budget = parse_budgets("decode=-5%")[0]
    found = confirming.confirm(quantised, Path("out"), None, [1], budget, (Figures(), Figures()), constant(1.0))
    assert isinstance(found, str) and found.startswith("the weights are quantised")


def test_a_budget_of_decode_speed_is_found_among_others() -> None:
    budgets = parse_budgets("kl<=0.02,decode=-30%,params=-10%")
    assert str(confirming.asked_speed(budgets)) == "decode=-30%"
    assert confirming.asked_speed(budgets[:1]) is None
