"""Which token ids can occur: never too few where proved, honest bounds where not, and what always stays."""

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import CORPUS, KINDS, checkpoint, encode, tokenizer_data

from collapse.analysis.spelling import Utf8Pieces, reachable_characters, spellable
from collapse.analysis.text_source import open_text
from collapse.analysis.token_use import Declined, Samples, token_use
from collapse.bpe import closure
from collapse.chat import DATES, ChatTemplate, chat_templates
from collapse.checkpoint import Checkpoint
from collapse.errors import SchemaError, UnsupportedError
from collapse.passes.vocabulary import propose_vocabulary
from collapse.plan import Axis
from collapse.rewrite.tokenizer import check_kept, narrow_side_files
from collapse.schema import InputSchema, OutputDomain
from collapse.tokenizer import TokenizerFile

SORT = Path(__file__).parents[1] / "../shared/models/gpt2-nano-sort"
LINES = CORPUS[0].split(";")
LOG = InputSchema(type="log")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def opened(tmp_path, kind="byte-level", rows=None, config=None, **files):
    data = tokenizer_data(kind)
    return checkpoint(tmp_path, rows or len(data["model"]["vocab"]), config, tokenizer__json=data, **files)


def strings(source, use):
    file = open_text(source).file
    return {file.strings[number] for number in use.kept if number in file.strings}


# --- by character set ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("characters", ["the", "at ", "é1", "üß\n"])
def test_no_text_over_the_charset_leaves_the_proved_set(tmp_path, kind, characters):
    source = opened(tmp_path, kind)
    use = token_use(source, InputSchema(type="log", charset=f"chars:{characters}"), Samples())
    assert use.grade == "proved"
    kept, raw = set(use.kept), (tmp_path / "tokenizer.json").read_bytes()
    for length in (1, 2, 3, 4):
        for chars in product(characters, repeat=length):
            assert kept.issuperset(encode(raw, "".join(chars), special=True))
    assert len(use.kept) < use.size


def test_a_charset_leaves_out_what_it_cannot_spell(tmp_path):
    source = opened(tmp_path)
    use = token_use(source, InputSchema(type="log", charset="chars:the "), Samples())
    assert "Ġthe" in strings(source, use)
    assert "at" not in strings(source, use)
    assert use.evidence.figures["kept_input"] + use.evidence.figures["kept_bytes"] < 300


@given(text=st.text(alphabet="aé€😀ü", max_size=6), data=st.data())
def test_every_piece_of_a_text_is_spelt(text, data):
    code = text.encode()
    start = data.draw(st.integers(0, len(code)))
    assert Utf8Pieces("aé€😀ü").spells(code[start : data.draw(st.integers(start, len(code)))])


@pytest.mark.parametrize("alphabet", ["aé", "é€", "ab", "ü"])
def test_spelling_equals_trying_all_texts(alphabet):
    values = sorted({byte for char in alphabet + "éb" for byte in char.encode()})
    texts = ["".join(chars).encode() for chars in product(alphabet, repeat=5)]
    for piece in (bytes(p) for length in (1, 2, 3) for p in product(values, repeat=length)):
        assert Utf8Pieces(alphabet).spells(piece) == any(piece in text for text in texts), piece


def with_normalizer(tmp_path, step, kind="byte-fallback"):
    data = tokenizer_data(kind)
    data["normalizer"] = {"type": "Sequence", "normalizers": [step, data["normalizer"]]} if data["normalizer"] else step
    return open_text(checkpoint(tmp_path, len(data["model"]["vocab"]), tokenizer__json=data)).file


def test_normalizers_add_their_characters(tmp_path):
    file = with_normalizer(tmp_path, {"type": "Prepend", "prepend": "▁"})
    assert reachable_characters(file, frozenset("ab")) == frozenset("ab▁")
    assert {"▁", "▁the", "▁th"} & file.vocab.keys() == {"▁", "▁the", "▁th"} & spellable(file, frozenset("the"))
    assert spellable(file, frozenset("the")).isdisjoint({"a", "▁a", "at"})


