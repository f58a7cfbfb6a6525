"""Checks an output directory against its source: the files byte for byte, and the model by running it."""

from collapse.verify.job import Settings
from collapse.verify.run import verify, with_blame

__all__ = ["Settings", "verify", "with_blame"]
