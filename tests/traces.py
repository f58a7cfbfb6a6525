"""Remembers what was traced, by the config: most tests trace the same few tiny models, and a trace takes seconds."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps

from transformers import PreTrainedConfig

from collapse.program import Program
from collapse.trace import trace

MOST = 96  # programs of tiny models
UNREAD = ("_name_or_path", "transformers_version")  # a trace says nothing of where its config came from
UNWRITTEN = ("_attn_implementation", "_experts_implementation")  # what a config does not write, but a trace follows

Trace = Callable[..., Program]


afresh = trace  # for tests of what tracing itself does to others


def remember_traces() -> None:
    """Let all of collapse trace with a memory, in this process: whoever has imported `trace`, and whoever will."""
    memory = remembering(trace)
    for module in list(sys.modules.values()):
        if getattr(module, "trace", None) is trace and module.__name__ != __name__:
            module.__dict__["trace"] = memory


def remembering(trace: Trace) -> Trace:
    """Return `trace` with a memory: a program is never changed, only copied, so that one may serve many tests."""
    known: OrderedDict[str, Program] = OrderedDict()

    @wraps(trace)
    def traced(config: PreTrainedConfig, **sizes: int | bool) -> Program:
        key = _key(config, sizes)
        if key not in known:
            known[key] = trace(config, **sizes)
        known.move_to_end(key)
        if len(known) > MOST:
            known.popitem(last=False)
        return known[key]

    return traced


def _key(config: PreTrainedConfig, sizes: dict[str, int | bool]) -> str:
    fields = {name: value for name, value in config.to_dict().items() if name not in UNREAD}
    unwritten = {name: str(getattr(config, name, None)) for name in UNWRITTEN}
    return repr((type(config).__qualname__, sorted(fields.items()), unwritten, sorted(sizes.items())))
