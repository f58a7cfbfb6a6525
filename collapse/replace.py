"""Writes one file in one step: whoever reads it sees the old content or the new, never a part."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from collapse.errors import OutputError


def replace_file(path: Path, content: bytes) -> None:
    """Give `path` the content, whatever it held; raises `OutputError` where that fails, and leaves nothing behind.

    A link stays: the file that it leads to gets the content. A pipe or a device, such as /dev/stdout, is written to.
    """
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(content)
            return
        draft.write_bytes(content)
        draft.replace(target)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise OutputError(f"cannot be written ({error.strerror})", where=str(path), fix="name another file") from None
