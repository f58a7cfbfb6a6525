"""The peers' benchmark around the methods: text, vocabulary, scores, and the grid as a whole."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.peers import main, record, text
from benchmarks.peers.cut import Removal
from benchmarks.peers.evaluate import Reference, evaluate
from benchmarks.peers.structure import parameters
from benchmarks.peers.vocabulary import narrow, vocabulary_of
from collapse.checkpoint import Checkpoint
from collapse.errors import CollapseError
from tests.architectures import tiny_model
from tests.peer_models import ids, logits, model, structure
from tests.small_tokenizers import CORPUS, tokenizer_data

SAME = 1e-9  # sums in double precision of the same fp32 numbers


def lines(seed: int, corpus: list[str], size: int = 12_000) -> str:
    draw = random.Random(seed)
    found: list[str] = []
    while sum(map(len, found)) < size:
        found.append(" ".join(draw.sample(draw.choice(corpus).split(), 5)) + f" {draw.randrange(999)}\n")
    return "".join(found)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with six systems of logs, four JSON sources and one of prose."""
    root = tmp_path_factory.mktemp("data")
    for folder, names in (
        ("logs", [f"{name}_2k.log" for name in "ABCDEF"]),
        ("json", ["maps_compact.json", "maps_full.json", "a.json", "b-c.jsonl", "z.json"]),
        ("prose", ["play.txt"]),
    ):
        (root / folder).mkdir()
        for number, name in enumerate(names):
            (root / folder / name).write_text(lines(number, CORPUS[:1] if folder == "logs" else CORPUS))
    (root / "logs" / "SOURCES.md").write_text("no text of the benchmark")
    return root


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Return a tiny Llama with a tokenizer."""
    root = tmp_path_factory.mktemp("models") / "tiny"
    data = tokenizer_data("byte-level")
    size = 1 + max(*data["model"]["vocab"].values(), *(token["id"] for token in data["added_tokens"]))
    tiny_model("llama", vocab_size=size, bos_token_id=None, eos_token_id=0).save_pretrained(root)
    (root / "tokenizer.json").write_text(json.dumps(data))
    return Checkpoint.open(root)


def tokenizer() -> Tokenizer:
    found = Tokenizer.from_str(json.dumps(tokenizer_data("byte-level")))
    found.no_padding()
    return found


# Text


def test_every_third_system_is_held_out_whole(data: Path) -> None:
    split = text.split_of("log", data)
    assert [source.name for source in split.evaluation] == ["C", "F"]
    assert own(split) == ["A", "B", "D", "E"]


def own(split: text.Split) -> list[str]:
    """Return the sources that calibrate beside the built-in sample."""
    return [source.name for source in split.calibration if not source.name.startswith("built-in ")]


def test_the_built_in_sample_calibrates_and_never_evaluates(data: Path) -> None:
    for kind, name in (("log", "built-in redis"), ("json", "built-in etcd")):
        split = text.split_of(kind, data)
        assert name in {source.name for source in split.calibration}
        assert all(source.name in {"C", "F", "b", "z"} for source in split.evaluation)
    code = text.split_of("code")
    assert own(code) == [source.name for source in code.calibration]


def test_two_forms_of_one_answer_are_on_one_side(data: Path) -> None:
    split = text.split_of("json", data)
    assert own(split) == ["a", "maps"]
    assert [source.name for source in split.evaluation] == ["b", "z"]


def test_code_is_whole_modules() -> None:
    split = text.split_of("code")
    sides = [{source.name for source in side} for side in (split.calibration, split.evaluation)]
    assert not sides[0] & sides[1]
    assert {"argparse", "ast", "typing", "subprocess"} <= sides[0] | sides[1]


def test_a_missing_folder_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CollapseError, match="logs: the folder with log text is not there; give --data"):
        text.split_of("log", tmp_path)


def test_the_digest_is_of_the_text_of_each_side(data: Path) -> None:
    split = text.split_of("log", data)
    other = text.Split("log", split.calibration, (text.Source("C", "x"),))
    assert split.record["calibration"] == other.record["calibration"]
    assert split.record["evaluation"]["digest"] != other.record["evaluation"]["digest"]


def test_rows_are_seeded_and_count_the_bytes_of_their_text(data: Path) -> None:
    sources = text.split_of("log", data).calibration
    rows, again = (text.draw(sources, tokenizer(), 2048, seed=3) for _ in range(2))
    assert rows.ids.shape == (8, 256)
    assert torch.equal(rows.ids, again.ids)
    decoded = [tokenizer().decode(row[1:].tolist(), skip_special_tokens=False) for row in rows.ids]
    assert rows.byte_count == sum(len(part.encode()) for part in decoded)
    assert all(any(part in source.text for source in sources) for part in decoded)
    assert not torch.equal(rows.ids, text.draw(sources, tokenizer(), 2048, seed=4).ids)


def test_every_source_gives_as_many_rows(data: Path) -> None:
    sources = text.split_of("log", data).calibration[:4]  # without the built-in sample
    rows = text.draw(sources, tokenizer(), 8 * 256)
    found = [tokenizer().decode(row[1:].tolist(), skip_special_tokens=False) for row in rows.ids]
    assert [sum(part in source.text for part in found) for source in sources] == [2, 2, 2, 2]


@pytest.mark.parametrize("at_lines", [True, False])
def test_rows_begin_at_lines_or_anywhere(data: Path, at_lines: bool) -> None:
    """A row that begins at a line has few first tokens; text to distil on should have many."""
    sources = text.split_of("log", data).calibration[:4]
    rows = text.draw(sources, tokenizer(), 16 * 256, at_lines=at_lines)
    found = [tokenizer().decode(row.tolist()) for row in rows.ids]
    whole = "\n" + "\n".join(source.text for source in sources)
    begun = [f"\n{part}" in whole for part in found]
    assert sum(begun) == 16 if at_lines else sum(begun) < 8


def test_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(CollapseError, match="no source has 8192 characters"):
        text.draw([text.Source("a", "short")], tokenizer(), 512)


# Vocabulary


def test_the_cut_vocabulary_encodes_calibration_text_as_before(data: Path, checkpoint: Checkpoint) -> None:
    sources = text.split_of("log", data).calibration
    vocabulary = vocabulary_of(checkpoint, "log", sources)
    before, after = (text.draw(sources, found, 1024).ids for found in (tokenizer(), vocabulary.tokenizer))
    assert torch.equal(vocabulary.kept[after], before)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_narrowed_model_gives_the_kept_logits(kind: str) -> None:
    own, kept = model(kind), torch.tensor([0, 3, 4, 7, 20, 41])
    smaller = narrow(own, kept)
    rows = torch.tensor([[1, 2, 5, 0, 3], [4, 4, 1, 0, 2]])
    torch.testing.assert_close(logits(smaller, rows), logits(own, kept[rows])[..., kept], rtol=0, atol=1e-5)
    assert parameters(own) - parameters(smaller) == (48 - 6) * 16
    assert own.config.vocab_size == 48


# Scores


def reference(**changes: object) -> Reference:
    return Reference(model("llama"), structure("llama"), text.Rows(ids(), 300), **changes)  # type: ignore[arg-type]


def test_a_model_compared_with_itself_loses_nothing() -> None:
    scores = evaluate(reference(), model("llama"))
    assert (scores.kl, scores.flips, scores.confident_flips) == (0, 0, 0)
    assert scores.tokens == 6 * 11


def test_scores_are_their_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.blocks.LOGITS", 12 * 48 * 4)
    own = reference()
    with torch.no_grad():
        own.model.model.norm.weight.mul_(12)  # so that some tokens are predicted with confidence
    smaller = Removal("x", gone=(2,)).apply(own.model, own.structure)
    first, again = evaluate(own, smaller), evaluate(own, smaller)  # the second time from what was kept
    assert first == again
    p, q = (logits(m, ids())[:, :-1].double().softmax(-1) for m in (own.model, smaller))
    targets = ids()[:, 1:]
    kl = (p * (p / q).log()).sum(-1).mean()
    nll = -q.gather(-1, targets[..., None]).log().mean()
    flipped, confident = p.argmax(-1) != q.argmax(-1), p.max(-1).values >= 0.5
    assert first.kl == pytest.approx(float(kl), rel=1e-5)
    assert first.nll == pytest.approx(float(nll), rel=1e-5)
    assert first.perplexity == pytest.approx(math.exp(first.nll))
    assert first.bits_per_byte == pytest.approx(first.nll * 66 / math.log(2) / 300)
    assert first.flips == pytest.approx(float(flipped.double().mean()))
    assert first.confident == pytest.approx(float(confident.double().mean()))
    assert 0 < first.confident < 1
    assert first.confident_flips == pytest.approx(float((flipped & confident).sum() / confident.sum()))


def test_over_a_cut_vocabulary_the_source_is_its_distribution_over_kept_ids() -> None:
    kept = torch.arange(0, 48, 2)
    rows = text.Rows(ids() // 2, 300)
    own = Reference(model("llama"), structure("llama"), rows, kept)
    assert evaluate(own, narrow(own.model, kept)).kl == pytest.approx(0, abs=1e-6)


# The grid


def test_the_grid_is_run_once_and_resumed(
    data: Path, checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "peers.json"
    options = ["--tokens", "512", "--data", str(data), "--report", str(path), "--other", "json", "--vocabulary"]
    run = [str(checkpoint.root), *options, "--shares", "30", "--methods"]
    assert main([*run, "uidl"]) == 0
    first = record.Report.model_validate_json(path.read_bytes())
    assert len(first.cells) == 4 + 2 * 2 * 2  # the source, then calibration x evaluation x vocabulary
    capsys.readouterr()
    assert main([*run, "uidl", "wanda-sp"]) == 0
    assert "uidl" not in capsys.readouterr().err
    second = record.Report.model_validate_json(path.read_bytes())
    assert set(first.cells) < set(second.cells)
    assert len(second.cells) == 4 + 2 * 8
    for cell in second.cells:
        assert (cell.scores.kl < 1e-6) == (cell.method == "source")
    sizes = {(cell.method, cell.vocabulary): cell.parameters for cell in second.cells}
    assert sizes["source", True] < sizes["source", False]
    assert sizes["source", False] - sizes["uidl", False] == sizes["source", True] - sizes["uidl", True]
    names = sorted(p.name for p in tmp_path.glob("*.svg"))
    assert len(names) == 8
    assert names[0] == "peers-domain-in-domain-vocabulary.svg"
    with pytest.raises(CollapseError, match="made with other settings"):
        main([*run, "uidl", "--seed", "1"])
