"""What tests of the verifier say about the shared export of `conftest.py`."""

from __future__ import annotations

from collapse.verdict import Check, Verdict
from collapse.verify import Settings

EMBEDDING = "model.embed_tokens.weight"
KEPT = [0, 1, 2, *range(5, 40), 63]
WEIGHTS = "model.safetensors"
SMALL = Settings(prompts=2, new_tokens=4, cached=2, decode=2, padded=3)


def check(verdict: Verdict, name: str) -> Check:
    return next(found for found in verdict.checks if found.name == name)


def details(verdict: Verdict) -> str:
    return "\n".join(f"{found.name}: {found.detail}" for found in verdict.failures)
