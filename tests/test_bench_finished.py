"""Benchmarks of finished models: losses with each model's own tokens, the certified curve, decode speed in turns."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from itertools import count
from math import log
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks import decode, headline
from benchmarks.decode import Generator, summarise, take_turns
from benchmarks.finished import Finished, open_all
from benchmarks.headline import Headline, draw, points_of
from benchmarks.losses import Comparison, context_of, start_of, totals
from benchmarks.peers.text import Source
from benchmarks.spread import Spread, spread
from collapse import Options, export
from collapse.budget import parse_budgets
from collapse.certify.losses import SequenceLoss
from collapse.certify.metrics import Design
from collapse.checkpoint import Checkpoint
from collapse.errors import CollapseError
from collapse.report.data import Figures, Report
from tests.architectures import save_tiny, tiny_model
from tests.small_tokenizers import CORPUS, tokenizer_data
from tests.test_export import LOG, TINY, save_tokenizer

SAME = 1e-6  # fp32 logits of one function, of fewer columns
INSIDE = "Jun 14 15:16:01 combo sshd(pam_unix)[19939]: authentication failure"
OUTSIDE = "a villain’s king"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = save_tiny("llama", tmp_path_factory.mktemp("source") / "tiny", bos_token_id=0, eos_token_id=1, **TINY)
    save_tokenizer(root)
    return root


@pytest.fixture(scope="module")
def cut(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an export that lost rows of the vocabulary, and nothing else."""
    output = tmp_path_factory.mktemp("out") / "cut"
    export(source, output, LOG, Options(passes=("vocabulary",), prompts=2, new_tokens=2))
    return output


@pytest.fixture(scope="module")
def models(source: Path, cut: Path) -> tuple[Finished, ...]:
    return open_all(str(source), [str(cut), f"again={source}"])


# Models


def test_models_have_names_sizes_and_the_sources_ids(models: tuple[Finished, ...], cut: Path) -> None:
    whole, smaller, again = models
    assert [one.name for one in models] == ["source", "cut", "again"]
    report = Report.load(cut / "report.json")
    assert smaller.figures == report.after
    for one in (whole, again):  # FLOPs are of another prompt, sizes are not
        held = one.figures.model_dump(
            include={"params", "bytes", "kv_bytes_per_token", "weight_bytes_per_decode_token"}
        )
        assert held.items() <= report.before.model_dump().items()
    assert whole.kept is None and smaller.kept is not None
    assert len(smaller.kept) < len(whole.tokenizer.get_vocab())
    ids = smaller.tokenizer.encode(INSIDE).ids
    assert (
        smaller.source_ids(ids)
        == tuple(whole.tokenizer.encode(INSIDE).ids)
        == whole.source_ids(smaller.source_ids(ids))
    )


def test_what_was_made_of_another_source_is_refused(cut: Path, tmp_path: Path) -> None:
    other = save_tiny("llama", tmp_path / "other", bos_token_id=0, eos_token_id=1, **TINY | {"num_hidden_layers": 2})
    with pytest.raises(CollapseError, match="cut: was collapsed from another source"):
        open_all(str(other), [str(cut)])


def test_two_models_of_one_name_are_refused(source: Path) -> None:
    with pytest.raises(CollapseError, match="two models are called tiny; give NAME=DIR"):
        open_all(str(source), [str(source), str(source)])


# Losses


def compared(models: tuple[Finished, ...], text: str) -> tuple[SequenceLoss, ...]:
    whole, *others = ((one, one.load()) for one in models)
    (found,) = Comparison(whole, tuple(others)).losses([text])
    return found


def rows(model: Finished, text: str) -> tuple[torch.Tensor, list[int]]:
    """Return the logits that predict a text's tokens, and the tokens."""
    ids = model.tokenizer.encode(text, add_special_tokens=False).ids
    context = model.tokenizer.encode("\n").ids
    with torch.no_grad():
        logits = model.load()(input_ids=torch.tensor([[*context, *ids]])).logits[0, len(context) - 1 : -1]
    return logits.double(), ids


def test_the_source_itself_loses_nothing(models: tuple[Finished, ...]) -> None:
    _, again = compared(models, OUTSIDE)
    assert (again.kl, again.flips, again.nll, again.text_bytes) == (0.0, 0, again.source_nll, len(OUTSIDE.encode()))


def test_a_cut_vocabulary_gains_what_the_source_gave_to_ids_that_went(models: tuple[Finished, ...]) -> None:
    whole, smaller, _ = models
    found, _ = compared(models, INSIDE)
    logits, ids = rows(whole, INSIDE)
    logp = logits.log_softmax(-1)
    lost = 1 - logp.exp()[:, smaller.kept].sum(-1)
    nll = -logp.gather(-1, torch.tensor(ids)[:, None]).sum()
    assert found.tokens == len(ids)
    assert found.source_nll == pytest.approx(float(nll), abs=1e-4)
    assert found.lost_mass == pytest.approx(float(lost.sum()), abs=1e-4)
    assert found.nll == pytest.approx(float(nll + torch.log1p(-lost).sum()), abs=1e-4)
    assert found.kl == pytest.approx(0, abs=SAME)


def smaller_lacks(models: tuple[Finished, ...]) -> list[str]:
    """Return the longest tokens first that the cut vocabulary has no longer."""
    gone = models[0].tokenizer.get_vocab().keys() - models[1].tokenizer.get_vocab().keys()
    return sorted(gone, key=lambda token: (-len(token), token))


def test_a_text_that_needs_other_tokens_is_scored_whole_by_both(models: tuple[Finished, ...]) -> None:
    whole, smaller, _ = models
    words = [token for token in smaller_lacks(models) if token.isalpha()][:6]
    text = " ".join(words)
    found, again = compared(models, text)
    logits, ids = rows(smaller, text)
    own = whole.tokenizer.encode(text, add_special_tokens=False).ids
    assert found.tokens == len(ids) > len(own) == again.tokens
    assert found.nll == pytest.approx(
        float(-logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None]).sum()), abs=1e-4
    )
    assert found.source_nll == pytest.approx(again.source_nll)
    assert found.text_bytes == again.text_bytes
    assert found.kl == pytest.approx(0, abs=SAME)  # the same function on the same tokens


def byte_level() -> Tokenizer:
    found = Tokenizer.from_str(json.dumps(tokenizer_data("byte-level")))
    found.no_padding()
    return found


def test_a_text_is_cut_after_a_token_and_within_its_characters() -> None:
    tokenizer = byte_level()
    assert start_of("abc", tokenizer, 100) == "abc"
    text = CORPUS[2] * 3
    for length in range(1, 40):
        part = start_of(text, tokenizer, length) if length > 1 else "c"
        assert text.startswith(part)
        assert len(tokenizer.encode(part, add_special_tokens=False).ids) <= length
    assert len(tokenizer.encode(start_of(text, tokenizer, 30), add_special_tokens=False).ids) >= 29


def test_no_special_token_stands_between_context_and_text() -> None:
    tokenizer = byte_level()  # puts <eos> behind
    assert context_of(tokenizer) == tuple(tokenizer.encode("\n", add_special_tokens=False).ids)
    fallback = Tokenizer.from_str(json.dumps(tokenizer_data("byte-fallback")))  # puts <s> before
    assert context_of(fallback)[0] == fallback.token_to_id("<s>")


def loss(**changes: float) -> SequenceLoss:
    usual = {"tokens": 10, "text_bytes": 40, "source_nll": 8.0, "nll": 10.0, "kl": 1.0, "flips": 2, "confident": 4,
             "confident_flips": 1}  # fmt: skip
    return SequenceLoss(**usual | changes)


def test_totals_are_rates_over_all_texts() -> None:
    found = totals([loss(), loss(tokens=30, nll=8.0, kl=0.0, flips=0, confident=16, confident_flips=0)])
    assert (found.texts, found.tokens, found.text_bytes) == (2, 40, 80)
    assert (found.kl, found.flips, found.confident_flips) == (1 / 40, 2 / 40, 1 / 20)
    assert found.regret == pytest.approx(2 / 16)
    assert found.bits_per_byte - found.source_bits_per_byte == pytest.approx(2 / log(2) / 80)


# The curve