@pytest.mark.parametrize(
    ("step", "characters", "proved"),
    [
        ({"type": "NFC"}, "abc", True),
        ({"type": "NFC"}, "aé", True),
        ({"type": "NFC"}, "a\u0301", False),
        ({"type": "NFKC"}, "a\u00bd", False),
        ({"type": "Lowercase"}, "aB", True),
        ({"type": "Lowercase"}, "aİ", False),
        ({"type": "Nmt"}, "ab", False),
    ],
)
def test_normalizers_that_cannot_be_followed_are_declined(tmp_path, step, characters, proved):
    file = with_normalizer(tmp_path, step)
    if proved:
        assert reachable_characters(file, frozenset(characters)) >= frozenset(characters.lower())
    else:
        with pytest.raises(UnsupportedError, match=f"the step {step['type']} may bring in characters"):
            reachable_characters(file, frozenset(characters))


def test_a_torn_character_is_declined(tmp_path):
    data = tokenizer_data("byte-level")
    del data["model"]["vocab"]["Ã"]
    data["model"]["merges"] = [pair for pair in data["model"]["merges"] if "Ã" not in "".join(pair)]
    source = checkpoint(tmp_path, 400, tokenizer__json=data)
    use = token_use(source, InputSchema(type="log", charset="chars:é"), Samples())
    assert use == Declined("tokenizer.json: a byte of 'é' has no token; take it out of the charset")
    use = token_use(source, InputSchema(type="log", charset="chars:e"), Samples())
    assert use.figures["bytes_without_token"] == 1


# --- by ids --------------------------------------------------------------------------------------------


def test_ids_without_a_tokenizer(tmp_path):
    source = checkpoint(tmp_path, 3)
    use = token_use(source, InputSchema(type="log", tokens=(0, 1)), Samples())
    assert (list(use.kept), use.grade, use.counts) == ([0, 1], "proved", {"input": 2, "named": 0})


@pytest.mark.skipif(not SORT.is_dir(), reason="needs ../shared/models/gpt2-nano-sort")
def test_the_two_letter_schema_of_the_sorting_model():
    use = token_use(Checkpoint.open(SORT), InputSchema(type="text", tokens=(0, 1)), Samples())
    axes = (Axis(tensor="transformer.wte.weight", dim=0), Axis(tensor="lm_head.weight", dim=0))
    narrow, skipped = propose_vocabulary(use, axes, 3)
    assert skipped is None
    assert (narrow.dropped, narrow.config, narrow.evidence.grade) == (1, {"vocab_size": 2}, "proved")


def test_named_ids_and_output_ids_join_the_input_ids(tmp_path):
    source = checkpoint(tmp_path, 9, {"eos_token_id": [7]}, generation_config__json={"bad_words_ids": [[3]]})
    schema = InputSchema(type="log", tokens=(0,), output=OutputDomain(tokens=(5,)))
    use = token_use(source, schema, Samples())
    assert list(use.kept) == [0, 3, 5, 7]
    assert use.counts == {"input": 1, "output": 1, "named": 2}


def test_an_id_that_the_model_lacks_breaks_the_schema(tmp_path):
    with pytest.raises(SchemaError, match="token id 9 is not below the model's 9 rows"):
        token_use(checkpoint(tmp_path, 9), InputSchema(type="log", tokens=(9,)), Samples())


def test_text_domains_need_a_tokenizer(tmp_path):
    use = token_use(checkpoint(tmp_path, 9), LOG, Samples(("x",)))
    assert isinstance(use, Declined)
    assert "the model has no tokenizer" in use.reason


# --- by corpus -----------------------------------------------------------------------------------------


def test_a_corpus_is_certified_with_its_bounds(tmp_path):
    blocks = tuple(f"{line}\n{line}" for line in LINES * 50)
    use = token_use(opened(tmp_path), LOG, Samples(blocks, blocks))
    figures = use.evidence.figures
    assert use.grade == "certified"
    assert (figures["input_held_out_blocks"], figures["input_delta"], figures["input_blocks_affected"]) == (
        100,
        0.05,
        0,
    )
    for name in ("blocks", "tokens", "lines"):
        assert figures[f"input_{name}_affected_bound"] == pytest.approx(1 - 0.05 ** (1 / 100))
    assert "exchangeable" in use.method
    assert "wherever the source's argmax is kept" in use.claim


