"""Dead-code elimination for language models: declare the inputs, erase what they cannot reach, prove it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collapse.options import Options
    from collapse.pipeline import Result, export, make_plan
    from collapse.runtime.graph import load_graph
    from collapse.runtime.load import load
    from collapse.schema import InputSchema
    from collapse.survey import influence

__version__ = "0.1.0"
__all__ = ["InputSchema", "Options", "Result", "export", "influence", "load", "load_graph", "make_plan"]

_HOMES = {
    "InputSchema": "collapse.schema",
    "Options": "collapse.options",
    "Result": "collapse.pipeline",
    "export": "collapse.pipeline",
    "influence": "collapse.survey",
    "load": "collapse.runtime.load",
    "load_graph": "collapse.runtime.graph",
    "make_plan": "collapse.pipeline",
}


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when something needs them: `collapse schema` starts at once."""
    if name not in _HOMES:
        raise AttributeError(f"module 'collapse' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
