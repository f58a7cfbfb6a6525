"""Give memory back between two large models, so that only one of them counts at a time."""

from __future__ import annotations

import ctypes
import gc
import sys


def release_memory() -> None:
    """Collect cycles, in which models hold themselves, and return freed pages to the system.

    glibc keeps freed weights in its heap: without trimming, the next model comes on top of the last one.
    """
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
