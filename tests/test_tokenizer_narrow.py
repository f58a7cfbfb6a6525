"""Cutting a tokenizer: same ids for text whose tokens are kept, and nothing that points past the end."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import CORPUS, KINDS, decode, encode, tokenizer_data
from tokenizers import Tokenizer

from collapse.bpe import byte_alphabet, closure, derivation, run
from collapse.errors import CheckpointError, PlanError, UnsupportedError
from collapse.plan import IndexSet
from collapse.rewrite.tokenizer import left_out, narrow_side_files, narrow_tokenizer
from collapse.tokenizer import TokenizerFile

STORIES = Path(__file__).parents[1] / "../shared/models/stories260K"
WORDS = sorted({word for line in CORPUS for word in line.split()})
texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=6).map(" ".join)


def dumped(data):
    return json.dumps(data, ensure_ascii=False).encode()


def opened(kind):
    return TokenizerFile.from_bytes(dumped(tokenizer_data(kind)))


def must_keep(file):
    """Bytes, space markers and special tokens: what no cut may lose."""
    return {file.vocab[t] for t in (*file.byte_tokens, *file.markers)} | {t.id for t in file.added if t.special}


def closed(file, ids):
    strings = [file.strings[number] for number in must_keep(file) | set(ids)]
    return IndexSet.of(file.ids[token] for token in closure(strings, file.ranks) if token in file.ids)


def cut(file, kept, **files):
    inputs = {
        "tokenizer.json": file.raw,
        **{name.replace("__", "."): dumped(data) for name, data in files.items()},
    }
    return narrow_side_files(inputs, kept, len(file.strings))


# --- exactness -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_text_whose_tokens_are_kept_is_encoded_as_before(kind, data):
    file = opened(kind)
    seen, other = data.draw(texts), data.draw(texts)
    extra = data.draw(st.sets(st.sampled_from(sorted(file.strings)), max_size=120))
    kept = closed(file, {*encode(file.raw, seen), *extra})
    narrowed, new_ids = cut(file, kept)["tokenizer.json"], {old: new for new, old in enumerate(kept)}
    for text in (seen, other, seen + other):
        before = encode(file.raw, text, special=True)
        after = encode(narrowed, text, special=True)
        if all(number in new_ids for number in before):
            assert after == [new_ids[number] for number in before]
        assert max(after, default=0) < len(kept)
        assert decode(narrowed, encode(narrowed, text)) == decode(file.raw, encode(file.raw, text))
    assert all(number in new_ids for number in encode(file.raw, seen)), "the property would be vacuous"


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "many-merges"])
def test_merging_here_equals_merging_in_the_library(kind):
    data = tokenizer_data(kind)
    file = opened(kind)
    library = Tokenizer.from_str(json.dumps(data)).model
    plain = [t for t in file.vocab if t not in file.alphabet or file.flavour == "byte-level"]
    for token in [*plain, *("".join(plain[at : at + 3]) for at in range(260, len(plain) - 3, 5))]:
        if all(char in file.vocab for char in token):
            assert run(token, file.ranks)[0] == [part.value for part in library.tokenize(token)]


def test_only_the_derivation_is_needed_not_every_merge_with_that_result():
    ranks = {("b", "c"): 0, ("a", "bc"): 1, ("a", "b"): 2, ("ab", "c"): 3}
    assert derivation("abc", ranks) == {"a", "b", "c", "bc", "abc"}
    assert "ab" not in closure(["abc"], ranks)


def test_a_token_that_its_string_does_not_merge_to_needs_nothing():
    ranks = {("a", "b"): 0, ("b", "c"): 1, ("a", "bc"): 2}
    assert derivation("abc", ranks) == {"abc"}


@pytest.mark.parametrize("kind", KINDS)
def test_missing_ancestors_change_the_encoding_and_are_refused(kind):
    file = opened(kind)
    token = max((t for t in file.vocab if run(t, file.ranks)[0] == [t]), key=lambda t: (len(t), t))
    full = closed(file, [file.vocab[token]])
    ancestors = {file.vocab[t] for t in derivation(token, file.ranks)} - must_keep(file) - {file.vocab[token]}
    wrong = IndexSet.of(set(full) - ancestors)
    text = decode(file.raw, [file.vocab[token]])
    new_ids = {old: new for new, old in enumerate(wrong)}
    broken = narrow_tokenizer(file, new_ids)
    if kind != "ignore-merges":  # which finds the whole word; a longer word shows the fault
        assert encode(file.raw, text) == [file.vocab[token]]
        assert encode(broken, text) != [new_ids[file.vocab[token]]]
    with pytest.raises(PlanError, match="is trimmed, from which kept tokens are merged"):
        cut(file, wrong)


def test_ignore_merges_needs_the_ancestors_inside_longer_words():
    file = opened("ignore-merges")
    token = next(t for t in sorted(file.vocab, key=len, reverse=True) if run(t, file.ranks)[0] == [t])
    word = decode(file.raw, [file.vocab[token]]).strip() * 2
    kept = closed(file, encode(file.raw, word))
    new_ids = {old: new for new, old in enumerate(kept)}
    narrowed = cut(file, kept)["tokenizer.json"]
    assert encode(narrowed, word) == [new_ids[number] for number in encode(file.raw, word)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_cutting_twice_is_cutting_once_to_what_both_keep(kind, data):
    file = opened(kind)
    ids = st.sets(st.sampled_from(sorted(file.strings)), max_size=150)
    first = closed(file, data.draw(ids))
    second = closed(file, set(data.draw(ids)) & set(first))
    both = IndexSet.of(set(first) & set(second))
    once = cut(file, first)["tokenizer.json"]
    renumbered = {old: new for new, old in enumerate(first)}
    again = IndexSet.of(renumbered[number] for number in both)
    assert cut(TokenizerFile.from_bytes(once), again) == cut(file, both)


def test_keeping_everything_changes_no_id():
    file = opened("byte-fallback")
    kept = IndexSet.of(file.strings)
    assert json.loads(cut(file, kept)["tokenizer.json"]) == file.data


def test_two_runs_give_the_same_bytes_in_any_order_of_files():
    file = opened("byte-level")
    kept = closed(file, encode(file.raw, CORPUS[0]))
    inputs = {"config.json": dumped({"vocab_size": 400, "eos_token_id": 0}), "tokenizer.json": file.raw}
    backwards = dict(reversed(inputs.items()))
    assert narrow_side_files(inputs, kept, 400) == narrow_side_files(backwards, kept, 400)


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs ../shared/models/stories260K")
@settings(max_examples=40, deadline=None)
@given(seen=st.text(alphabet="abcdefghijklmnop .,'\nÉ€", max_size=40), other=st.text(max_size=20))
def test_a_real_sentencepiece_style_tokenizer(seen, other):
    file = TokenizerFile.read(STORIES)
    kept = closed(file, encode(file.raw, f"{seen} once upon a time there was a little girl named"))
    narrowed, new_ids = cut(file, kept)["tokenizer.json"], {old: new for new, old in enumerate(kept)}
    for text in (seen, other, "once upon a time"):
        before, after = encode(file.raw, text), encode(narrowed, text)
        if all(number in new_ids for number in before):
            assert after == [new_ids[number] for number in before]
        assert decode(narrowed, after) == decode(file.raw, before)


# --- ids everywhere ------------------------------------------------------------------------------------


def with_late_specials():
    """The byte-level tokenizer with two tokens of its own behind the vocabulary: an end and a tool mark."""
    data = tokenizer_data("byte-level")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    data["added_tokens"] += [
        {"id": 400, "content": "<end>", "special": True, **flags},
        {"id": 401, "content": "<tool>", "special": False, **flags},
    ]
    template = data["post_processor"]
    template["single"][1]["SpecialToken"]["id"] = "<end>"
    template["special_tokens"] = {"<end>": {"id": "<end>", "ids": [400], "tokens": ["<end>"]}}
    data["truncation"] = {"direction": "Right", "max_length": 64, "strategy": "LongestFirst", "stride": 0}
    return TokenizerFile.from_bytes(dumped(data))


def test_post_processor_padding_and_added_tokens_point_into_the_new_table():
    file = with_late_specials()
    kept = closed(file, encode(file.raw, "the cat"))
    decoder = {str(t.id): {"content": t.content, "special": t.special} for t in file.added}
    added = {t.content: t.id for t in file.added}
    out = cut(file, kept, tokenizer_config__json={"added_tokens_decoder": decoder, "eos_token": "<end>"},
              added_tokens__json=added)  # fmt: skip
    data, new_end = json.loads(out["tokenizer.json"]), len(kept) - 1
    assert encode(out["tokenizer.json"], "the cat", special=True)[-1] == new_end
    assert data["post_processor"]["special_tokens"]["<end>"]["ids"] == [new_end]
    assert data["padding"]["pad_id"] == data["model"]["vocab"]["<pad>"] == 1
    assert data["truncation"] == file.data["truncation"]
    assert [(t["content"], t["id"]) for t in data["added_tokens"]] == [
        ("<eos>", 0),
        ("<pad>", 1),
        ("<end>", new_end),
    ]
    settings_ = json.loads(out["tokenizer_config.json"])
    assert {int(k): v["content"] for k, v in settings_["added_tokens_decoder"].items()} == {
        0: "<eos>", 1: "<pad>", new_end: "<end>"}  # fmt: skip
    assert json.loads(out["added_tokens.json"]) == {"<eos>": 0, "<pad>": 1, "<end>": new_end}
    assert Tokenizer.from_buffer(out["tokenizer.json"]).token_to_id("<end>") == new_end


@pytest.mark.parametrize("kind", ["RobertaProcessing", "BertProcessing"])
def test_sep_and_cls_of_older_post_processors_move_too(kind):
    data = with_late_specials().data
    roles = {"type": kind, "sep": ["<end>", 400], "cls": ["<pad>", 1]}
    if kind == "RobertaProcessing":
        roles |= {"trim_offsets": True, "add_prefix_space": False}
    plain = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    data["post_processor"] = {"type": "Sequence", "processors": [plain, roles]}
    file = TokenizerFile.from_bytes(dumped(data))
    kept = closed(file, [])
    after = encode(cut(file, kept)["tokenizer.json"], "x", special=True)
    assert (after[0], after[-1]) == (1, len(kept) - 1)


def test_every_id_field_moves():
    config = {
        "vocab_size": 10, "eos_token_id": [9, 3], "pad_token_id": -1, "bos_token_id": None,
        "image_token_index": 8,
        "hidden_size": 10, "num_attention_heads": 9,
        "text_config": {"vocab_size": 10, "eos_token_id": 9, "nested": [{"mask_token_id": 8}]},
        "vision_config": {"vocab_size": 7, "eos_token_id": 6},
    }  # fmt: skip
    generation = {
        "eos_token_id": 9, "forced_bos_token_id": 3, "decoder_start_token_id": 0, "suppress_tokens": [3, 8],
        "begin_suppress_tokens": [0], "bad_words_ids": [[3, 8], [9]], "forced_decoder_ids": [[1, 9], [2, 8]],
        "sequence_bias": [[[3, 9], -1.5]], "stop_token_ids": [9], "max_length": 9, "top_k": 3,
    }  # fmt: skip
    files = {"config.json": dumped(config), "generation_config.json": dumped(generation)}
    out = narrow_side_files(files, IndexSet.of([0, 3, 8, 9]), 10)
    assert json.loads(out["config.json"]) == {
        "vocab_size": 4, "eos_token_id": [3, 1], "pad_token_id": -1, "bos_token_id": None,
        "image_token_index": 2,
        "hidden_size": 10, "num_attention_heads": 9,
        "text_config": {"vocab_size": 4, "eos_token_id": 3, "nested": [{"mask_token_id": 2}]},
        "vision_config": {"vocab_size": 7, "eos_token_id": 6},
    }  # fmt: skip
    assert json.loads(out["generation_config.json"]) == {
        "eos_token_id": 3, "forced_bos_token_id": 1, "decoder_start_token_id": 0, "suppress_tokens": [1, 2],
        "begin_suppress_tokens": [0], "bad_words_ids": [[1, 2], [3]], "forced_decoder_ids": [[1, 3], [2, 2]],
        "sequence_bias": [[[1, 3], -1.5]], "stop_token_ids": [3], "max_length": 9, "top_k": 3,
    }  # fmt: skip


def test_an_id_beyond_the_new_size_is_renumbered():
    out = narrow_side_files({"config.json": dumped({"vocab_size": 100, "eos_token_id": 99})}, IndexSet.of([0, 99]), 100)
    assert json.loads(out["config.json"]) == {"vocab_size": 2, "eos_token_id": 1}


@pytest.mark.parametrize(
    ("name", "content", "field"),
    [
        ("config.json", {"eos_token_id": 5}, "eos_token_id"),
        ("config.json", {"text_config": {"pad_token_id": 5}}, "text_config.pad_token_id"),
        ("generation_config.json", {"eos_token_id": [0, 5]}, "eos_token_id"),
        ("generation_config.json", {"bad_words_ids": [[0, 5]]}, "bad_words_ids"),
    ],
)
def test_an_id_that_was_trimmed_away_is_refused_by_file_and_field(name, content, field):
    with pytest.raises(PlanError) as caught:
        narrow_side_files({name: dumped(content)}, IndexSet.of([0, 1]), 6)
    assert str(caught.value).startswith(f"{name}: {field} names token 5, which is trimmed")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_token_string_that_was_trimmed_away_is_refused(name):
    file = with_late_specials()
    inputs = {"tokenizer.json": file.raw, name: dumped({"extra_special_tokens": ["<tool>"]})}
    with pytest.raises(PlanError, match=rf"{name}: extra_special_tokens names '<tool>', which is trimmed"):
        narrow_side_files(inputs, closed(file, []), 402)


def test_a_token_without_a_row_leaves_the_tokenizer_and_its_names():
    file = with_late_specials()
    kept = closed(TokenizerFile.from_bytes(dumped(tokenizer_data("byte-level"))), [])
    data = {**file.data, "post_processor": None}
    settings_ = {"eos_token": "<eos>", "end_token": "<end>", "extra_special_tokens": ["<end>", "<pad>"]}
    inputs = {"tokenizer.json": dumped(data), "tokenizer_config.json": dumped(settings_)}
    out = narrow_side_files(inputs, kept, 400)
    assert "<end>" not in out["tokenizer.json"].decode()
    assert json.loads(out["tokenizer_config.json"]) == {
        "eos_token": "<eos>",
        "extra_special_tokens": ["<pad>"],
    }


def test_padded_rows_go_and_shift_nothing():
    file = opened("byte-level")
    kept = closed(file, file.strings)
    files = {"config.json": dumped({"vocab_size": 512, "eos_token_id": 0}), "tokenizer.json": file.raw}
    out = narrow_side_files(files, kept, 512)
    assert json.loads(out["config.json"]) == {"vocab_size": 400, "eos_token_id": 0}
    assert json.loads(out["tokenizer.json"]) == file.data


def test_second_copies_of_the_tokenizer_are_left_out_and_other_files_untouched():
    file = opened("byte-level")
    others = {"vocab.json": b"{}", "merges.txt": b"", "tokenizer.model": b"\0", "notes.txt": b"hello",
              "generation_config.json": b'{ "top_k":3 }'}  # fmt: skip
    out = narrow_side_files({**others, "tokenizer.json": file.raw}, closed(file, []), 400)
    assert sorted(out) == ["generation_config.json", "notes.txt", "tokenizer.json"]
    assert (out["notes.txt"], out["generation_config.json"]) == (b"hello", b'{ "top_k":3 }')
    assert left_out(others) == ("merges.txt", "tokenizer.model", "vocab.json")


def test_a_tokenizer_without_tokenizer_json_is_refused():
    with pytest.raises(UnsupportedError, match=r"no tokenizer.json, only tokenizer.model"):
        narrow_side_files({"tokenizer.model": b"\0"}, IndexSet.of([0]), 10)


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_byte_and_special_tokens_may_not_be_trimmed(kind):
    file = opened(kind)
    full = set(closed(file, []))
    with pytest.raises(PlanError, match="byte token"):
        cut(file, IndexSet.of(full - {file.vocab[file.byte_tokens[65]]}))
    with pytest.raises(PlanError, match="special token"):
        cut(file, IndexSet.of(full - {file.added[0].id}))


def test_the_space_marker_may_not_be_trimmed_since_bytes_would_not_become_a_space():
    file = opened("byte-fallback")
    assert file.markers == ("▁",)
    wrong = IndexSet.of(set(closed(file, [])) - {file.vocab["▁"]})
    broken = narrow_tokenizer(file, {old: new for new, old in enumerate(wrong)})
    assert decode(broken, encode(broken, "a b")) == "a▁b"
    with pytest.raises(PlanError, match="space marker"):
        cut(file, wrong)


def test_rows_that_do_not_exist_cannot_be_kept():
    with pytest.raises(PlanError, match="keeps token 10 of 10 rows"):
        narrow_side_files({}, IndexSet.of([0, 10]), 10)


# --- what is read, what is declined --------------------------------------------------------------------


def edited(kind, **model):
    data = tokenizer_data(kind)
    data["model"].update(model)
    return dumped(data)


@pytest.mark.parametrize("kind", ["Unigram", "WordPiece", "WordLevel"])
def test_other_models_are_declined_by_name(kind):
    with pytest.raises(UnsupportedError, match=f"the tokenizer model is {kind}"):
        TokenizerFile.from_bytes(edited("byte-level", type=kind))


@pytest.mark.parametrize(
    ("option", "value"),
    [("dropout", 0.1), ("continuing_subword_prefix", "##"), ("end_of_word_suffix", "</w>")],
)
def test_options_that_break_the_proof_are_declined(option, value):
    with pytest.raises(UnsupportedError, match=option):
        TokenizerFile.from_bytes(edited("byte-level", **{option: value}))


@pytest.mark.parametrize("option", ["continuing_subword_prefix", "end_of_word_suffix"])
def test_empty_prefix_and_suffix_mean_none(option):
    assert TokenizerFile.from_bytes(edited("byte-level", **{option: ""})).flavour == "byte-level"


def test_bpe_without_bytes_is_declined():
    with pytest.raises(UnsupportedError, match="without byte level and without byte fallback"):
        TokenizerFile.from_bytes(edited("byte-fallback", byte_fallback=False))


def test_byte_fallback_without_all_bytes_is_declined():
    data = tokenizer_data("byte-fallback")
    del data["model"]["vocab"]["<0x41>"]
    with pytest.raises(UnsupportedError, match=r"1 of the 256 byte tokens are missing, first <0x41>"):
        TokenizerFile.from_bytes(dumped(data))


def test_byte_level_without_a_byte_is_named_and_keeps_the_others():
    data = tokenizer_data("byte-level")
    del data["model"]["vocab"][byte_alphabet()[4]]
    file = TokenizerFile.from_bytes(dumped(data))
    assert file.missing_bytes == (4,)
    assert len(file.byte_tokens) == 255


def test_an_added_token_that_would_be_read_with_another_id_is_declined():
    data = tokenizer_data("byte-level")
    data["added_tokens"].append({**data["added_tokens"][0], "content": "<far>", "id": 700})
    assert Tokenizer.from_str(json.dumps(data)).token_to_id("<far>") == 400
    with pytest.raises(UnsupportedError, match="says id 700 but is read as 400"):
        TokenizerFile.from_bytes(dumped(data))


def test_merges_with_byte_tokens_are_declined():
    data = tokenizer_data("byte-fallback")
    data["model"]["vocab"]["<0x41><0x42>"] = 480
    data["model"]["merges"].append(["<0x41>", "<0x42>"])
    with pytest.raises(UnsupportedError, match="a merge uses the byte token <0x41>"):
        TokenizerFile.from_bytes(dumped(data))


@pytest.mark.parametrize("raw", [b"{", b"[]", b'{"model": {"type": "BPE"}}', b'{"model": 3}'])
def test_a_damaged_file_is_named(raw):
    with pytest.raises(CheckpointError, match=r"^tokenizer\.json: damaged"):
        TokenizerFile.from_bytes(raw)


def test_a_merge_of_unknown_tokens_is_damage():
    data = tokenizer_data("byte-level")
    data["model"]["merges"].append(["th", "nowhere"])
    with pytest.raises(CheckpointError, match="a merge uses"):
        TokenizerFile.from_bytes(dumped(data))


def test_a_disagreeing_added_tokens_decoder_is_declined():
    file = opened("byte-level")
    with pytest.raises(UnsupportedError, match=r"added_tokens_decoder has '<new>' as 400"):
        cut(
            file,
            closed(file, []),
            tokenizer_config__json={"added_tokens_decoder": {"400": {"content": "<new>"}}},
        )