def stub(name: str, size: int) -> Finished:
    found = Finished(name, Checkpoint, None)  # only its figures are read
    found.__dict__["figures"] = Figures(bytes=size, params=size // 2, weight_bytes_per_decode_token=size // 4)
    return found


def test_a_model_behind_one_that_fails_is_not_tested() -> None:
    good, bad = [loss(nll=8.0, kl=0.0)] * 200, [loss(kl=9.0)] * 200
    ladder = [stub("large", 400), stub("middle", 300), stub("small", 200)]
    points = points_of(ladder, [good, bad, good], parse_budgets("kl<=0.1"), Design(split="s", length=10))
    assert [point.certified for point in points] == [True, False, None]
    assert [point.sizes.name for point in points] == ["large", "middle", "small"]
    bound = points[2].bounds
    assert (bound.tries, bound.met) == (3, True)  # the bounds hold for all together
    assert points[0].sizes.weight_bytes_per_decode_token == 100


def test_a_bound_on_capped_losses_is_not_shown_as_one_on_the_loss() -> None:
    """Where a text lost more than the cap, the bound may lie below what was measured."""
    far = [loss(nll=108.0, kl=0.1)] * 200  # 10 nats a token more than the source
    (beyond,) = points_of([stub("far", 400)], [far], parse_budgets("regret<=1%"), Design(split="s", length=10))
    (within,) = points_of([stub("near", 400)], [[loss()] * 200], parse_budgets("kl<=1"), Design(split="s", length=10))
    assert beyond.bounds.bounds[0].upper < beyond.losses.regret and beyond.certified is False
    assert "regret has no bound: 200 texts lost more than the cap" in headline.show(beyond)
    assert f"kl <= {within.bounds.bounds[0].upper:.2%}" in headline.show(within)


def log_text(seed: int, lines: int = 60) -> str:
    random = Random(seed)
    return "".join(" ".join(random.sample(CORPUS[0].split(), 6)) + f" {random.randrange(99)}\n" for _ in range(lines))


def test_texts_begin_at_lines_and_fit_every_tokenizer(models: tuple[Finished, ...]) -> None:
    sources = [Source("A", log_text(1)), Source("B", "\n \n" + log_text(2))]
    tokenizers = [one.tokenizer for one in models[:2]]
    texts = draw(sources, tokenizers, 40, 20, 0)
    lines = {line for source in sources for line in source.text.splitlines() if line.strip()}
    for text in texts:
        first = text.splitlines()[0]
        assert any(line.startswith(first) for line in lines)
        sizes = [len(one.encode(text, add_special_tokens=False).ids) for one in tokenizers]
        assert max(sizes) <= 20 and max(sizes) >= 18
    assert texts == draw(sources, tokenizers, 40, 20, 0) != draw(sources, tokenizers, 40, 20, 1)
    assert 5 < sum(any(text in source.text for source in sources[:1]) for text in texts) < 35


def data_with_logs(root: Path) -> Path:
    folder = root / "data" / "logs"
    folder.mkdir(parents=True)
    for number, name in enumerate("ABC"):
        (folder / f"{name}_2k.log").write_text(log_text(number))
    return root / "data"


def test_the_headline_is_written_with_its_plots(source: Path, cut: Path, tmp_path: Path) -> None:
    report = tmp_path / "headline.json"
    same = shutil.copytree(source, tmp_path / "same")
    run = [str(source), str(cut), str(same), "--sequences", "24", "--length", "24", "--budget", "kl<=0.2"]
    assert headline.main([*run, "--data", str(data_with_logs(tmp_path)), "--report", str(report)]) == 0
    found = Headline.model_validate_json(report.read_bytes())
    first, second = found.points
    assert (first.sizes.name, second.sizes.name) == ("same", "cut")  # from the largest on
    assert first.sizes.total_bytes == found.source.total_bytes > second.sizes.total_bytes
    assert (first.losses.kl, first.losses.regret, first.certified) == (0.0, 0.0, True)
    assert (second.losses.kl, second.certified) == (pytest.approx(0, abs=SAME), True)
    assert found.smallest_certified == "cut"
    assert found.text["evaluation"]["sources"] == ["C"]
    for name in ("regret", "kl"):
        ET.fromstring((tmp_path / f"headline-{name}.svg").read_text())


# Decode speed


class Steps:
    """A clock for one model: goes on by what the model takes for a token, each time that it is read."""

    def __init__(self, *seconds: float) -> None:
        self._ticks: Iterator[float] = (seconds[number % len(seconds)] for number in count())
        self._now = 100.0

    def __call__(self) -> float:
        self._now += next(self._ticks)
        return self._now


def generator(name: str = "m", clock: Steps | None = None, kind: str = "llama", **options: str) -> Generator:
    own = SimpleNamespace(name=name, figures=Figures(weight_bytes_per_decode_token=100 if name == "source" else 60))
    mode = options.get("mode", "eager")
    return Generator(own, tiny_model(kind), mode, torch.tensor([[1, 2, 3]]), 5, clock or Steps(1.0))


def test_the_time_of_a_token_has_no_prefill_in_it() -> None:
    found = generator(clock=Steps(50.0, 1.0, 2.0, 3.0, 4.0)).seconds()  # the first token comes after the prefill
    assert found == (1.0 + 2.0 + 3.0 + 4.0) / 4


def test_a_generation_goes_on_past_tokens_that_end_a_text() -> None:
    one = generator(clock=Steps(1.0))
    one.model.generation_config.eos_token_id = list(range(48))
    assert one.seconds() == 1.0
    assert one.clock() == 106.0  # five tokens, and this reading


def test_turns_turn_around_and_ratios_are_of_one_turn() -> None:
    order: list[str] = []

    class Turn:
        def __init__(self, name: str, *seconds: float) -> None:
            self.name, self.left = name, list(seconds)

        def seconds(self) -> float:
            order.append(self.name)
            return self.left.pop(0)

    times = take_turns([Turn("a", 1.0, 4.0, 2.0), Turn("b", 0.5, 2.0, 1.0)], 3, lambda _: None)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert times == [[1.0, 4.0, 2.0], [0.5, 2.0, 1.0]]
    whole, smaller = summarise([generator("source"), generator("small")], times, [9.0, 8.0])
    assert (whole.ratio.median, smaller.ratio) == (1.0, Spread(low=0.5, median=0.5, high=0.5))
    assert (whole.predicted_ratio, smaller.predicted_ratio, smaller.warm_up) == (1.0, 0.6, 8.0)
    assert whole.tokens_per_second == Spread(low=0.375, median=0.5, high=0.75)
    assert (whole.cache, whole.dtype) == ("dynamic", "float32")


def test_what_compiles_whole_decodes_with_a_static_cache() -> None:
    static = generator(mode="compile")
    assert (static.cache, static.options["cache_implementation"]) == ("static", "static")
    model = tiny_model("llama")
    model._can_compile_fullgraph = False
    other = Generator(SimpleNamespace(name="m"), model, "compile", torch.tensor([[1]]), 2)
    assert (other.cache, other.options) == ("dynamic", {})
    assert "forward" in vars(model)  # the compiled one, in place of the class's own


def test_a_spread_is_the_median_and_its_quartiles() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(low=2.0, median=3.0, high=4.0)
    assert spread([7.0]) == Spread(low=7.0, median=7.0, high=7.0)


def test_decode_speed_is_recorded_with_the_sizes_that_predict_it(source: Path, cut: Path, tmp_path: Path) -> None:
    report = tmp_path / "decode.json"
    run = [str(source), str(cut), "--prompt", "6", "--new", "4", "--turns", "2", "--modes", "eager"]
    assert decode.main([*run, "--data", str(data_with_logs(tmp_path)), "--report", str(report)]) == 0
    found = decode.DecodeReport.model_validate_json(report.read_bytes())
    whole, smaller = found.sizes
    assert [one.name for one in found.timings] == ["source", "cut"]
    ratio = smaller.weight_bytes_per_decode_token / whole.weight_bytes_per_decode_token
    assert [one.predicted_ratio for one in found.timings] == [1.0, ratio]
    assert found.timings[0].ratio == Spread(low=1.0, median=1.0, high=1.0)
    assert min(one.tokens_per_second.low for one in found.timings) > 0


@pytest.mark.parametrize("wrong", [["--new", "1"], ["--turns", "0"], ["--prompt", "0"]])
def test_nothing_to_measure_is_refused(wrong: list[str], source: Path) -> None:
    with pytest.raises(CollapseError, match="nothing to measure"):
        decode.main([str(source), *wrong])
