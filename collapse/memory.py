"""Give memory back between two large models, so that only one of them counts at a time."""

from __future__ import annotations

import ctypes
import gc
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def release_memory() -> None:
    """Collect cycles, in which models hold themselves, and return freed pages to the system.

    glibc keeps freed weights in its heap: without trimming, the next model comes on top of the last one.
    """
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


def map_large_blocks() -> None:
    """Make glibc give every block of 1 MiB or more a mapping of its own, which goes back when it is freed.

    By default it raises that bound as large blocks are freed, and then keeps freed weights in its heap: an export of
    SmolLM2 peaked at 3.1 times the fp32 weights that way, and at 2.6 times this way, for an eighth more time. It
    holds for the whole process, so only the command line asks for it.
    """
    if sys.platform == "linux":
        set_option = getattr(ctypes.CDLL(None), "mallopt", None)
        if set_option is not None:
            for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
                set_option(option, 1 << 20)
