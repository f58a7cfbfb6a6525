"""The contract: what is accepted, what is refused and with which words, and that its digest is stable."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from collapse.cli_args import repeat_option
from collapse.cli_schema import schema_app
from collapse.errors import CollapseError, OutputError, SchemaError
from collapse.schema import BUILTIN, CHARSETS, TYPES, Domain, InputSchema, OutputDomain, Workload, load_schema

ROOT = Path(__file__).parents[1]


def refusal(spec):
    with pytest.raises(SchemaError) as caught:
        load_schema(spec)
    message = str(caught.value)
    assert "\n" not in message
    return message


def schemas():
    domain = st.one_of(
        st.just({}),
        st.builds(lambda name: {"charset": name}, st.sampled_from(sorted(CHARSETS))),
        st.builds(
            lambda text: {"charset": "chars:" + text},
            st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12),
        ),
        st.builds(lambda ids: {"tokens": ids}, st.lists(st.integers(0, 99), min_size=1, max_size=9)),
    )
    optional = st.fixed_dictionaries(
        {"type": st.sampled_from(TYPES)},
        optional={
            "max_tokens": st.integers(2, 4000),
            "max_line_length": st.integers(1, 4000),
            "padding": st.sampled_from(["none", "left"]),
            "task": st.sampled_from(["generate", "score"]),
            "output": domain,
        },
    )
    return st.builds(lambda rest, stated: InputSchema.model_validate(rest | stated), optional, domain)


# Accepted


@pytest.mark.parametrize("name", TYPES)
def test_every_built_in_schema_loads_under_its_own_type(name):
    assert load_schema(name) == InputSchema(type=name)
    assert (BUILTIN / f"{name}.json").is_file()


def test_the_forms_of_a_schema_are_equal(tmp_path):
    fields = {"type": "log", "max_line_length": 120, "workload": {"prompt": 9, "new": 3}}
    (tmp_path / "a.json").write_text(json.dumps(fields))
    (tmp_path / "a.toml").write_text('type = "log"\nmax_line_length = 120\n[workload]\nprompt = 9\nnew = 3\n')
    expected = InputSchema(type="log", max_line_length=120, workload=Workload(prompt=9, new=3))
    forms = (fields, json.dumps(fields), tmp_path / "a.json", str(tmp_path / "a.toml"), expected)
    assert [load_schema(form) for form in forms] == [expected] * 5


def test_a_built_in_name_wins_over_a_file_of_that_name(tmp_path, monkeypatch):
    (tmp_path / "log").write_text("nothing")
    monkeypatch.chdir(tmp_path)
    assert load_schema("log").type == "log"


def test_equal_domains_have_equal_digests():
    assert InputSchema(type="log", tokens=(3, 1, 3)).tokens == (1, 3)
    assert InputSchema(type="log", tokens=(3, 1, 3)).digest == InputSchema(type="log", tokens=(1, 3)).digest
    assert InputSchema(type="log", charset="chars:bab").charset == "chars:ab"
    assert Domain(charset="chars:bab").characters == frozenset("ab")


@given(schemas())
def test_a_schema_survives_its_json(schema):
    again = load_schema(json.dumps(schema.to_json()))
    assert again == schema
    assert again.digest == schema.digest


@given(schemas(), schemas())
def test_digests_differ_exactly_where_schemas_do(one, other):
    assert (one.digest == other.digest) == (one == other)


def test_the_digest_does_not_depend_on_the_process():
    spec = '{"type": "log", "charset": "chars:zyx", "tokens": null, "max_tokens": 77}'
    code = f"from collapse.schema import load_schema; print(load_schema({spec!r}).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert digests == {load_schema(spec).digest}


@pytest.mark.parametrize(
    ("fields", "prompt", "new"),
    [
        ({}, 512, 128),
        ({"max_tokens": 640}, 512, 128),
        ({"max_tokens": 256}, 205, 51),
        ({"max_tokens": 2}, 1, 1),
        ({"max_tokens": 100, "workload": {"batch": 4}}, 80, 20),
        ({"max_tokens": 100, "workload": {"prompt": 90}}, 90, 10),
        ({"max_tokens": 100, "workload": {"new": 90}}, 10, 90),
        ({"max_tokens": 100, "task": "score"}, 100, 20),
        ({"max_tokens": 1, "task": "score"}, 1, 1),
        ({"max_tokens": 100, "workload": {"prompt": 30, "new": 30}}, 30, 30),
    ],
)
def test_a_workload_that_is_not_given_fits_max_tokens(fields, prompt, new):
    workload = load_schema({"type": "log"} | fields).workload
    assert (workload.prompt, workload.new) == (prompt, new)


# Refused


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"type": "logs"}, ["field type = 'logs'", "'log', 'json', 'code' or 'text'"]),
        ({}, ["field type is missing", "log, json, code, text"]),
        ({"typ": "log"}, ["unknown field typ ", "did you mean type?", "max_line_length, max_tokens"]),
        ({"type": "log", "workload": {"promt": 1}}, ["workload.promt", "prompt?", "batch, new, prompt"]),
        ({"type": "log", "output": {"chars": "a"}}, ["output.chars", "allowed are charset, corpus, tokens"]),
        ({"type": "log", "charset": "utf-8"}, ["field charset = 'utf-8'", "ascii, printable-ascii, latin-1"]),
        ({"type": "log", "charset": "chars:"}, ["field charset = 'chars:'"]),
        ({"type": "log", "charset": "chars:\ud800"}, ["field charset", "surrogate"]),
        ({"type": "log", "charset": "ascii", "tokens": [1]}, ["charset and tokens exclude each other"]),
        (
            {"type": "log", "output": {"charset": "ascii", "tokens": [1]}},
            ["output: fields charset and tokens"],
        ),
        ({"type": "log", "output": {"charset": "ascii", "corpus": ["a"]}}, ["output: ", "corpus exclude"]),
        ({"type": "log", "output": {"corpus": []}}, ["output: field corpus = []", "one file or more"]),
        ({"type": "log", "tokens": []}, ["field tokens = []", "non-empty"]),
        ({"type": "log", "tokens": [-1]}, ["field tokens = [-1]", "0 or more"]),
        ({"type": "log", "tokens": [True]}, ["field tokens.0 = True", "integer"]),
        ({"type": "log", "max_tokens": "5"}, ["field max_tokens = '5'", "integer"]),
        ({"type": "log", "max_tokens": 0}, ["field max_tokens = 0", "greater than or equal to 1"]),
        ({"type": "log", "max_tokens": 1}, ["field workload = prompt 1 + new 1", "allowed are 1 tokens"]),
        (
            {"type": "log", "max_tokens": 9, "workload": {"prompt": 8, "new": 2}},
            ["prompt 8 + new 2", "9 tokens"],
        ),
        ({"type": "log", "max_line_length": 0}, ["field max_line_length = 0"]),
        ({"type": "log", "modality": "image"}, ["field modality = 'image'", "'text'"]),
        ('{"type": "log", "type": "text"}', ["inline schema", "field type is given twice"]),
        ('{"type": "log"', ["inline schema", "not JSON", "line 1"]),
        ("logg", ["no schema named 'logg'", "did you mean log?", "log, json, code, text"]),
        ("missing.json", ["missing.json", "No such file"]),
    ],
)
def test_a_mistake_is_named_with_field_value_and_what_is_allowed(spec, words):
    message = refusal(spec)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.json", b"[1]", "not an object"),
        ("a.json", b"\xff{}", "not UTF-8 at byte 0"),
        ("a.json", b"[" * 100_000, "not JSON"),
        ("a.toml", b"type = ", "not TOML"),
        ("a.yaml", b"type: log", "suffix '.yaml' is not .json or .toml"),
    ],
)
def test_a_file_that_is_no_schema_is_named(tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    message = refusal(tmp_path / name)
    assert str(tmp_path / name) in message
    assert words in message


def test_the_types_themselves_refuse():
    with pytest.raises(ValidationError):
        InputSchema(type="log", charset="klingon")
    with pytest.raises(ValidationError):
        OutputDomain(tokens=(1,), corpus=("a",))
    with pytest.raises(ValidationError):
        InputSchema(type="log").max_tokens = 4


# Text and tokens under a schema


def test_text_inside_the_schema_passes():
    schema = InputSchema(type="log", charset="chars:ab\r\n", max_line_length=3)
    for text in ("", "aba\r\nbab\n", "\n\n\n", "aaa\rbbb"):
        assert schema.violation(text) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ab\nabc\n", ["line 2, column 3", "charset 'chars:\\n\\rab'", "'c' (U+0063)"]),
        ("ab\r\na\u2028", ["line 2, column 2", "U+2028"]),
        ("aa\raaaa\n", ["line 2, column 4", "max_line_length 3", "4 characters"]),
        ("aaaa", ["line 1, column 4", "max_line_length 3"]),
    ],
)
def test_text_outside_the_schema_names_clause_and_place(text, words):
    schema = InputSchema(type="log", charset="chars:ab\r\n", max_line_length=3)
    with pytest.raises(SchemaError) as caught:
        schema.check_text(text)
    assert [word for word in words if word not in str(caught.value)] == []


@given(st.text("ab\n\r\x0b\u2028", max_size=30), st.integers(1, 6))
def test_a_reported_line_is_really_too_long(text, limit):
    found = InputSchema(type="text", max_line_length=limit).violation(text)
    broken = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    too_long = [number for number, line in enumerate(broken, start=1) if len(line) > limit]
    assert (found.line if found else None) == (too_long[0] if too_long else None)


def test_tokens_are_checked_by_id_and_count():
    schema = InputSchema(type="log", tokens=(0, 1), max_tokens=4)
    schema.check_tokens([0, 1, 1, 0])
    with pytest.raises(SchemaError, match=r"position 2: token id 7 breaks tokens \(0, 1; 2 ids\)"):
        schema.check_tokens([0, 1, 7])
    with pytest.raises(SchemaError, match="5 tokens break max_tokens 4"):
        schema.check_tokens([0] * 5)
    with pytest.raises(SchemaError, match="token id -1"):
        InputSchema(type="log").check_tokens([-1])


# Commands


def run(*arguments):
    return CliRunner().invoke(schema_app, list(arguments))


def test_list_names_every_schema_with_its_real_size():
    rows = json.loads(run("list", "--json").stdout)
    assert [row["name"] for row in rows] == list(TYPES)
    assert all(row["characters"] >= 256_000 for row in rows)


def test_show_prints_what_load_reads():
    spec = '{"type": "log", "max_line_length": 120}'
    shown = json.loads(run("show", spec, "--json").stdout)
    assert shown == {"schema": load_schema(spec).to_json(), "digest": load_schema(spec).digest}
    assert "max_line_length   120\n" in run("show", spec).stdout


def test_check_takes_several_files_after_corpus(tmp_path):
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_text("one\ntwo\n")
    result = run("check", "log", "--corpus", str(tmp_path / "a.log"), str(tmp_path / "b.log"), "--json")
    assert json.loads(result.stdout)["documents"] == 4


def test_check_refuses_text_and_output_corpus_that_break_it(tmp_path):
    (tmp_path / "a.log").write_text("fine\n" + "x" * 9 + "\n")
    result = run("check", '{"type": "log", "max_line_length": 8}', "--corpus", str(tmp_path / "a.log"))
    assert isinstance(result.exception, SchemaError)
    assert str(result.exception).startswith("a.log: line 2, column 9: breaks max_line_length 8")
    result = run("check", '{"type": "log", "output": {"corpus": ["absent.txt"]}}')
    assert "absent.txt: no such file" in str(result.exception)


def test_infer_writes_a_schema_that_its_files_obey(tmp_path):
    log, schema = tmp_path / "a.log", tmp_path / "a.json"
    log.write_text("12:00:01 INFO up\n12:00:02 INFO down again\n")
    result = run("infer", str(log), "-o", str(schema), "--json")
    assert json.loads(result.stdout)["schema"] == json.loads(schema.read_text())
    assert json.loads(schema.read_text()) == {
        "type": "log",
        "max_line_length": 24,
        "charset": "printable-ascii",
    }
    assert run("check", str(schema), "--corpus", str(log)).exit_code == 0


def test_infer_never_overwrites_what_it_reads(tmp_path):
    data = tmp_path / "a.json"
    data.write_text("[1]")
    assert isinstance(run("infer", str(data), "-o", str(data)).exception, OutputError)
    assert data.read_text() == "[1]"
    assert isinstance(run("infer", str(data), "-o", str(tmp_path / "a.toml")).exception, CollapseError)


def test_the_command_imports_no_torch():
    code = "import sys, collapse.cli_schema; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("given_words", "expanded"),
    [
        ("m --corpus a b --json", "m --corpus a --corpus b --json"),
        ("--corpus a --corpus b", "--corpus a --corpus b"),
        ("--corpus a -- b", "--corpus a -- b"),
        ("--corpus=a b", "--corpus=a b"),
        ("--seed 1 m", "--seed 1 m"),
        ("--corpus", "--corpus"),
    ],
)
def test_corpus_takes_the_words_up_to_the_next_option(given_words, expanded):
    assert repeat_option(given_words.split(), "--corpus") == expanded.split()
