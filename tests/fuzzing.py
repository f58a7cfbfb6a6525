"""Random and damaged inputs for every reader of files from elsewhere, and what each reader may do with them.

A reader returns, or raises a `CollapseError` of one line. Anything else, a file opened outside its folder, or more
than ten seconds is a fault.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import strategies as st

from collapse.checkpoint import DTYPE_BITS, INDEX, SINGLE, Checkpoint
from collapse.corpus import read_corpus, split
from collapse.errors import CollapseError
from collapse.plan import IndexSet
from collapse.rewrite.tokenizer import narrow_side_files
from collapse.schema import InputSchema, load_schema
from collapse.sequences import encoder
from collapse.tokenizer import TokenizerFile
from collapse.trace import load_config
from tests.small_tokenizers import tokenizer_data

SECONDS = 10
TENSOR = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
CONFIG = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16, "rope_theta": 10000.0,
    "eos_token_id": [1, 2], "text_config": {"vocab_size": 8},
    "id2label": {"0": "a"},
    "rope_scaling": {"rope_type": "default"}, "layer_types": ["full_attention"], "dtype": "float32",
}  # fmt: skip
TOKENIZER = tokenizer_data("byte-level")

# Values.

numbers = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([10**9, 10**12, 2**31, 2**63, 2**64, 10**30, -(2**63), 10**400]),
    st.sampled_from([float("nan"), float("inf"), -0.0, 1e308, 0.5]),
)
words = st.one_of(
    st.sampled_from(
        ["", "..", "/etc/passwd", "../x", "a\\b", "a\0b", "\ud800", "\x1b[2J", "é", "BF16", "F4", "w", SINGLE]
    ),
    st.text(max_size=8),
)
leaves = st.one_of(st.none(), st.booleans(), numbers, words)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(words, inner, max_size=4)),
    max_leaves=8,
)


def changed(value: Any, path: list[int], new: Any) -> Any:
    """Return a copy of nested JSON in which the part that `path` leads to is `new`; None takes it out."""
    if not path or not isinstance(value, dict | list) or not value:
        return new
    if isinstance(value, list):
        at = path[0] % len(value)
        return [changed(inner, path[1:], new) if at == number else inner for number, inner in enumerate(value)]
    at = path[0] % len(value)
    return {
        key: changed(inner, path[1:], new) if at == number else inner
        for number, (key, inner) in enumerate(value.items())
    }


paths = st.lists(st.integers(0, 1 << 16), min_size=1, max_size=4)


@st.composite
def damaged(draw: st.DrawFn, whole: Any) -> bytes:
    """JSON text near `whole`: with other parts, of another kind, or with broken bytes."""
    value = whole
    for _ in range(draw(st.integers(0, 3))):
        value = changed(value, draw(paths), draw(values))
    text = json.dumps(draw(values) if draw(st.integers(0, 9)) == 0 else value)
    return draw(broken(text.encode()))


@st.composite
def broken(draw: st.DrawFn, raw: bytes) -> bytes:
    """Bytes with a part gone, doubled or replaced, more often than not just as they are."""
    kind = draw(st.integers(0, 9))
    start = draw(st.integers(0, len(raw)))
    stop = min(len(raw), start + draw(st.integers(0, 12)))
    if kind == 0:
        return raw[:start]
    if kind == 1:
        return raw[:stop] + raw[start:]
    if kind == 2:
        return raw[:start] + draw(st.binary(max_size=8)) + raw[stop:]
    return b"[" * draw(st.sampled_from([70, 100_000])) + raw if kind == 3 else raw


names = st.one_of(words, st.sampled_from([SINGLE, "model-00001-of-00001.safetensors", "../out.safetensors", "link"]))
indexes = damaged({"metadata": {"total_size": 8}, "weight_map": {"w": SINGLE}}) | st.builds(
    lambda found: json.dumps({"weight_map": found}).encode(), st.dictionaries(words, names | values, max_size=3)
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(sorted(DTYPE_BITS)) | values,
        "shape": st.lists(numbers, max_size=4) | values,
        "data_offsets": st.lists(st.integers(0, 16), min_size=2, max_size=2) | values,
    }
)
headers = damaged(json.loads(TENSOR)) | st.builds(
    lambda found: json.dumps(found).encode(), st.dictionaries(words, entries | values, max_size=3)
)
lengths = st.none() | st.sampled_from([0, 1, 7, 2**31, 2**63, 2**64 - 1]) | st.integers(0, 200)
configs = damaged(CONFIG)
tokenizers = damaged(TOKENIZER)
NAMES = {
    "added_tokens_decoder": {"0": {"content": "<eos>"}, "1": {"content": "<pad>"}},
    "eos_token": "<eos>", "pad_token": {"content": "<pad>"}, "additional_special_tokens": ["<eos>"],
    "extra_special_tokens": {"x": "<pad>"}, "model_max_length": 10**30,
}  # fmt: skip
sides = damaged(CONFIG | {"vocab_size": 400, "bad_words_ids": [[1]], "forced_decoder_ids": [[0, 1]]})
naming = damaged(NAMES)
schemas = damaged({"type": "log", "max_tokens": 64, "max_line_length": 80, "workload": {"prompt": 4, "new": 4}})
corpora = st.tuples(
    st.sampled_from(["a.log", "a.txt", "a.json", "a.jsonl", "a.log.gz", "a.jsonl.gz"]),
    st.one_of(
        st.binary(max_size=200),
        st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")),
        damaged({"text": "line", "n": [1]}),
        st.sampled_from([b"x" * 100_000, b"line\n" * 1000, b"\0", b"\xff\xfea\0", b"\xef\xbb\xbf{}", b"\r\n\r"]),
    ),
    st.booleans(),
)

# Readers.


def write_model(root: Path, **files: bytes) -> Path:
    """Write a small model whose files, named with `_` for `.`, are the given ones."""
    root.mkdir(exist_ok=True)
    weights = len(TENSOR).to_bytes(8, "little") + TENSOR + bytes(8)
    usual = {"config.json": json.dumps(CONFIG).encode(), SINGLE: weights}
    for name, raw in (usual | files).items():
        (root / name).write_bytes(raw)
    return root


def read_index(root: Path, raw: bytes) -> None:
    Checkpoint.open(write_model(root, **{INDEX: raw}))


def read_header(root: Path, raw: bytes, length: int | None = None) -> None:
    size = len(raw) if length is None else length
    write_model(root, **{SINGLE: size.to_bytes(8, "little") + raw + bytes(8)})
    for info in Checkpoint.open(root).tensors.values():
        info.name.encode()


def read_config(root: Path, raw: bytes) -> None:
    load_config(Checkpoint.open(write_model(root, **{"config.json": raw})))


def read_tokenizer(root: Path, raw: bytes) -> None:
    checkpoint = Checkpoint.open(write_model(root, **{"tokenizer.json": raw}))
    with contextlib.suppress(CollapseError):
        encoder(checkpoint)("abc <eos>")
    file = TokenizerFile.read(root)
    tuple(file.named_ids())
    size = max(file.strings, default=0) + 1
    narrow_side_files({"tokenizer.json": raw}, IndexSet.of(range(min(size, 1 << 12))), size)


def read_sides(root: Path, config: bytes, names: bytes) -> None:
    raw = json.dumps(TOKENIZER).encode()
    rows = max(TokenizerFile.from_bytes(raw).strings) + 1
    kept = IndexSet.of(range(rows - 1))
    with contextlib.suppress(CollapseError):
        narrow_side_files({"tokenizer.json": raw, "added_tokens.json": names}, kept, rows)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        files = {"tokenizer.json": raw, "config.json": config, "generation_config.json": config, name: names}
        narrow_side_files(files, kept, rows)


def read_schema(root: Path, raw: bytes) -> None:
    (root / "schema.json").write_bytes(raw)
    load_schema(root / "schema.json")
    load_schema(raw.decode("utf-8", "surrogateescape"))


def read_text(root: Path, given: tuple[str, bytes, bool]) -> None:
    name, raw, packed = given
    (root / name).write_bytes(gzip.compress(raw, 1) if packed and name.endswith(".gz") else raw)
    corpus = read_corpus([root / name], InputSchema(type="log"), "text" if ".jsonl" in name else None)
    with contextlib.suppress(CollapseError):  # most are too short
        split(corpus)


READERS: dict[str, tuple[Callable[..., None], tuple[st.SearchStrategy[Any], ...]]] = {
    "index": (read_index, (indexes,)),
    "header": (read_header, (headers, lengths)),
    "config": (read_config, (configs,)),
    "tokenizer": (read_tokenizer, (tokenizers,)),
    "sides": (read_sides, (sides, naming)),
    "schema": (read_schema, (schemas,)),
    "corpus": (read_text, (corpora,)),
}

# What a reader may do.


@dataclass
class Watch:
    """Notes every file that is opened outside a folder while it is on; an audit hook can never be taken out again."""

    root: str = ""
    strangers: list[str] = field(default_factory=list)
    installed: bool = False

    def install(self) -> None:
        if not self.installed:
            sys.addaudithook(self._note)
            self.installed = True

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if (
            self.root
            and event in {"open", "os.listdir", "os.scandir"}
            and isinstance(arguments[0], str | bytes | os.PathLike)
        ):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not path.startswith((self.root, *LIBRARIES)):
                self.strangers.append(path)
        elif self.root and event in {
            "socket.connect",
            "socket.getaddrinfo",
            "subprocess.Popen",
            "os.system",
            "pickle.find_class",
        }:
            self.strangers.append(event)


LIBRARIES = (
    *(os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, Path(__file__).parents[1])),
    *("/proc", "/sys"),
)
WATCH = Watch()


@contextmanager
def limits(root: Path) -> Iterator[None]:
    """Let no reader open a file outside `root` but a library's own, nor run for more than ten seconds."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {SECONDS} seconds")

    WATCH.install()
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    WATCH.strangers.clear()
    WATCH.root = os.path.realpath(root)
    try:
        yield
    finally:
        WATCH.root = ""
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert not WATCH.strangers, WATCH.strangers


def attempt(kind: str, root: Path, *given: Any) -> str:
    """Give an input to its reader; return "read" or "refused". Everything else is an error of ours."""
    reader, _ = READERS[kind]
    for path in root.iterdir():
        path.unlink()
    try:
        with limits(root):
            reader(root, *given)
    except CollapseError as error:
        text = str(error)
        assert text.isprintable() and len(text) < 3000, repr(text)
        return "refused"
    return "read"
