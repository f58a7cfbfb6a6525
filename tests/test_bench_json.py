"""The JSON benchmark: its grammar against Python's parser, its prompts, its rule, and a run on tiny models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.json import main
from benchmarks.json.complete import Continuation, Outcome, complete
from benchmarks.json.grammar import Brackets, Grammar
from benchmarks.json.prompts import containers, prompts
from benchmarks.json.record import JsonReport, Paired, judge, paired
from benchmarks.peers.text import Source
from collapse.errors import CollapseError
from tests.architectures import tiny_model
from tests.shared import SHARED, needs_shared
from tests.small_tokenizers import tokenizer_data

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
TOKENS = ["{", "}", "[", "]", ",", ":", '"', "\\", "a", "u", "0", "12", "-", ".", "e", "+", "true", "nul", "\n", " "]


def parses(text: str) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


def read(text: str) -> Grammar:
    grammar = Grammar()
    grammar.feed(text)
    return grammar


@settings(deadline=None)
@given(VALUES, st.sampled_from([None, 2]), st.booleans())
def test_every_prefix_of_a_document_is_alive_and_the_whole_is_complete(value: object, indent: int, ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    grammar = Grammar()
    assert all(grammar.feed(character) for character in text)
    assert grammar.complete


@settings(deadline=None, max_examples=1000)
@given(st.lists(st.sampled_from(TOKENS), max_size=9).map("".join))
def test_complete_is_what_a_parser_takes(text: str) -> None:
    assert read(text).complete == parses(text)


@settings(deadline=None, max_examples=500)
@given(VALUES, st.integers(0, 40), st.sampled_from(TOKENS))
def test_a_document_with_a_token_too_many_is_judged_as_by_a_parser(value: object, place: int, token: str) -> None:
    text = json.dumps([value])
    broken = text[:place] + token + text[place:]
    assert read(broken).complete == parses(broken)


@pytest.mark.parametrize(
    "text",
    ["]", "[1,]", '{"a" 1', '{"a":1,}', "{1", "[01", "[-a", "[1.e", '["\\x', '["\\u12g', '["\n', "[tru}", "1 2"],
)
def test_what_can_become_no_document_is_dead(text: str) -> None:
    assert read(text[:-1]).alive
    assert not read(text).alive


@pytest.mark.parametrize("text", ['{"a": [1, {"b": "}"', '["\\u00', "[1.5e", "[nul", '{"a"', "[-"])
def test_what_is_not_at_its_end_is_alive_and_not_complete(text: str) -> None:
    assert read(text).alive
    assert not read(text).complete


@pytest.mark.parametrize(
    ("text", "closed", "broken", "read"),
    [
        ('{"a": ["]", "\\"}"]} more', True, False, 19),
        ("[1, 2}", False, True, 6),
        ("[}]", False, True, 2),
        ('{"a" 1, [,,]} x', True, False, 13),  # no JSON, but its brackets match
        ('{"a": [1', False, False, 8),
        ('["\\\\"]', True, False, 6),
        ("]", False, True, 1),
    ],
)
def test_brackets_outside_of_strings_match_or_not(text: str, closed: bool, broken: bool, read: int) -> None:
    brackets = Brackets()
    assert brackets.feed(text) == read
    assert (brackets.closed, brackets.broken) == (closed, broken)


@settings(deadline=None)
@given(VALUES.filter(lambda value: isinstance(value, list | dict)), st.data())
def test_a_document_in_pieces_closes_at_its_last_character(value: object, data: st.DataObject) -> None:
    text = json.dumps(value)
    cut = data.draw(st.integers(0, len(text)))
    brackets = Brackets()
    assert brackets.feed(text[:cut]) + brackets.feed(text[cut:] + "]") == len(text)
    assert brackets.closed and not brackets.broken


@needs_shared
def test_the_suite_of_valid_documents_is_taken() -> None:
    files = sorted(Path(SHARED, "data", "json", "JSONTestSuite").glob("y_*.json"))
    assert len(files) == 95
    assert [path.name for path in files if not read(path.read_text(encoding="utf-8")).complete] == []


# Prompts


def tokenizer() -> Tokenizer:
    found = Tokenizer.from_str(json.dumps(tokenizer_data("byte-level")))
    found.no_padding()
    return found


def records(seed: int, count: int) -> str:
    draw = Random(seed)

    def item() -> dict[str, object]:
        values = [draw.choice("abcdef") * draw.randrange(1, 9) for _ in range(draw.randrange(1, 6))]
        return {"status": draw.randrange(10**9), "items": values, "nested": {"id": draw.randrange(10**6)}}

    return "\n".join(json.dumps(item()) for _ in range(count))


SOURCES = (Source("one", records(1, 12)), Source("two", records(2, 40)))


def test_containers_are_all_objects_and_arrays_inner_ones_first() -> None:
    found = list(containers('{"a": [1, {"b": "]}"}]}\n[2]'))
    assert found == ['{"b": "]}"}', '[1, {"b": "]}"}]', '{"a": [1, {"b": "]}"}]}', "[2]"]


def test_prompts_are_cut_inside_of_records_and_leave_room() -> None:
    chosen = prompts(SOURCES, tokenizer(), 20, lengths=[16, 24], new=64)
    assert len(chosen) == len({one.prompt for one in chosen}) == 20
    for one in chosen:
        ids = tokenizer().encode(one.prompt, add_special_tokens=False).ids
        whole = tokenizer().encode(one.record, add_special_tokens=False).ids
        assert len(ids) in {16, 24}
        assert whole[: len(ids)] == ids
        assert 8 <= len(whole) - len(ids) <= 32
        assert one.record.startswith(one.prompt) and parses(one.record)
        assert read(one.prompt).alive and not read(one.prompt).complete
    assert chosen == prompts(SOURCES, tokenizer(), 20, lengths=[16, 24], new=64)


def test_sources_take_turns_as_far_as_they_have_records() -> None:
    chosen = prompts(SOURCES, tokenizer(), 30, lengths=[16], new=64)
    names = [one.source for one in chosen]
    assert names[:8] == ["one", "two"] * 4
    assert names.count("one") < 15 < names.count("two")
    with pytest.raises(CollapseError, match=r"there are \d+ prompts in the records, not 1000; give a smaller --count"):
        prompts(SOURCES, tokenizer(), 1000, lengths=[16], new=64)


# Continuations


def continued(prompt: str, *pieces: str) -> Continuation:
    row = Continuation(prompt)
    for number in range(len(pieces)):
        if not row.over:
            row.add(number, lambda ids: "".join(pieces[one] for one in ids))
    row.end(lambda ids: "".join(pieces[one] for one in ids))
    return row


@pytest.mark.parametrize(
    ("pieces", "grammar", "matched", "closed", "parsed"),
    [
        ((" 1]", "}, and more"), True, True, True, True),
        ((" 1", "]", "]"), False, False, False, False),
        ((" 1 2", "]}"), False, True, True, False),
        ((" 1, 2",), True, True, False, False),
        ((' "\u00e4\ufffd', '"]}'), True, True, True, True),
        ((" NaN]}",), False, True, True, False),
    ],
)
def test_a_continuation_is_judged_up_to_its_end(
    pieces: tuple[str, ...], grammar: bool, matched: bool, closed: bool, parsed: bool
) -> None:
    found = continued('{"a": [', *pieces).outcome
    assert (found.grammar, found.matched, found.closed, found.parses) == (grammar, matched, closed, parsed)
    assert found.balanced == (matched and closed)
    assert found.parses == (found.grammar and found.closed)


def test_what_follows_the_end_of_the_value_is_not_read() -> None:
    row = continued('{"a": [', "1]", "}, }", "]")
    assert (row.text, row.tokens) == ('{"a": [1]}', [0, 1])


def test_half_a_character_waits_for_the_rest() -> None:
    texts = {1: "\ufffd", 2: "ä", 3: 'ä"]'}
    row = Continuation('["')
    seen = []
    for token in (1, 2, 3):
        row.add(token, lambda ids: texts[len(ids)])
        seen.append(row.text)
    assert seen == ['["', '["ä', '["ä"]']
    assert row.outcome.parses


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny Llama with a tokenizer."""
    root = tmp_path_factory.mktemp("models") / "tiny"
    data = tokenizer_data("byte-level")
    size = 1 + max(*data["model"]["vocab"].values(), *(token["id"] for token in data["added_tokens"]))
    tiny_model(
        "llama", vocab_size=size, bos_token_id=None, eos_token_id=0, max_position_embeddings=256
    ).save_pretrained(root)
    (root / "tokenizer.json").write_text(json.dumps(data))
    return root


