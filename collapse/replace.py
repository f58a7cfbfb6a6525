"""Writes one file in one step: whoever reads it sees the old content or the new, never a part."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from collapse.errors import OutputError


def replace_file(path: Path, content: bytes) -> None:
    """Give `path` the content, whatever it held; raises `OutputError` where that fails, and leaves nothing behind."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise OutputError(f"cannot be written ({error.strerror})", where=str(path), fix="name another file") from None
