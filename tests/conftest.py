"""A small export and its source, which the tests of writing, verifying and probing share."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import collapse.pipeline  # noqa: F401  (imports what every export needs, before the objects of imports are counted)
from collapse.checkpoint import Checkpoint
from collapse.plan import Plan
from tests.command import Command
from tests.exported import EMBEDDING, KEPT
from tests.tiny import erase, export, plan_for, tiny_llama, vocabulary
from tests.traces import remember_traces

remember_traces()
gc.collect()
gc.freeze()  # exports collect garbage on purpose; without this each would walk all that the imports made


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what commands keep by default away from the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLAPSE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "source", extra={"old.bias": torch.arange(1.0, 6.0)})


@pytest.fixture(scope="module")
def plan(llama: Checkpoint) -> Plan:
    return plan_for(llama, erase("old.bias"), vocabulary(KEPT, EMBEDDING))


@pytest.fixture(scope="module")
def exported(llama: Checkpoint, plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(llama, plan, tmp_path_factory.mktemp("exported") / "out").root


@pytest.fixture
def out(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "out"))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)
