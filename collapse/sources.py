"""What a user may call a model: a directory, a GGUF file, or a hub id. All three end as a local `Checkpoint`.

A GGUF file is converted to safetensors once and kept in a cache, keyed by its bytes and by the versions that
convert it. Nothing that looks like a path is ever looked up on the network.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import filelock
import torch

from collapse.canonical import digest, file_digest
from collapse.checkpoint import Checkpoint
from collapse.errors import CheckpointError, CollapseError, OutputError
from collapse.trace import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[str], None]

GGUF_MAGIC = b"GGUF"
CONVERSION = 1  # raised whenever `_convert` would write other bytes for the same file and libraries
CONVERTERS = ("gguf", "safetensors", "tokenizers", "torch", "transformers")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


def resolve(spec: str, *, cache: Path | None = None, progress: Progress | None = None) -> Checkpoint:
    """Open the model that `spec` names.

    Args:
        spec: a local model directory, a `.gguf` file, or a hub id `organisation/name`. A local path wins.
        cache: where converted GGUF files are kept; by default `cache_directory()`.
        progress: called with one line before each long step.

    Raises:
        CheckpointError: there is no such model, it is damaged, or it cannot be fetched.
        OutputError: the cache cannot be written.
    """
    path = Path(spec).expanduser()
    tell = progress or _silent
    if spec and path.is_dir():
        return _open_directory(path)
    if path.is_file():
        return _open_gguf(path, cache or cache_directory(), tell)
    if HUB_ID.fullmatch(spec) and not spec.endswith(".gguf"):
        return _open_hub(spec, tell)
    raise CheckpointError("no such model", where=spec, fix="give a model directory, a .gguf file or a hub id")


def cache_directory() -> Path:
    """Return where conversions are kept: `$COLLAPSE_CACHE`, or `collapse` under the user's cache directory."""
    chosen = os.environ.get("COLLAPSE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "collapse"


def conversion_key(path: Path) -> str:
    """Return the name under which the conversion of `path` is kept: a digest of its bytes and the versions."""
    versions = {name: version(name) for name in CONVERTERS}
    return digest({"file": file_digest(path), "conversion": CONVERSION, "versions": versions})[:32]


def _silent(_line: str) -> None:
    pass


def _open_directory(path: Path) -> Checkpoint:
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs and not (path / "config.json").is_file():
        raise CheckpointError("no config.json", where=str(path), fix=f"give the GGUF file itself: {ggufs[0].name}")
    return Checkpoint.open(path)


def _open_gguf(path: Path, cache: Path, tell: Progress) -> Checkpoint:
    _check_magic(path)
    try:
        target = cache / conversion_key(path)
        cache.mkdir(parents=True, exist_ok=True)
        converted = _reopen(target)
        if converted is None:
            with filelock.FileLock(cache / f"{target.name}.lock"):
                converted = _reopen(target) or _fill(path, target, tell)
    except OSError as error:
        raise OutputError(
            f"the cache cannot be written ({error.strerror or error})", where=str(cache), fix="set COLLAPSE_CACHE"
        ) from None
    return replace(converted, label=path.stem)


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as stream:
            magic = stream.read(len(GGUF_MAGIC))
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", where=str(path)) from None
    if magic != GGUF_MAGIC:
        raise CheckpointError("not a GGUF file", where=str(path), fix="give a model directory or a .gguf file")


def _reopen(target: Path) -> Checkpoint | None:
    """Return a conversion made earlier, or None where there is none or it was damaged since."""
    try:
        return Checkpoint.open(target) if target.is_dir() else None
    except CollapseError:
        return None


def _fill(path: Path, target: Path, tell: Progress) -> Checkpoint:
    """Convert `path` into `target` by way of a staging folder. The caller holds the lock of `target`."""
    for leftover in target.parent.glob(f"{target.name}.staging-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=f"{target.name}.staging-", dir=target.parent))
    try:
        tell(f"Converting {path.name} to safetensors (once)")
        _convert(path, staging)
        _flush(staging)
        if target.exists():
            shutil.rmtree(target)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Checkpoint.open(target)


def _convert(path: Path, out: Path) -> None:
    """Write model and tokenizer of a GGUF file to `out`, every weight rounded to half precision."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = str(path.parent.resolve()), path.name
    try:
        # One of the bars asks nobody whether it may show itself, hence the redirection.
        with quiet(), contextlib.redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=name, dtype=torch.float16, quantization_config=GgufConfig(dequantize=True)
            )
            _refuse_overflow(path, model)
            model.save_pretrained(out)
            del model  # 2 bytes a parameter, before the tokenizer takes its share
            AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
    except CollapseError:
        raise
    except OSError as error:
        if error.errno is None:  # transformers raises bare OSErrors for what it cannot find in a model
            raise _gguf_problem(path, error) from None
        raise
    except Exception as error:  # the readers raise many kinds on a damaged file
        raise _gguf_problem(path, error) from None


def _refuse_overflow(path: Path, model: PreTrainedModel) -> None:
    for name, tensor in model.state_dict().items():
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{name} holds values that half precision cannot", where=str(path), fix="give a safetensors checkpoint"
            )


def _gguf_problem(path: Path, error: Exception) -> CollapseError:
    """Say whether the file is damaged, the disk full, or the model of a kind that transformers cannot convert."""
    if "os error 28" in str(error) or "os error 27" in str(error):  # safetensors words ENOSPC and EFBIG like this
        return OutputError("no space left for the conversion", where="cache", fix="free some or set COLLAPSE_CACHE")
    from gguf import GGUFReader

    try:
        GGUFReader(path)
    except Exception:
        return CheckpointError("the GGUF file is damaged or cut short", where=str(path), fix="fetch it again")
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return CheckpointError(f"cannot be converted ({reason})", where=str(path), fix="give a safetensors checkpoint")


def _flush(folder: Path) -> None:
    """Force the files to disk, so that the name never outlives a power cut that the bytes did not."""
    for file in sorted(folder.iterdir()):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())


def _open_hub(name: str, tell: Progress) -> Checkpoint:
    from huggingface_hub import snapshot_download

    tell(f"Fetching {name}")
    try:
        with quiet():
            folder = snapshot_download(name, allow_patterns=list(HUB_FILES), max_workers=2)
    except Exception as error:  # its errors share no base class
        raise _hub_problem(name, error) from None
    return replace(Checkpoint.open(folder), label=name)


def _hub_problem(name: str, error: Exception) -> CheckpointError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return CheckpointError("the model is gated", where=name, fix="accept its terms and log in with `hf auth login`")
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointError("no such local path, and no such model on the hub", where=name, fix="check the spelling")
    kind = type(error).__name__
    return CheckpointError(
        f"no such local path, and the hub cannot be reached ({kind})", where=name, fix="give a local directory"
    )