def test_held_out_text_chooses_nothing_and_its_misses_are_counted(tmp_path):
    source = opened(tmp_path)
    alone = token_use(source, LOG, Samples(("the cat",)))
    judged = token_use(source, LOG, Samples(("the cat",), ("the cat", "the cat\nauthentication failure")))
    assert judged.kept == alone.kept
    assert (alone.grade, judged.grade) == ("measured", "certified")
    figures, raw = judged.figures, (source.root / "tokenizer.json").read_bytes()
    missed = [number not in judged.kept for number in encode(raw, "the cat\nauthentication failure")]
    assert any(missed)
    assert figures["input_blocks_affected"] == 1
    assert figures["input_tokens_affected_mean_share"] == pytest.approx(sum(missed) / len(missed) / 2)
    assert figures["input_lines_affected_mean_share"] == 0.25


def test_lines_alone_after_a_space_and_in_a_chat_are_calibrated(tmp_path):
    source = opened(tmp_path, chat_template__jinja=TEMPLATE, tokenizer_config__json={"eos_token": "<eos>"})
    use, raw = (
        token_use(source, LOG, Samples(("the cat\nsat there",))),
        (tmp_path / "tokenizer.json").read_bytes(),
    )
    chat = "<|user|>\nsat there<eos>\n<|assistant|>\n"
    for text in ("the cat\nsat there", "sat there", " sat there", "sat there\n", chat):
        assert set(use.kept).issuperset(encode(raw, text))
    assert use.counts["input"] > 0


def test_the_output_has_a_corpus_of_its_own(tmp_path):
    source = opened(tmp_path)
    schema = InputSchema(type="log", charset="chars:the ", output=OutputDomain(corpus=("a.txt",)))
    use = token_use(source, schema, Samples(), Samples((CORPUS[2],), (CORPUS[2],)))
    assert use.grade == "certified"
    assert use.figures["output_blocks_affected"] == 0
    assert "input_blocks_affected" not in use.figures
    assert use.counts["output"] > 10


def test_a_corpus_domain_without_text_is_the_users_mistake(tmp_path):
    with pytest.raises(SchemaError, match="no text to see which tokens occur"):
        token_use(opened(tmp_path), LOG, Samples())


# --- what always stays ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_kept_set_passes_the_check_of_the_cut(tmp_path, kind):
    source = opened(tmp_path, kind)
    use = token_use(source, LOG, Samples(tuple(LINES)))
    file = open_text(source).file
    check_kept(file, use.kept, use.size)
    assert closure(strings(source, use), file.ranks) == strings(source, use)
    assert set(use.kept) >= {file.ids[token] for token in (*file.byte_tokens, *(t.content for t in file.added))}
    assert sum(use.counts.values()) == len(use.kept)
    files = {name: (source.root / name).read_bytes() for name in source.side_files}
    narrowed = narrow_side_files(files, use.kept, use.size)["tokenizer.json"]
    assert len(TokenizerFile.from_bytes(narrowed).strings) == len(use.kept) < len(file.strings)


def test_padded_rows_are_not_tokens(tmp_path):
    source = opened(tmp_path, rows=512)
    use = token_use(source, LOG, Samples(tuple(CORPUS)))
    assert use.figures["padded_rows"] == 112
    assert max(use.kept) < 400
    assert use.size == 512


def test_a_padded_row_that_a_file_names_stays(tmp_path):
    use = token_use(opened(tmp_path, rows=512, config={"pad_token_id": 500}), LOG, Samples(("x",)))
    assert 500 in use.kept


def test_tokens_without_a_row_are_not_kept(tmp_path):
    use = token_use(opened(tmp_path, rows=399), LOG, Samples(("x",)))
    assert use.figures["tokens_without_row"] == 1
    assert max(use.kept) < 399


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (
            {"generation_config__json": {"eos_token_id": 400}},
            "generation_config.json: eos_token_id names token 400",
        ),
        ({"tokenizer_config__json": {"pad_token": "<none>"}}, "names '<none>', which tokenizer.json lacks"),
        (
            {"tokenizer_config__json": {"added_tokens_decoder": {"400": {"content": "<new>"}}}},
            "added_tokens_decoder has '<new>' as 400",
        ),
    ],
)
def test_files_that_disagree_with_the_tokenizer_decline_the_pass(tmp_path, files, reason):
    use = token_use(opened(tmp_path, **files), LOG, Samples(("x",)))
    assert isinstance(use, Declined)
    assert reason in use.reason