def test_batches_give_what_single_prompts_give(model: Path) -> None:
    loaded, texts = tiny_from(model), [one.prompt for one in prompts(SOURCES, tokenizer(), 6, lengths=[16, 24], new=64)]
    together = dict(complete(loaded, tokenizer(), texts, 12))
    alone = {number: next(complete(loaded, tokenizer(), [text], 12))[1] for number, text in enumerate(texts)}
    assert sorted(together) == list(range(6))
    assert together == alone
    assert {one.new_tokens for one in together.values() if not one.closed and one.matched} <= set(range(13))


def test_the_models_own_generation_config_does_not_sample_or_penalise(model: Path) -> None:
    loaded = tiny_from(model)
    plain = list(complete(loaded, tokenizer(), ['{"a": '], 8))
    loaded.generation_config.repetition_penalty, loaded.generation_config.do_sample = 5.0, True
    assert list(complete(loaded, tokenizer(), ['{"a": '], 8)) == plain
    assert loaded.generation_config.repetition_penalty == 5.0


def tiny_from(root: Path):
    return AutoModelForCausalLM.from_pretrained(root).eval()


# The rule


@pytest.mark.parametrize(
    ("source", "model", "p"),
    [
        ("1111100000", "0000000000", 1 / 32),
        ("1111111110", "0000000001", 11 / 1024),
        ("0000011111", "1111111111", 1.0),
        ("1010101010", "1010101010", 1.0),
    ],
)
def test_only_prompts_on_which_they_differ_count(source: str, model: str, p: float) -> None:
    assert paired(source, model).p_value == pytest.approx(p)


