"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version


def machine() -> dict[str, str | int]:
    """Return processors, system and the versions of Python, torch and transformers."""
    return {
        "cpus": os.cpu_count() or 0,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }
