"""Bounds on means and ratios: closed forms, exact expectations, and what must hold of any bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import variance

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, hypergeom

from collapse.certify.betting import BETS, SHARES, log_capital, ratio_upper
from collapse.certify.bounds import (
    betting,
    betting_p,
    clopper_pearson,
    empirical_bernstein,
    hoeffding_bentkus,
    hoeffding_bentkus_p,
)

Bound = Callable[[np.ndarray, float], float]
BOUNDS: dict[str, Bound] = {
    "betting": betting,
    "empirical-bernstein": empirical_bernstein,
    "hoeffding-bentkus": lambda values, delta: hoeffding_bentkus(float(np.mean(values)), len(values), delta),
    "clopper-pearson": lambda values, delta: clopper_pearson(int(np.sum(values > 0)), len(values), delta),
}
SETTINGS = settings(max_examples=60, deadline=None)
ANY = [name for name in BOUNDS if name != "clopper-pearson"]  # of values between 0 and 1 too
units = st.lists(st.floats(0, 1), min_size=1, max_size=60).map(np.array)


def coins(hits: int, size: int) -> np.ndarray:
    return np.r_[np.ones(hits), np.zeros(size - hits)]


# --- closed forms --------------------------------------------------------------------------------------


def test_bounds_without_a_hit_are_the_closed_form():
    for size in (1, 20, 300):
        for bound in (clopper_pearson(0, size, 0.05), hoeffding_bentkus(0.0, size, 0.05)):
            assert bound == pytest.approx(1 - 0.05 ** (1 / size), abs=1e-9)


def test_bounds_at_the_ends():
    assert clopper_pearson(0, 0, 0.05) == clopper_pearson(7, 7, 0.05) == 1.0
    assert hoeffding_bentkus(0.0, 0, 0.05) == hoeffding_bentkus(1.0, 9, 0.05) == 1.0
    assert empirical_bernstein(np.zeros(1), 0.05) == empirical_bernstein(np.ones(9), 0.05) == 1.0
    assert betting(np.zeros(1), 0.05) == betting(np.ones(9), 0.05) == betting(np.zeros(0), 0.05) == 1.0


def test_hoeffding_bentkus_is_the_smaller_of_its_two_terms():
    # A quarter of 40 coins against one half: ten or fewer heads, and the divergence by its definition.
    bentkus = math.e * sum(math.comb(40, heads) for heads in range(11)) / 2**40
    hoeffding = math.exp(-40 * (0.25 * math.log(0.5) + 0.75 * math.log(1.5)))
    assert bentkus < hoeffding
    assert hoeffding_bentkus_p(0.25, 40, 0.5) == pytest.approx(bentkus, rel=1e-12)
    # A mean that is no multiple of 1/n is rounded up by Bentkus; then Hoeffding's term can win.
    assert hoeffding_bentkus_p(0.245, 40, 0.5) == pytest.approx(bentkus, rel=1e-12)
    bentkus, hoeffding = math.e * (1 + 8) / 256, math.exp(-8 * (0.01 * math.log(0.02) + 0.99 * math.log(1.98)))
    assert hoeffding < bentkus
    assert hoeffding_bentkus_p(0.01, 8, 0.5) == pytest.approx(hoeffding, rel=1e-12)


def test_the_bound_and_its_p_value_agree():
    for mean, size, delta in [(0.0, 20, 0.05), (0.03, 200, 0.01), (0.5, 50, 0.2)]:
        assert hoeffding_bentkus_p(mean, size, hoeffding_bentkus(mean, size, delta)) == pytest.approx(delta, rel=1e-6)
    values = np.random.default_rng(0).beta(1, 20, 100)
    assert betting_p(values, betting(values, 0.05)) == pytest.approx(0.05, rel=1e-9)


def test_p_values_of_what_the_data_do_not_refute_are_large():
    assert (
        hoeffding_bentkus_p(0.3, 50, 0.3) == hoeffding_bentkus_p(0.4, 50, 0.3) == hoeffding_bentkus_p(0.4, 0, 0.3) == 1
    )
    assert hoeffding_bentkus_p(0.0, 50, 0.0) == hoeffding_bentkus_p(1.0, 50, 1.0) == 1
    assert betting_p(np.full(50, 0.3), 0.3) == betting_p(np.full(50, 0.4), 0.3) == 1


def test_empirical_bernstein_is_its_formula():
    values = np.tile([0.1, 0.3, 0.0], 40)
    log = math.log(2 / 0.05)
    expected = sum(values) / 120 + math.sqrt(2 * variance(values.tolist()) * log / 120) + 7 * log / (3 * 119)
    assert empirical_bernstein(values, 0.05) == pytest.approx(expected, rel=1e-12)


def test_one_unit_of_betting_is_a_straight_line():
    # The capital is 1 + sum of shares * bets * (r scale - loss) / ceiling, so 1/delta is reached where this says.
    slope = float(np.sum(SHARES * BETS))
    expected = (0.3 + (1 / 0.05 - 1) * 0.5 / slope) / 0.8
    assert ratio_upper(np.array([0.3]), np.array([0.8]), 0.05, ceiling=0.5) == pytest.approx(expected, rel=1e-11)


def test_equal_units_of_betting_are_powers():
    upper = betting(np.full(100, 0.02), 0.05)
    capital = sum(share * (1 + bet * (upper - 0.02)) ** 100 for share, bet in zip(SHARES, BETS, strict=True))
    assert capital == pytest.approx(20, rel=1e-9)


# --- the capital is an e-value -------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [0.01, 0.3, 0.9])
def test_the_capital_is_fair_at_the_mean(mean):
    """Its expectation over all outcomes of 12 coins is 1, to rounding: no more could be won without cheating."""
    fair = sum(binom.pmf(k, 12, mean) * math.exp(log_capital(coins(k, 12) - mean, 1.0)) for k in range(13))
    assert fair == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("marked", [1, 6, 29])
def test_the_capital_wins_nothing_without_replacement(marked):
    """12 of 30 cards, `marked` of them hits: the expectation is below 1."""
    law = hypergeom(30, marked, 12)
    fair = sum(law.pmf(k) * math.exp(log_capital(coins(k, 12) - marked / 30, 1.0)) for k in range(13))
    assert 0.3 < fair <= 1.0 + 1e-12


def test_the_shares_are_all_the_money():
    assert SHARES.sum() == pytest.approx(1.0, abs=1e-15)
    assert BETS.max() == 1.0 and BETS.min() > 0


def test_a_unit_at_the_ceiling_leaves_the_smaller_bets():
    assert log_capital(np.array([1.0]), 1.0) == pytest.approx(math.log(np.sum(SHARES * (1 - BETS))), rel=1e-12)


# --- what holds of any bound ---------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_is_wrong_no_more_often_than_it_says(name, share):
    size, delta = 60, 0.05
    law = binom(size, share)
    wrong = sum(law.pmf(hits) for hits in range(size + 1) if BOUNDS[name](coins(hits, size), delta) < share)
    assert wrong <= delta
    assert BOUNDS[name](coins(6, size), delta) < 0.45, "a bound of 1 would pass too"


@SETTINGS
@given(values=units, delta=st.floats(1e-12, 0.5))
@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_lies_between_the_mean_and_one(name, values, delta):
    bound = BOUNDS[name](values, delta)
    assert float(np.mean(values)) - 1e-12 <= bound <= 1.0


@SETTINGS
@given(values=units, delta=st.floats(1e-9, 0.4))
@pytest.mark.parametrize("name", BOUNDS)
def test_more_confidence_costs_more(name, values, delta):
    assert BOUNDS[name](values, delta) <= BOUNDS[name](values, delta / 2) + 1e-12


@SETTINGS
@given(values=units)
@pytest.mark.parametrize("name", ANY)
def test_the_same_values_four_times_bound_better(name, values):
    bound, better = (BOUNDS[name](np.tile(values, times), 0.05) for times in (1, 4))
    rounded_up = 1 / len(values) if name == "hoeffding-bentkus" else 1e-9  # Bentkus counts whole units
    assert better <= bound + rounded_up


@SETTINGS
@given(values=units, seed=st.integers(0, 99))
@pytest.mark.parametrize("name", ANY)
def test_the_order_does_not_matter(name, values, seed):
    shuffled = np.random.default_rng(seed).permutation(values)
    assert BOUNDS[name](shuffled, 0.05) == pytest.approx(BOUNDS[name](values, 0.05), abs=1e-12)


@pytest.mark.parametrize("name", ANY)
def test_a_tiny_delta_is_no_trouble(name):
    for values in (np.zeros(3), np.ones(3), np.zeros(5000), np.tile([0.0, 1.0], 50)):
        bound = BOUNDS[name](values, 1e-300)
        assert np.mean(values) <= bound <= 1.0 and not math.isnan(bound)


# --- ratios --------------------------------------------------------------------------------------------

pairs = st.lists(st.tuples(st.floats(-3, 0.5), st.floats(0.01, 4)), min_size=1, max_size=40).map(np.array)


@SETTINGS
@given(pairs=pairs, delta=st.floats(1e-6, 0.5))
def test_a_ratio_is_bounded_from_above_and_never_below_zero(pairs, delta):
    losses, scales = pairs.T
    upper = ratio_upper(losses, scales, delta, ceiling=0.5)
    assert upper is not None and max(0.0, losses.sum() / scales.sum()) - 1e-9 <= upper


@SETTINGS
@given(pairs=pairs, low=st.floats(0, 5), step=st.floats(0, 5))
def test_the_capital_rises_with_the_ratio_that_it_bets_against(pairs, low, step):
    losses, scales = pairs.T
    capitals = [log_capital(losses - ratio * scales, 0.5) for ratio in (low, low + step)]
    assert capitals[0] <= capitals[1] + 1e-9


def test_a_unit_of_measure_is_no_matter():
    rng = np.random.default_rng(1)
    losses, scales = rng.uniform(-0.2, 0.4, 90), rng.uniform(1, 2, 90)
    plain = ratio_upper(losses, scales, 0.05, ceiling=0.5)
    assert ratio_upper(8 * losses, 8 * scales, 0.05, ceiling=4.0) == pytest.approx(plain, rel=1e-11)
    assert ratio_upper(losses, scales / 8, 0.05, ceiling=0.5) == pytest.approx(8 * plain, rel=1e-11)


def test_what_has_no_scale_has_no_bound():
    assert ratio_upper(np.zeros(9), np.zeros(9), 0.05, ceiling=1.0) is None
    assert ratio_upper(np.zeros(0), np.zeros(0), 0.05, ceiling=1.0) is None


def test_a_clear_gain_has_the_bound_zero():
    assert ratio_upper(np.full(50, -0.3), np.ones(50), 0.05, ceiling=0.5) == 0.0


# --- which one to use ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [200, 500])
def test_betting_is_the_tightest_on_flips_of_256_tokens(size):
    """Sequences of 256 tokens, 0.3 % of which flip: what a certificate sees. Where units are coins, it is not."""
    rng = np.random.default_rng(size)
    flips = rng.binomial(256, rng.beta(0.3, 99.7, size)) / 256
    bound = {name: BOUNDS[name](flips, 0.05) for name in ANY}
    assert bound["betting"] < 0.9 * bound["hoeffding-bentkus"] < bound["empirical-bernstein"]
    hits = coins(round(0.003 * size), size)
    bound = {name: BOUNDS[name](hits, 0.05) for name in ANY}
    assert bound["hoeffding-bentkus"] < bound["betting"] < bound["empirical-bernstein"]
