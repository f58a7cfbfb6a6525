"""What a model may be called: directories, GGUF files and hub ids, and everything that is refused."""

from __future__ import annotations

import json
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import errors
from safetensors.torch import load_file, save_file

from collapse import sources
from collapse.errors import CheckpointError, CollapseError, OutputError
from collapse.sources import cache_directory, conversion_key, resolve

VOCABULARY, HIDDEN, INNER, HEADS = 259, 16, 32, 2


def byte_tokens() -> list[str]:
    """Return one token a byte in the spelling of byte-level BPE: printable bytes stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def write_gguf(path: Path, *, architecture: str = "llama", scale: float = 1.0) -> dict[str, np.ndarray]:
    """Write a one-layer Llama with a byte vocabulary; returns its tensors by GGUF name."""
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*byte_tokens(), "ab", "<|start|>", "<|end|>"])
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    shapes = {
        "token_embd.weight": (VOCABULARY, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        **{f"blk.0.attn_{letter}.weight": (HIDDEN, HIDDEN) for letter in ("q", "k", "v", "output")},
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }
    tensors = {name: (scale * random.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def write_directory(root: Path) -> Path:
    """Write the smallest checkpoint directory that opens."""
    root.mkdir()
    (root / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"w": torch.zeros(2)}, root / "model.safetensors")
    return root


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "Tiny-Llama.F32.gguf"
    write_gguf(path)
    return path


@pytest.fixture(scope="module")
def filled(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache that holds the conversion of the tiny GGUF file."""
    cache = tmp_path_factory.mktemp("cache")
    resolve(str(tiny_gguf), cache=cache)
    return cache


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make any connection attempt an error of the test itself, not one that a handler could swallow."""

    class Touched(BaseException):
        pass

    def refuse(*_args: object) -> None:
        raise Touched("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def forbid_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path, _out: Path) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(sources, "_convert", refuse)


def one_line(error: CollapseError) -> str:
    text = str(error)
    assert "\n" not in text
    assert text
    return text


def test_a_directory_is_opened_in_place(tmp_path: Path) -> None:
    root = write_directory(tmp_path / "model")
    found = resolve(str(root))
    assert found.root == root
    assert found.label == "model"


def test_gguf_tensors_arrive_in_half_precision(tiny_gguf: Path, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_conversion(monkeypatch)
    found = resolve(str(tiny_gguf), cache=filled)
    written = write_gguf(tiny_gguf.parent / "again.gguf")
    loaded = load_file(found.root / "model.safetensors")
    for theirs, ours in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }.items():
        assert torch.equal(loaded[ours], torch.from_numpy(written[theirs]).half())
    assert found.config["vocab_size"] == VOCABULARY
    tokenizer = found.read_json("tokenizer.json")
    assert tokenizer is not None
    assert tokenizer["model"]["vocab"]["ab"] == 256


def test_label_is_the_stem_and_holds_no_path(tiny_gguf: Path, filled: Path) -> None:
    found = resolve(str(tiny_gguf), cache=filled)
    assert found.label == "Tiny-Llama.F32"
    for name in found.side_files:
        assert str(tiny_gguf.parent) not in (found.root / name).read_text()


def test_second_use_converts_nothing(tiny_gguf: Path, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_conversion(monkeypatch)
    lines: list[str] = []
    resolve(str(tiny_gguf), cache=filled, progress=lines.append)
    assert lines == []


def test_progress_names_the_file_on_the_first_use(tiny_gguf: Path, filled: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    done = filled / conversion_key(tiny_gguf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_convert", lambda _path, out: shutil.copytree(done, out, dirs_exist_ok=True))
        resolve(str(tiny_gguf), cache=tmp_path, progress=lines.append)
    assert lines == ["Converting Tiny-Llama.F32.gguf to safetensors (once)"]


def test_conversion_prints_nothing(tiny_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    resolve(str(tiny_gguf), cache=tmp_path)
    assert capfd.readouterr() == ("", "")


def test_key_follows_bytes_not_names(tiny_gguf: Path, tmp_path: Path) -> None:
    copy, other = tmp_path / "copy.gguf", tmp_path / "other.gguf"
    shutil.copy(tiny_gguf, copy)
    write_gguf(other, scale=2.0)
    assert conversion_key(copy) == conversion_key(tiny_gguf)
    assert conversion_key(other) != conversion_key(tiny_gguf)


@pytest.mark.parametrize("library", sources.CONVERTERS)
def test_key_follows_the_versions(tiny_gguf: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, known = conversion_key(tiny_gguf), sources.version
    monkeypatch.setattr(sources, "version", lambda name: "0" if name == library else known(name))
    assert conversion_key(tiny_gguf) != before


def test_half_made_conversions_are_removed_and_not_used(tiny_gguf: Path, filled: Path, tmp_path: Path) -> None:
    key = conversion_key(tiny_gguf)
    leftover = tmp_path / f"{key}.staging-dead"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_convert", lambda _path, out: shutil.copytree(filled / key, out, dirs_exist_ok=True))
        found = resolve(str(tiny_gguf), cache=tmp_path)
    assert found.root == tmp_path / key
    assert sorted(path.name for path in tmp_path.iterdir()) == [key, f"{key}.lock"]


def test_a_conversion_that_fails_leaves_nothing(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_path: Path, out: Path) -> None:
        (out / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(sources, "_convert", fail)
    with pytest.raises(KeyboardInterrupt):
        resolve(str(tiny_gguf), cache=tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_damaged_conversion_is_made_again(tiny_gguf: Path, filled: Path, tmp_path: Path) -> None:
    key = conversion_key(tiny_gguf)
    shutil.copytree(filled / key, tmp_path / key)
    whole = (tmp_path / key / "model.safetensors").read_bytes()
    (tmp_path / key / "model.safetensors").write_bytes(whole[:-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_convert", lambda _path, out: shutil.copytree(filled / key, out, dirs_exist_ok=True))
        found = resolve(str(tiny_gguf), cache=tmp_path)
    assert (found.root / "model.safetensors").read_bytes() == whole


def test_concurrent_runs_convert_once(tiny_gguf: Path, filled: Path, tmp_path: Path) -> None:
    made: list[Path] = []

    def convert(_path: Path, out: Path) -> None:
        made.append(out)
        shutil.copytree(filled / conversion_key(tiny_gguf), out, dirs_exist_ok=True)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(4) as pool:
        patch.setattr(sources, "_convert", convert)
        found = list(pool.map(lambda _: resolve(str(tiny_gguf), cache=tmp_path).root, range(8)))
    assert len(made) == 1
    assert set(found) == {tmp_path / conversion_key(tiny_gguf)}


@pytest.mark.parametrize("share", [0.001, 0.3, 0.9])
def test_a_truncated_gguf_is_one_line(tiny_gguf: Path, tmp_path: Path, share: float) -> None:
    cut, cache = tmp_path / "cut.gguf", tmp_path / "cache"
    whole = tiny_gguf.read_bytes()
    cut.write_bytes(whole[: max(4, int(len(whole) * share))])
    with pytest.raises(CheckpointError) as caught:
        resolve(str(cut), cache=cache)
    assert "damaged or cut short" in one_line(caught.value)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []


def test_an_unknown_gguf_architecture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    write_gguf(path, architecture="nosuch")
    with pytest.raises(CheckpointError, match=r"cannot be converted .*nosuch"):
        resolve(str(path), cache=tmp_path / "cache")


def test_values_beyond_half_precision_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    write_gguf(path, scale=1e6)
    with pytest.raises(CheckpointError, match="half precision cannot"):
        resolve(str(path), cache=tmp_path / "cache")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\3\4 not a model")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        resolve(str(path), cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_folder_of_ggufs_says_which_file_to_give(tiny_gguf: Path) -> None:
    with pytest.raises(CheckpointError, match=r"give the GGUF file itself: Tiny-Llama\.F32\.gguf"):
        resolve(str(tiny_gguf.parent))


def test_a_cache_that_cannot_be_written_is_one_line(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError) as caught:
        resolve(str(tiny_gguf), cache=tmp_path / "file" / "cache")
    assert "set COLLAPSE_CACHE" in one_line(caught.value)


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), RuntimeError("I/O error: No space left on device (os error 28)")],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(
    error: Exception, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(OutputError) as caught:
        resolve(str(tiny_gguf), cache=tmp_path)
    assert "No space left" in one_line(caught.value) or "no space left" in one_line(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [f"{conversion_key(tiny_gguf)}.lock"]


@pytest.mark.parametrize(
    "spec",
    ["./org/name", "/org/name", "org/name/more", "../org/name", "name", "org/model.gguf", "org/a b", "~/name", ""],
)
@pytest.mark.usefixtures("no_network")
def test_what_looks_like_a_path_never_reaches_the_network(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(CheckpointError, match="no such model"):
        resolve(spec)


@pytest.mark.usefixtures("no_network")
def test_a_local_path_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org").mkdir()
    write_directory(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name").label == "name"


def test_a_hub_id_fetches_weights_and_text_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def download(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(write_directory(tmp_path / "0123abcd"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve("org/name").label == "org/name"
    assert asked["name"] == "org/name"
    assert asked["allow_patterns"] == ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (errors.GatedRepoError, "gated"),
        (errors.RepositoryNotFoundError, "no such model on the hub"),
        (errors.OfflineModeIsEnabled, "the hub cannot be reached (OfflineModeIsEnabled)"),
        (errors.LocalEntryNotFoundError, "the hub cannot be reached (LocalEntryNotFoundError)"),
    ],
)
def test_hub_errors_are_one_line(kind: type[Exception], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_name: str, **_options: object) -> str:
        raise kind.__new__(kind)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        resolve("org/name")
    assert expected in one_line(caught.value)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"COLLAPSE_CACHE": "a", "XDG_CACHE_HOME": "b"}, Path("a")),
        ({"XDG_CACHE_HOME": "b"}, Path("b/collapse")),
        ({"HOME": "/c"}, Path("/c/.cache/collapse")),
    ],
)
def test_where_conversions_are_kept(variables: dict[str, str], expected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLLAPSE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == expected


def test_the_source_file_is_never_touched(tiny_gguf: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copy(tiny_gguf, copy)
    before = (copy.read_bytes(), copy.stat().st_mtime_ns)
    resolve(str(copy), cache=tmp_path / "cache")
    assert (copy.read_bytes(), copy.stat().st_mtime_ns) == before
