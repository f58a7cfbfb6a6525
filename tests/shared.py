"""The models and texts beside the checkout, for tests that want real ones; those tests say so when they skip."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder ../shared with real models is not there")