# --- chat templates ------------------------------------------------------------------------------------


def test_a_template_is_rendered_for_all_roles_and_both_ends(tmp_path):
    source = opened(tmp_path, chat_template__jinja=TEMPLATE, tokenizer_config__json={"eos_token": "<eos>"})
    (template,) = chat_templates(source)
    samples = template.samples()
    assert "<|user|>\na<eos>\n" in samples
    assert "<|system|>\na<eos>\n<|user|>\na<eos>\n<|assistant|>\n" in samples
    assert len(samples) == 10
    use = token_use(source, InputSchema(type="log", charset="chars:1"), Samples())
    raw = (tmp_path / "tokenizer.json").read_bytes()
    assert all(set(use.kept).issuperset(encode(raw, text)) for text in samples)


def test_a_template_that_refuses_a_role_is_rendered_without_it():
    source = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    assert len(ChatTemplate(source, {}).samples()) == 6


def test_the_date_in_a_template_does_not_depend_on_today():
    samples = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}).samples()
    assert len(samples) == len(DATES)
    assert {text.split()[1] for text in samples} >= {"Jan", "Feb", "Nov", "Dec"}
    assert {text.split()[0] for text in samples} == {f"{day:02d}" for day in range(1, 32)}


@pytest.mark.parametrize("source", ["{{ messages.__class__.__mro__ }}", "{% for m in", "{{ 1 / 0 }}", "{{ x.y.z }}"])
def test_a_template_out_of_its_box_or_broken_gives_nothing(source):
    assert ChatTemplate(source, {}).samples() == ()


def test_generation_marks_and_templates_inside_json(tmp_path):
    text = "{% generation %}{{ messages[0]['content'] }}{% endgeneration %}|"
    source = opened(tmp_path, tokenizer_config__json={"chat_template": [{"name": "default", "template": text}]})
    assert chat_templates(source)[0].samples() == ("a|",)


# --- the pass ------------------------------------------------------------------------------------------

AXES = (Axis(tensor="model.embed_tokens.weight", dim=0),)


def test_the_pass_narrows_all_token_tables(tmp_path):
    use = token_use(
        checkpoint(tmp_path, 9, {"text_config": {"vocab_size": 9}}),
        InputSchema(type="log", tokens=(1, 4)),
        Samples(),
    )
    narrow, skipped = propose_vocabulary(use, AXES, 9)
    assert skipped is None
    assert (narrow.pass_name, narrow.site, narrow.relabels) == (
        "vocabulary",
        "model.embed_tokens.weight",
        "tokens",
    )
    assert (list(narrow.kept), narrow.size, narrow.axes) == ([1, 4], 9, AXES)
    assert narrow.config == {"vocab_size": 2, "text_config.vocab_size": 2}
    assert narrow.evidence == use.evidence


@pytest.mark.parametrize(
    ("tokens", "axes", "size", "reason"),
    [
        (tuple(range(9)), AXES, 9, "every row is in use"),
        ((1,), (), 9, "no tensor is indexed by token ids"),
        ((1,), AXES, 16, "the tables have 16 rows, config.json says 9"),
    ],
)
def test_the_pass_skips_with_a_reason(tmp_path, tokens, axes, size, reason):
    use = token_use(checkpoint(tmp_path, 9), InputSchema(type="log", tokens=tokens), Samples())
    narrow, skipped = propose_vocabulary(use, axes, size)
    assert narrow is None
    assert (skipped.pass_name, skipped.reason, skipped.figures["rows"]) == ("vocabulary", reason, 9)


def test_a_declined_tokenizer_is_skipped_by_name(tmp_path):
    data = {"model": {"type": "Unigram", "vocab": []}}
    use = token_use(checkpoint(tmp_path, 9, tokenizer__json=data), LOG, Samples(("x",)))
    narrow, skipped = propose_vocabulary(use, AXES, 9)
    assert narrow is None
    assert "the tokenizer model is Unigram, only BPE can be cut" in skipped.reason


def test_a_sentencepiece_model_alone_is_declined(tmp_path):
    use = token_use(checkpoint(tmp_path, 9, tokenizer__model="x"), LOG, Samples(("x",)))
    assert "no tokenizer.json, only tokenizer.model" in use.reason
