"""Reading, cutting, splitting and sampling text; and what is refused on the way in."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collapse import corpus as corpus_module
from collapse import textfile
from collapse.corpus import (
    Corpus,
    builtin_corpus,
    infer_schema,
    read_corpus,
    sample_texts,
    sample_tokens,
    split,
)
from collapse.errors import SchemaError
from collapse.schema import BUILTIN, TYPES, InputSchema

ROOT = Path(__file__).parents[1]
LOG, TEXT, JSON, CODE = (InputSchema(type=name) for name in ("log", "text", "json", "code"))


def write(path, data):
    data = data.encode() if isinstance(data, str) else data
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def refusal(call, *arguments, **options):
    with pytest.raises(SchemaError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Reading


@pytest.mark.parametrize("name", ["a.log", "a.log.gz", "a.txt", "a"])
def test_a_document_of_a_log_is_a_line_with_its_own_line_end(tmp_path, name):
    path = write(tmp_path / name, "one\r\ntwo\n\n\u2028three\x0bfour\rfive")
    found = read_corpus([path], LOG)
    assert found.documents == ("one\r\n", "two\n", "\n", "\u2028three\x0bfour\rfive")
    assert found.sources == (name,) * 4


def test_a_log_file_has_line_documents_under_any_schema(tmp_path):
    assert read_corpus([write(tmp_path / "a.log", "one\ntwo\n")], TEXT).documents == ("one\n", "two\n")


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_document_of_a_json_file_is_the_file(tmp_path, name):
    text = '{\r\n "a": [1]\n}\n'
    assert read_corpus([write(tmp_path / name, text)], JSON).documents == (text,)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_document_of_a_jsonl_file_is_a_record_or_its_field(tmp_path, name):
    text = '{"m": "up\\ndown", "in": {"m": "x"}}\r\n\n{"m": "", "in.m": "y", "in": {"m": "z"}}'
    path = write(tmp_path / name, text)
    first, _, second = text.partition("\n\n")
    assert read_corpus([path], JSON).documents == (first + "\n", second)
    assert read_corpus([path], LOG, field="m").documents == ("up\ndown", "")
    assert read_corpus([f"{path}:m"], LOG).documents == ("up\ndown", "")
    assert read_corpus([path], LOG, field="in.m").documents == ("x", "y")


def test_prose_is_cut_after_blank_lines_into_pieces_of_one_to_two_kilobytes(tmp_path):
    paragraphs = ["word " * 60 + "\n\n"] * 20
    text = "".join(paragraphs)
    pieces = read_corpus([write(tmp_path / "a.txt", text)], TEXT).documents
    assert "".join(pieces) == text
    assert {len(piece) for piece in pieces[:-1]} == {4 * 302}
    assert all(piece.endswith("\n\n") for piece in pieces)


@given(st.text("a\n \r", max_size=9000).map(lambda text: text * 3))
@settings(max_examples=40)
def test_pieces_put_together_are_the_text(text):
    pieces = list(textfile.pieces(text))
    assert "".join(pieces) == text
    assert all(pieces)


@given(st.text("ab\r\n\x0b\u2028", max_size=60))
def test_lines_put_together_are_the_text(text):
    assert "".join(textfile.lines(text)) == text
    assert all(line.count("\n") == line.endswith("\n") for line in textfile.lines(text))


def test_files_of_one_name_keep_apart_and_names_are_short(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "a.log", folder + "\n")
    write(tmp_path / "b.log", "b\n")
    found = read_corpus([tmp_path / "x/a.log", tmp_path / "b.log", tmp_path / "y/a.log"], LOG)
    assert found.sources == ("x/a.log", "b.log", "y/a.log")


# Refused


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.log", b"ok\nno\0\n", "NUL byte at byte 5"),
        ("a.log.gz", b"ok\nno\0\n", "NUL byte at byte 5"),
        ("a.log", b"caf\xc3\xa9 \xff", "invalid UTF-8 at byte 6"),
        ("a.log", b"\xff\xfea\0", "UTF-16 text at byte 0"),
        ("a.json", b'{"a": }', "not JSON"),
        ("a.jsonl", b'{"a": 1}\n\n{"a": \n', "line 3: not JSON"),
        ("a.log", b"", "there is no text"),
        ("a.log", b" \r\n\n", "there is no text"),
        ("a.jsonl", b"\n", "there is no text"),
    ],
)
def test_a_file_that_is_not_text_is_refused_with_the_place(tmp_path, name, data, words):
    message = refusal(read_corpus, [write(tmp_path / name, data)], JSON)
    assert words in message


def test_what_is_no_file_is_refused(tmp_path):
    assert "no such file" in refusal(read_corpus, [tmp_path / "absent.log"], LOG)
    assert "is a directory" in refusal(read_corpus, [tmp_path], LOG)
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(read_corpus, [tmp_path / "pipe"], LOG)
    assert "there is no text" in refusal(read_corpus, [], LOG)
    path = write(tmp_path / "a.log", "a\n")
    assert "named twice" in refusal(read_corpus, [path, path], LOG)


def test_a_damaged_gzip_file_is_refused(tmp_path):
    whole = gzip.compress(os.urandom(4000).hex().encode())
    for data in (whole[:-9], b"plain text", whole[:40] + b"\0\0\0\0" + whole[44:]):
        (tmp_path / "a.log.gz").write_bytes(data)
        assert "not a whole gzip file" in refusal(read_corpus, [tmp_path / "a.log.gz"], LOG)


def test_a_gzip_bomb_is_refused_before_it_is_expanded(tmp_path):
    bomb = write(tmp_path / "a.log.gz", "0" * (40 << 20))
    assert "expands to more than 200 times its" in refusal(textfile.read_text, bomb)
    small = write(tmp_path / "b.log.gz", "line\n" * 1000)
    assert "expands to more than 999 bytes" in refusal(textfile.read_text, small, limit=999)
    assert textfile.read_text(small, limit=5000) == "line\n" * 1000
    plain = write(tmp_path / "c.log", "x" * 1000)
    assert "1000 bytes are more than 999" in refusal(textfile.read_text, plain, limit=999)


def test_text_that_breaks_the_schema_is_refused_with_file_line_and_clause(tmp_path):
    narrow = InputSchema(type="log", max_line_length=5, charset="ascii")
    good, bad = write(tmp_path / "good.log", "12345\r\n"), write(tmp_path / "bad.log", "1\n2\n123456\n")
    message = refusal(read_corpus, [good, bad], narrow)
    assert message.startswith("bad.log: line 3, column 6: breaks max_line_length 5")
    message = refusal(read_corpus, [write(tmp_path / "b.log", "a\ncaf\u00e9\n")], narrow)
    assert message.startswith("b.log: line 2, column 4: breaks charset 'ascii'")
    records = write(tmp_path / "r.jsonl", '{"m": "ok"}\n\n{"m": "two\\nthree..."}\n')
    assert "r.jsonl: line 4" in refusal(read_corpus, [records], narrow, field="m")


def test_a_field_that_holds_no_text_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"m": "x", "n": 1}\n{"n": "y"}\n')
    assert "line 2: no field 'm'; fields there are n" in refusal(read_corpus, [path], LOG, field="m")
    assert "line 1: field 'n' holds no text but int" in refusal(read_corpus, [f"{path}:n"], LOG)
    assert "needs a .jsonl file" in refusal(read_corpus, [write(tmp_path / "a.log", "a")], LOG, field="m")


# Built-in text


@pytest.mark.parametrize("name", TYPES)
def test_a_built_in_sample_is_large_varied_and_obeys_its_schema(name):
    found = builtin_corpus(InputSchema(type=name))
    assert found.characters >= 256_000
    assert len(set(found.sources)) >= 20
    assert found.dropped == 0
    assert infer_schema(sorted((BUILTIN / name).iterdir()))[0].type == name


def test_the_built_in_sample_is_cut_down_to_a_narrower_schema():
    narrow = InputSchema(type="log", max_line_length=120, charset="printable-ascii")
    found = builtin_corpus(narrow)
    whole = builtin_corpus(LOG)
    assert found.dropped == len(whole.documents) - len(found.documents) > 0
    assert all(narrow.violation(text) is None for text in found.documents)
    assert "no document of the built-in json sample" in refusal(
        builtin_corpus, InputSchema(type="json", charset="chars:z")
    )


# Split


def corpora():
    copied = st.sampled_from([letter * 399 + "\n" for letter in "xyz"])
    line = st.text("abcde \u00e9", max_size=300).map(lambda text: text + "\n") | copied
    files = st.lists(st.lists(line, min_size=1, max_size=30), min_size=1, max_size=4)

    def build(found):
        pairs = [(f"f{number}", line) for number, lines in enumerate(found) for line in lines]
        return Corpus(tuple(line for _, line in pairs), tuple(name for name, _ in pairs))

    return files.map(build)


@given(corpora(), st.integers(0, 5), st.sampled_from([0.1, 0.25, 0.5]))
@settings(max_examples=150)
def test_a_split_covers_the_corpus_and_is_disjoint(found, seed, share):
    try:
        parts = split(found, seed, share)
    except SchemaError:
        assert len({text for _, text in corpus_module._blocks(found)}) < 2
        return
    assert not set(parts.calibration) & set(parts.held_out)
    assert sorted(parts.calibration + parts.held_out) == sorted(text for _, text in corpus_module._blocks(found))
    assert "".join(text for _, text in corpus_module._blocks(found)) == "".join(found.documents)
    assert parts == split(found, seed, share)


@given(corpora(), st.integers(0, 3))
@settings(max_examples=100)
def test_every_source_with_two_blocks_is_in_both_parts_unless_all_are_copies(found, seed):
    grouped = {}
    for source, text in corpus_module._blocks(found):
        grouped.setdefault(source, set()).add(text)
    several = [texts for texts in grouped.values() if len(texts) > 1]
    if not several:
        return
    parts = split(found, seed)
    for number, texts in enumerate(several):
        if texts - set().union(*several[:number]):
            assert texts & set(parts.calibration)
            assert texts & set(parts.held_out)


def test_identical_blocks_stay_together_across_files():
    blocks = [letter * 399 + "\n" for letter in "abcdefgh"]
    found = Corpus(tuple(blocks + blocks), ("x",) * 8 + ("y",) * 8)
    for seed in range(5):
        parts = split(found, seed)
        assert not set(parts.calibration) & set(parts.held_out)
        assert (len(parts.calibration), len(parts.held_out)) == (12, 4)


def test_seeds_differ_and_held_out_is_about_a_quarter():
    found = builtin_corpus(LOG)
    one, other = split(found, 0), split(found, 1)
    assert one.digests != other.digests
    assert 1200 <= len(one.calibration) + len(one.held_out) <= 1500
    for parts in (one, other):
        assert abs(sum(map(len, parts.held_out)) / found.characters - 0.25) < 0.05


def test_a_long_document_is_cut_at_line_ends_and_fields_get_a_line_end_between():
    text = "".join(f"line {number}\n" for number in range(500))
    parts = split(Corpus((text,), ("a.json",)))
    assert all(block.endswith("\n") for block in parts.calibration + parts.held_out)
    fields = Corpus(tuple("x" * 300 + str(number) for number in range(40)), ("a.jsonl",) * 40)
    blocks = [block for part in (split(fields).calibration, split(fields).held_out) for block in part]
    assert sorted(line for block in blocks for line in block.split("\n")) == sorted(fields.documents)
    compact = "0123456789" * 400
    whole = split(Corpus((compact,), ("a.json",)))
    assert sum(map(len, whole.calibration + whole.held_out)) == len(compact)


@given(st.lists(st.integers(0, 1500), max_size=12), st.booleans())
def test_the_blocks_of_one_document_are_the_document(lengths, ends):
    text = "\n".join("x" * length for length in lengths) + "\n" * ends
    blocks = [block for _, block in corpus_module._blocks(Corpus((text,), ("a.json",)))]
    assert "".join(blocks) == text
    assert all(len(block) >= 400 for block in blocks) or len(blocks) <= 1


def test_text_too_short_to_split_and_a_wrong_share_are_refused():
    short = Corpus(("a\n",) * 30, ("a.log",) * 30)
    assert "60 characters make no two different blocks" in refusal(split, short)
    assert "no two different blocks" in refusal(split, Corpus(("a" * 399 + "\n",) * 9, ("a.log",) * 9))
    for share in (0, 1, -0.5):
        assert "between 0 and 1" in refusal(split, short, held_out=share)


def test_a_split_does_not_depend_on_process_or_directory(tmp_path):
    code = (
        "from collapse.corpus import builtin_corpus, split; from collapse.schema import load_schema; "
        "print(split(builtin_corpus(load_schema('json')), 3).digests['held_out'])"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=cwd,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed, cwd in (("1", tmp_path), ("2", ROOT))
    }
    assert seen == {split(builtin_corpus(JSON), 3).digests["held_out"]}


# Samples


def test_samples_are_seeded_and_obey_the_schema():
    narrow = InputSchema(type="log", max_line_length=120)
    parts = split(builtin_corpus(narrow))
    texts = sample_texts(narrow, parts, 0, 20, 700)
    assert {len(text) for text in texts} == {700}
    assert texts == sample_texts(narrow, parts, 0, 20, 700)
    assert texts != sample_texts(narrow, parts, 1, 20, 700)
    assert all(narrow.violation(text) is None for text in texts)
    held = set("".join(parts.held_out).split("\n")) - set("".join(parts.calibration).split("\n"))
    assert not any(line in held for text in texts for line in text.split("\n")[:-1])


def test_a_sample_of_text_that_breaks_the_schema_is_refused():
    wide = Corpus(("x" * 50 + "\n",), ("a.log",))
    assert "max_line_length 9" in refusal(sample_texts, InputSchema(type="log", max_line_length=9), wide, 0, 1, 40)
    assert sample_texts(LOG, wide, 0, 1, 400) == ["x" * 50 + "\n"]


def test_token_samples_come_from_the_listed_ids():
    schema = InputSchema(type="log", tokens=(0, 5), max_tokens=8)
    sequences = sample_tokens(schema, 0, 30, 8)
    assert {len(ids) for ids in sequences} == {8}
    assert {token for ids in sequences for token in ids} == {0, 5}
    assert sequences == sample_tokens(schema, 0, 30, 8) != sample_tokens(schema, 1, 30, 8)
    assert "length 9 is more than 8" in refusal(sample_tokens, schema, 0, 1, 9)
    assert "no token ids" in refusal(sample_tokens, LOG, 0, 1, 4)


# Inference


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.txt", "2024-05-01 12:00:00 started\n2024-05-01 12:00:01 stopped\n", "log"),
        ("a", "May  1 12:00:00 host cron[1]: x\n", "log"),
        ("a.log", "no stamp at all\n", "log"),
        ("a.txt", "At noon the train left.\nNobody was on it.\n", "text"),
        ("a.py", "# only a comment\n", "code"),
        ("a.txt", "def f(x):\n    y = x + 1\n    return y\n\nprint(f(2))\n", "code"),
        ("a.txt", '{"a": 1}\n{"a": 2}\n', "json"),
        ("a.json", "[1,\n2]", "json"),
        ("a.txt", "{not json}\nplain words here\nand here\nand there\nat last\n", "text"),
        ("a.txt", "12\n", "text"),
    ],
)
def test_the_type_follows_from_the_text(tmp_path, name, text, kind):
    schema, observed = infer_schema([write(tmp_path / name, text)])
    assert schema.type == kind
    assert observed.reason.startswith(f"{kind}: ")


def test_what_was_seen_is_exact(tmp_path):
    first, second = write(tmp_path / "a.txt", "ab\r\ncde\n\rf"), write(tmp_path / "b.txt.gz", "\u00e9\n")
    schema, observed = infer_schema([first, second])
    assert observed.line_ends == {"LF": 2, "CR LF": 1, "CR": 1}
    assert (observed.bytes, observed.characters, observed.lines) == (13, 12, 5)
    assert (observed.max_line_length, observed.charset, schema.charset) == (3, "latin-1", "latin-1")
    assert "2: a.txt, b.txt.gz" in observed.describe()
    assert json.loads(observed.model_dump_json())["distinct_characters"] == 9


def test_the_smallest_named_charset_is_taken(tmp_path):
    for text, charset in (
        ("abc", "printable-ascii"),
        ("\x1b[0m", "ascii"),
        ("\u00b5", "latin-1"),
        ("\u2019", None),
    ):
        assert infer_schema([write(tmp_path / "a.txt", text)])[0].charset == charset


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


@given(text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=200))
@settings(max_examples=60)
def test_files_obey_the_schema_inferred_from_them(scratch, text):
    path = write(scratch / "a.txt", "x" + text)
    schema, _ = infer_schema([path])
    assert "".join(read_corpus([path], schema).documents) == "x" + text


def test_related_text_is_the_sample_without_what_is_in_the_users_own():
    schema = InputSchema(type="log")
    sample = builtin_corpus(schema)
    first = sample.sources[0]
    own = corpus_module.Corpus(
        tuple(text for name, text in zip(sample.sources, sample.documents, strict=True) if name == first),
        tuple(first for name in sample.sources if name == first),
    )
    known = {text.strip() for text in own.documents}
    others = "".join(text for text in sample.documents if text.strip() not in known)
    assert 0 < len(others) < sample.characters
    assert "".join(corpus_module.related(schema, own)).split() == others.split()


def test_there_is_no_related_text_where_the_sample_breaks_the_schema(tmp_path):
    path = write(tmp_path / "own.log", b"abc\nabd\n" * 400)
    schema = InputSchema(type="log", charset="chars:abcd\n")
    own = corpus_module.read_corpus([path], schema)
    assert corpus_module.related(schema, own) == ()


PROSE = "\n\n".join(f"Paragraph {n} of a book,\nwhich has {n} words." for n in range(40))


@pytest.mark.parametrize(
    ("sample", "own"),
    [
        ("first line 1\n", "first line 1"),  # a field of JSON Lines
        ("first line 1\n", "first line 1\r\n"),
        ("first line 1\n", "it says:\n  first line 1\nand more\n"),
        (PROSE, PROSE[: len(PROSE) // 2]),
        (PROSE[: len(PROSE) // 2], "Before it.\n\n" + PROSE),
    ],
)
def test_no_related_text_is_in_the_users_own_that_is_cut_otherwise(sample, own, monkeypatch):
    other = "quite another one\nthat nobody has\n}\n]\n}\n]\n}\n"
    found = corpus_module.Corpus((sample, other, "\n"), ("a", "b", "a"))
    monkeypatch.setattr(corpus_module, "builtin_corpus", lambda schema: found)
    mine = corpus_module.Corpus((own, "mine\n}\n]\n}\n]\n}\n"), ("own", "own"))
    assert corpus_module.related(InputSchema(type="log"), mine) == (other,)
