"""The JSON benchmark: its grammar against Python's parser, its prompts, its rule, and a run on tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.json.grammar import Brackets, Grammar
from tests.shared import SHARED, needs_shared

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
