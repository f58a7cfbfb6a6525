"""Models that lie: each is one line before any library sees the file, and nothing outside the folder is touched."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from collapse.analysis.config_cost import config_only
from collapse.checkpoint import INDEX, MAX_HEADER, SINGLE, Checkpoint
from collapse.errors import CheckpointError, CollapseError, SchemaError, UnsupportedError
from collapse.progress import Stopwatch
from collapse.schema import InputSchema
from collapse.sequences import encoder
from collapse.source_model import load_source
from collapse.textfile import read_text
from collapse.tokenizer import TokenizerFile
from collapse.untrusted import MAX_JSON, read_json
from tests.fuzzing import CONFIG, TENSOR, limits, write_model
from tests.small_tokenizers import tokenizer_data
from tests.tiny import export, plan_for, tiny_llama


def with_config(root: Path, **fields: Any) -> Path:
    return write_model(root, **{"config.json": json.dumps(CONFIG | fields).encode()})


def with_header(root: Path, header: Any, *, data: int = 8, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(raw) if length is None else length
    return write_model(root, **{SINGLE: size.to_bytes(8, "little") + raw + bytes(data)})


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# Headers.

HEADERS: dict[str, tuple[Any, str]] = {
    "overlap": ({"a": entry(), "b": entry(shape=[1], offsets=[4, 8])}, "bytes of b overlap"),
    "gap": ({"a": entry(shape=[1], offsets=[4, 8])}, "bytes of a leave a gap"),
    "twice": (b'{"a":' + TENSOR[5:-1] + b',"a":' + TENSOR[5:-1] + b"}", "a name stands twice"),
    "size of another dtype": ({"a": entry("F16")}, "does not match its dtype"),
    "unknown dtype": ({"a": entry("F7")}, "unknown dtype"),
    "a list as dtype": ({"a": entry([])}, "unknown dtype"),
    "overflow to the right size": ({"a": entry("U8", [2**32, 2**32, 8])}, "does not match"),
    "overflow hidden by a zero": ({"a": entry(), "b": entry(shape=[2**62, 8, 0], offsets=[8, 8])}, "does not match"),
    "many dimensions": ({"a": entry("U8", [1] * 65 + [8])}, "does not match"),
    "negative": ({"a": entry(shape=[-2])}, "is damaged"),
    "fraction": ({"a": entry(shape=[2.0])}, "is damaged"),
    "not a number": (b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', "is damaged"),
    "a name that is no text": (b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', "is damaged"),
    "metadata that is no text": ({"__metadata__": {"x": [1]}, "a": entry()}, "no map of tensors"),
    "UTF-16": (json.dumps({"a": entry()}).encode("utf-16"), "header is damaged"),
    "deep": (b"[" * 100_000, "header is damaged"),
    "a list": ([], "no map of tensors"),
}  # fmt: skip


@pytest.mark.parametrize("fault", HEADERS)
def test_a_header_that_lies_is_refused(tmp_path: Path, fault: str) -> None:
    header, message = HEADERS[fault]
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(with_header(tmp_path / "model", header))


@pytest.mark.parametrize("length", [MAX_HEADER + 1, 2**63, 2**64 - 1, 10_000])
def test_a_header_longer_than_its_file_or_the_limit_is_not_read(tmp_path: Path, length: int) -> None:
    root = with_header(tmp_path / "model", {"a": entry()}, length=length)
    with (root / SINGLE).open("ab") as stream:
        stream.truncate(min(length, 2**33) + 100 if length > MAX_HEADER else 9_000)
    with pytest.raises(CheckpointError, match="header is damaged"):
        Checkpoint.open(root)


def test_bytes_hidden_behind_the_data_are_refused_and_those_in_metadata_do_not_travel(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="4 bytes after the data"):
        Checkpoint.open(with_header(tmp_path / "behind", {"a": entry()}, data=12))
    root = with_header(tmp_path / "inside", {"__metadata__": {"note": "hidden away"}, "a": entry()})
    source = Checkpoint.open(root)
    out = export(source, plan_for(source), tmp_path / "out")
    assert b"hidden away" not in (out.root / SINGLE).read_bytes()


def test_a_sound_header_passes(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "a": entry(), "empty": entry(shape=[0, 3], offsets=[8, 8])}
    assert list(Checkpoint.open(with_header(tmp_path / "model", header)).tensors) == ["a", "empty"]


# The folder.


@pytest.mark.parametrize("found", [5, None, "", ["x"], {}])
def test_an_index_of_something_else_than_names_is_refused(tmp_path: Path, found: Any) -> None:
    root = write_model(tmp_path / "model", **{INDEX: json.dumps({"weight_map": {"w": found}}).encode()})
    with pytest.raises(CheckpointError, match="no weight_map of names to files"):
        Checkpoint.open(root)


def test_an_index_that_says_two_things_is_refused(tmp_path: Path) -> None:
    raw = f'{{"weight_map": {{"w": "{SINGLE}", "w": "other.safetensors"}}}}'.encode()
    with pytest.raises(CheckpointError, match="a name stands twice"):
        Checkpoint.open(write_model(tmp_path / "model", **{INDEX: raw}))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "notes.txt", "chat_template.jinja", "spiece.model"])
def test_a_file_that_is_a_link_to_somebodys_own_is_refused_and_never_copied(tmp_path: Path, name: str) -> None:
    root = write_model(tmp_path / "model")
    (tmp_path / "secret").write_text(json.dumps(CONFIG))
    (root / name).unlink(missing_ok=True)
    (root / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=f"{name} is a link out of the model"):
        Checkpoint.open(root)


def test_a_fifo_among_the_files_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    root = write_model(tmp_path / "model")
    os.mkfifo(root / "generation_config.json")
    with limits(root), pytest.raises(CheckpointError, match="generation_config.json is missing or no plain file"):
        Checkpoint.open(root)


def test_links_into_the_blobs_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    blobs, root = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "1234"
    blobs.mkdir(parents=True)
    root.parent.mkdir()
    write_model(root)
    for path in list(root.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(Path("..", "..", "blobs", path.name))
    assert list(Checkpoint.open(root).tensors) == ["w"]
    (tmp_path / "models--a--b" / "snapshots").rename(tmp_path / "models--a--b" / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link out of the model"):
        Checkpoint.open(tmp_path / "models--a--b" / "elsewhere" / "1234")


def test_an_index_of_other_weight_files_does_not_travel(tmp_path: Path) -> None:
    root = write_model(tmp_path / "model", **{"pytorch_model.bin.index.json": b"{}", "generation_config.json": b"{}"})
    assert Checkpoint.open(root).side_files == ("config.json", "generation_config.json")


# Configs.

CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "remote code": ({"auto_map": {"AutoModel": "evil.Model"}}, r"remote code \(auto_map\)"),
    "remote code within": ({"text_config": {"auto_map": {}}}, r"remote code \(text_config.auto_map\)"),
    "remote code in a list": ({"parts": [{"auto_map": {}}]}, r"remote code \(parts\[0\].auto_map\)"),
    "a kernel": ({"_attn_implementation": "evil/kernel"}, "kernel from elsewhere"),
    "a kernel within": ({"text_config": {"attn_implementation": {"": "evil/kernel"}}}, "kernel from elsewhere"),
    "width": ({"hidden_size": 10**12}, "hidden_size = 1000000000000: allowed are up to 2147483648"),
    "depth": ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: allowed are up to 1000"),
    "depth within": ({"text_config": {"n_layer": 10**9}}, r"text_config.n_layer = 1000000000"),
    "labels": ({"num_labels": 10**9}, "num_labels = 1000000000"),
    "modules": ({"num_hidden_layers": 999, "num_local_experts": 16_000}, "999 layers of 16000 experts"),
    "huge": ({"seed": 10**400}, r"seed = about 2\^1329"),
    "negative": ({"hidden_size": -(10**12)}, "hidden_size = -1000000000000"),
    "not a number": ({"rope_theta": float("nan")}, r"rope_theta is no number \(NaN\)"),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_a_config_that_no_model_has_is_refused_before_transformers_sees_it(tmp_path: Path, fault: str) -> None:
    fields, message = CONFIGS[fault]
    root = with_config(tmp_path / "model", **fields)
    with limits(root):
        for read in (Checkpoint.open, config_only):
            with pytest.raises(CollapseError, match=message):
                read(root)


def test_a_config_nested_too_deep_or_too_long_is_refused(tmp_path: Path) -> None:
    deep = b'{"a":' * 70 + b"1" + b"}" * 70
    with pytest.raises(CheckpointError, match="nested more than 64 deep"):
        Checkpoint.open(write_model(tmp_path / "model", **{"config.json": deep}))
    with pytest.raises(CheckpointError, match="not valid JSON"):
        Checkpoint.open(write_model(tmp_path / "model", **{"config.json": b"[" * 100_000}))
    with pytest.raises(CheckpointError, match=f"more than {MAX_JSON} bytes"):
        Checkpoint.open(write_model(tmp_path / "model", **{"config.json": b" " * (MAX_JSON + 1)}))


def test_usual_configs_pass_with_their_infinities_and_long_contexts(tmp_path: Path) -> None:
    fields = {"time_step_limit": [0.0, float("inf")], "max_position_embeddings": 10_485_760, "num_hidden_layers": 200}
    experts = {"num_local_experts": 512, "rope_theta": 10**10, "block_size": 16_384, "attn_implementation": "sdpa"}
    assert Checkpoint.open(with_config(tmp_path / "model", **fields, **experts)).config["block_size"] == 16_384


def test_a_name_from_a_file_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    name = "\x1b[2J\n" + "x" * 5000
    with pytest.raises(CheckpointError) as found:
        Checkpoint.open(with_header(tmp_path / "model", {name: entry("F7")}))
    assert str(found.value).isprintable() and len(str(found.value)) < 2100


# Other files.


def test_a_compressed_bomb_is_refused_after_a_bounded_part(tmp_path: Path) -> None:
    import gzip

    with gzip.open(tmp_path / "bomb.log.gz", "wb", compresslevel=9) as stream:
        for _ in range(64):
            stream.write(bytes(1 << 20).replace(b"\0", b"a"))
    with pytest.raises(SchemaError, match="expands to more than 200 times"):
        read_text(tmp_path / "bomb.log.gz")


def test_a_very_long_line_is_text(tmp_path: Path) -> None:
    (tmp_path / "long.log").write_text("x" * 5_000_000)
    assert len(read_text(tmp_path / "long.log")) == 5_000_000
    assert InputSchema(type="log", max_line_length=80).violation("x" * 5_000_000) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"padding": True}, {"padding": {"pad_id": []}}, {"version": "\ud800"},
        {"pre_tokenizer": 1}, {"post_processor": {"special_tokens": {"a": {}}}},
        {"model": {"type": "BPE", "vocab": {"a": []}, "merges": []}}, {"added_tokens": [{"id": "x", "content": "y"}]},
        {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
    ],
)  # fmt: skip
def test_a_tokenizer_of_another_form_is_damaged(change: dict[str, Any]) -> None:
    with pytest.raises(CollapseError, match="tokenizer.json"):
        TokenizerFile.from_bytes(json.dumps(tokenizer_data("byte-level") | change).encode())


def test_json_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    for raw in (b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"[]", b'{"a": 1' + b"0" * 5000 + b"}"):
        (tmp_path / "x.json").write_bytes(raw)
        with pytest.raises(CheckpointError, match=r"x.json"):
            read_json(tmp_path / "x.json")


# What a folder can make us do.


def test_a_local_model_is_opened_and_loaded_without_network_pickle_or_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tiny_llama(tmp_path / "model").root
    (root / "tokenizer.json").write_text(json.dumps(tokenizer_data("byte-level")))
    (root / "modeling_llama.py").write_text("raise SystemExit('the code of the folder was run')")
    torch.save({}, root / "training_args.bin")

    def refuse(*given: object, **options: object) -> None:
        pytest.fail("something asked for the network or a pickle")

    for owner, name in ((socket, "getaddrinfo"), (socket.socket, "connect"), (torch, "load")):
        monkeypatch.setattr(owner, name, refuse)
    with limits(root):
        source = Checkpoint.open(root)
        assert encoder(source)("abc")
        model, unexpected = load_source(source, Stopwatch(quiet=True))
    assert not unexpected and model.config.num_hidden_layers == 2


def test_a_pickle_behind_an_honest_name_is_refused(tmp_path: Path) -> None:
    root = write_model(tmp_path / "model")
    torch.save({"w": torch.ones(2)}, root / SINGLE)
    with pytest.raises(CheckpointError, match="header is damaged"):
        Checkpoint.open(root)


def test_remote_code_is_unsupported_rather_than_damaged(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="collapse never runs it"):
        Checkpoint.open(with_config(tmp_path / "model", auto_map={"AutoConfig": "x.Y"}))
