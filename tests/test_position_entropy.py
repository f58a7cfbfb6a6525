"""Position entropy: gaps, expectation, prefixes, threshold fitting."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collapse.analysis.position_entropy import Threshold, fit_threshold, gap_entropy, measure, prefix_entropy
from collapse.errors import SchemaError
from collapse.models.position_bias import (
    EntropySettings,
    digit_count,
    expected,
    from_digits,
    novelty_entropy,
    position_entropy,
    recalled,
    recurrence_gaps,
    to_digits,
)

FEW = settings(max_examples=25, deadline=None)
SMALL = EntropySettings(window=64, recall=4, prior=2)
TOKENS = st.lists(st.integers(0, 6), min_size=1, max_size=40)


def slow_gaps(tokens: list[int]) -> list[int]:
    last: dict[int, int] = {}
    gaps = []
    for place, token in enumerate(tokens):
        gaps.append(place - last[token] if token in last else 0)
        last[token] = place
    return gaps


def slow_expected(tokens: list[int], recall: int) -> list[bool]:
    pairs = [(tokens[place - 1] if place else None, token) for place, token in enumerate(tokens)]
    result = [False] * len(tokens)
    for gaps in (slow_gaps(tokens), slow_gaps(pairs)):  # type: ignore[arg-type]
        for place, gap in enumerate(gaps):
            result[place] |= gap > 0 and gap in gaps[max(0, place - recall) : place]
    return result


@FEW
@given(TOKENS)
def test_gaps_equal_the_definition(tokens: list[int]) -> None:
    assert recurrence_gaps(torch.tensor([tokens]))[0].tolist() == slow_gaps(tokens)


@FEW
@given(TOKENS, st.integers(1, 5))
def test_expected_equals_the_definition(tokens: list[int], recall: int) -> None:
    codes = [token + 1 for token in tokens]
    assert expected(torch.tensor([codes]), recall)[0].tolist() == slow_expected(codes, recall)


def test_first_occurrences_are_never_recalled() -> None:
    assert not recalled(torch.zeros(1, 9, dtype=torch.int64), 4).any()


@FEW
@given(TOKENS, st.data())
def test_empty_places_do_not_count(tokens: list[int], data: st.DataObject) -> None:
    plain = position_entropy(torch.tensor([tokens]) + 1, SMALL)[0]
    padded: list[int] = []
    for token in tokens:
        padded += [0] * data.draw(st.integers(0, 2)) + [token + 1]
    entropy = position_entropy(torch.tensor([padded]), SMALL)[0]
    filled = torch.tensor(padded) > 0
    assert torch.equal(entropy[filled], plain)
    assert not entropy[~filled].any()


@FEW
@given(TOKENS, TOKENS)
def test_a_prefix_does_not_see_what_follows(tokens: list[int], more: list[int]) -> None:
    alone = prefix_entropy(tokens, SMALL)
    assert torch.equal(prefix_entropy(tokens + more, SMALL)[: len(tokens)], alone)


@FEW
@given(TOKENS)
def test_names_of_tokens_do_not_matter(tokens: list[int]) -> None:
    renamed = [1_000_000_000 - 7 * token for token in tokens]
    assert torch.equal(prefix_entropy(tokens, SMALL), prefix_entropy(renamed, SMALL))


def test_formula_at_a_known_share() -> None:
    entropy = novelty_entropy(torch.tensor(6), torch.tensor(14), SMALL)  # share (6 + 2) / (14 + 2)
    assert float(entropy) == pytest.approx(math.log(2) + 0.5 * math.log(4) + 0.5 * math.log(64), rel=1e-6)


def test_more_expected_gaps_mean_less_entropy() -> None:
    counts = torch.arange(0, 1025)
    entropy = novelty_entropy(counts, torch.tensor(1024), EntropySettings())
    assert bool((entropy.diff() < 0).all())


def test_repeated_lines_are_lower_than_random_tokens() -> None:
    generator = torch.Generator().manual_seed(3)
    line = torch.randint(0, 500, (24,), generator=generator)
    lines = line.repeat(43)[:1024]
    lines[::24] = torch.randint(0, 500, (len(lines[::24]),), generator=generator)
    noise = torch.randint(0, 500, (1024,), generator=generator)
    low, high = measure(lines), measure(noise)
    assert max(low.novelty_peak) < min(high.novelty)
    assert low.gap[0] < high.gap[0]


def test_plain_gap_entropy_is_that_of_the_histogram() -> None:
    assert gap_entropy([1, 2, 3]) == 0.0
    assert gap_entropy([5, 5, 5, 5]) == 0.0
    assert gap_entropy([1, 1, 2, 3, 2]) == pytest.approx(math.log(2))  # gaps 1 and 2, once each


def test_windows_are_whole_and_consecutive() -> None:
    facts = measure(np.arange(25) % 5, window=10)
    assert len(facts.gap) == len(facts.novelty) == len(facts.novelty_peak) == 2
    assert facts.settings.window == 10
    assert len(measure([1, 2, 3], window=10).gap) == 1


@pytest.mark.parametrize("tokens", [[], [[1, 2]], [-1, 2]])
def test_measure_refuses_what_is_no_sequence_of_ids(tokens: list[int]) -> None:
    with pytest.raises(SchemaError, match="position entropy"):
        measure(tokens)


@FEW
@given(st.lists(st.integers(0, 70_000), min_size=1, max_size=9))
def test_digits_are_exact_in_every_cache_dtype(ids: list[int]) -> None:
    codes = torch.tensor([ids])
    digits = digit_count(70_000)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.equal(from_digits(to_digits(codes, digits, dtype)), codes)


@pytest.mark.parametrize(("size", "digits"), [(2, 1), (255, 1), (256, 2), (65_535, 2), (65_536, 3)])
def test_digit_count_has_room_for_every_code_and_none(size: int, digits: int) -> None:
    assert digit_count(size) == digits


def test_threshold_of_separated_groups_is_in_the_middle() -> None:
    assert fit_threshold([1.0, 2.0], [4.0, 9.0]) == Threshold(3.0, 1.0, 0.0, 2, 2)


def test_threshold_of_overlapping_groups_states_its_error() -> None:
    fitted = fit_threshold([1.0, 2.0, 8.0], [7.0, 9.0, 10.0])
    assert (fitted.value, fitted.error) == (4.5, pytest.approx(1 / 6))


def test_threshold_of_groups_the_wrong_way_round_is_no_better_than_one_sided() -> None:
    assert fit_threshold([5.0, 6.0], [1.0, 2.0]).error == 0.5


@FEW
@given(st.lists(st.floats(-9, 9), min_size=1, max_size=9), st.lists(st.floats(-9, 9), min_size=1, max_size=9))
def test_no_threshold_errs_less(low: list[float], high: list[float]) -> None:
    fitted = fit_threshold(low, high)

    def wrong(cut: float) -> int:
        return sum(value > cut for value in low) + sum(value <= cut for value in high)

    assert fitted.error * (len(low) + len(high)) == pytest.approx(wrong(fitted.value))
    assert all(wrong(fitted.value) <= wrong(cut) for cut in (*low, *high, -10.0, 10.0))


@pytest.mark.parametrize("groups", [([], [1.0]), ([1.0], []), ([1.0], [float("nan")])])
def test_threshold_refuses_groups_without_values(groups: tuple[list[float], list[float]]) -> None:
    with pytest.raises(SchemaError, match="threshold group"):
        fit_threshold(*groups)
