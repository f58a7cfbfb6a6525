"""The sequences that a search fits to, chooses by and judges by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from collapse.heal.texts import starts
from collapse.passes import shrink_task
from collapse.sequences import apart

BLOCK = 100  # tokens, of which 128 do not fit into one


def blocks(count: int, first: int = 0) -> tuple[str, ...]:
    return tuple(" ".join(str(first + number * BLOCK + n) for n in range(BLOCK)) + " " for number in range(count))


def encode(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def context(config: dict[str, int], held_out: int) -> Any:
    texts = SimpleNamespace(calibration=blocks(64), held_out=blocks(held_out, 10**6))
    return SimpleNamespace(texts=texts, related=blocks(8, 10**7), checkpoint=SimpleNamespace(config=config))


@pytest.fixture(autouse=True)
def spelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrink_task, "encoder", lambda checkpoint: encode)


def test_no_two_sequences_that_judge_share_text() -> None:
    found = shrink_task.texts_of(context({}, 21))
    assert found is not None and found.held_out.shape == (10, 128)
    assert found.held_out.unique().numel() == found.held_out.numel()
    assert starts(blocks(21), encode, 128, 512).unique().numel() == 10 * 128


def test_sequences_apart_are_spread_evenly() -> None:
    assert [ids[0] for ids in apart(blocks(21), 5, encode, 128)] == [0, 400, 800, 1200, 1600]
    assert apart(blocks(1), 5, encode, 128) == [] == apart((), 5, encode, 128)


def test_no_sequence_is_longer_than_the_model_takes() -> None:
    found = shrink_task.texts_of(context({"n_positions": 96}, 8))
    assert found is not None
    assert [part.shape[1] for part in (found.fitting, found.choosing, found.held_out)] == [96, 96, 96]
