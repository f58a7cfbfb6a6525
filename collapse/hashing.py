"""SHA-256 of many files at once, in threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from collapse.canonical import file_digest

WORKERS = min(4, os.cpu_count() or 1)


def file_digests(paths: Sequence[Path]) -> list[str]:
    """Return the SHA-256 (hex) of each file, several files at a time, in constant memory."""
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(file_digest, paths))