def outcomes(matched: str, closed: str) -> list[Outcome]:
    """Return outcomes from a 1 or 0 for each prompt."""
    return [
        Outcome(grammar=True, matched=one == "1", closed=other == "1", parses=False, new_tokens=1)
        for one, other in zip(matched, closed, strict=True)
    ]


def test_wrong_closers_break_brackets_although_the_source_never_comes_to_an_end() -> None:
    found = judge(outcomes("111111", "000000"), outcomes("000000", "000000"))
    assert (found.matched.p_value, found.balanced.p_value) == (1 / 64, 1.0)
    assert found.verdict == "breaks brackets"


def test_never_coming_to_an_end_breaks_brackets_although_no_closer_is_wrong() -> None:
    found = judge(outcomes("111111", "111111"), outcomes("111111", "000000"))
    assert (found.matched.p_value, found.balanced.p_value) == (1.0, 1 / 64)
    assert found.verdict == "breaks brackets"


def test_both_tests_share_alpha() -> None:
    source, model = outcomes("11111", "11111"), outcomes("00000", "00000")
    assert judge(source, model).balanced.p_value == 1 / 32
    assert judge(source, model).verdict == "no more than the source"  # more than 0.05 / 2
    assert judge(source, model, alpha=1 / 16).verdict == "breaks brackets"


def test_models_are_compared_on_the_same_records(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data" / "json"
    data.mkdir(parents=True)
    for number, name in enumerate("abcd"):
        (data / f"{name}.jsonl").write_text(records(number, 30))
    same = Path(shutil.copytree(model, tmp_path / "same"))
    report = tmp_path / "json.json"
    run = [str(model), str(same), f"other={model}", "--count", "4", "--prompt", "16", "--new", "40"]
    assert main([*run, "--data", str(tmp_path / "data"), "--report", str(report)]) == 0
    found = JsonReport.model_validate_json(report.read_bytes())
    source, *others = found.entries
    assert [entry.name for entry in found.entries] == ["source", "same", "other"]
    assert (found.prompts, found.prompts_by_source, source.losses) == (4, {"b": 2, "d": 2}, None)
    for other in others:
        assert (other.balanced, other.shares) == (source.balanced, source.shares)
        assert other.judgement is not None and other.losses is not None
        assert other.judgement.matched == other.judgement.balanced == Paired(lost=0, gained=0, p_value=1.0)
        assert other.judgement.verdict == "no more than the source"
        assert (other.losses.kl, other.losses.regret, other.losses.texts) == (0.0, 0.0, 4)
