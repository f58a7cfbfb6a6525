"""Certificates tell the truth: 200 resampled splits, and wrong ways to bound that the same count finds out."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from certified_text import DELTA, SPLITS, TOLERATED, ratio, text, wrong_bounds

from collapse.budget import LOSSES, Budget
from collapse.certify import METRICS, Certificate, Design, SequenceLoss, certify, learn_then_test
from collapse.certify.betting import ratio_upper
from collapse.certify.bounds import betting, empirical_bernstein, hoeffding_bentkus
from collapse.certify.metrics import METHODS

DESIGN = Design(split="made up", length=256)
UNITS = 100

BOUNDS = {
    "betting": lambda values: betting(values, DELTA),
    "empirical-bernstein": lambda values: empirical_bernstein(values, DELTA),
    "hoeffding-bentkus": lambda values: hoeffding_bentkus(float(np.mean(values)), len(values), DELTA),
}
LAWS = {
    "rare": (lambda rng: (rng.random(UNITS) < 0.02).astype(float), 0.02),
    "coins": (lambda rng: (rng.random(UNITS) < 0.3).astype(float), 0.3),
    "beta": (lambda rng: rng.beta(2, 8, UNITS), 0.2),
    "skewed": (lambda rng: np.where(rng.random(UNITS) < 0.02, 1.0, rng.beta(0.5, 49.5, UNITS)), 0.02 + 0.98 * 0.01),
    "correlated": (lambda rng: rng.binomial(256, rng.beta(0.2, 3.8, UNITS)) / 256, 0.05),
}


@cache
def population(*, fixed_length: bool = False) -> tuple[SequenceLoss, ...]:
    return tuple(text(1500, fixed_length=fixed_length))


def split_of(sequences: tuple[SequenceLoss, ...], rng: np.random.Generator, size: int = UNITS) -> list[SequenceLoss]:
    """Return some of the sequences, none twice: text that was held out of a finite corpus."""
    return [sequences[i] for i in rng.choice(len(sequences), size, replace=False)]


def upper(certificate: Certificate) -> float:
    (bound,) = certificate.bounds
    assert bound.upper is not None
    return bound.upper


# --- the bounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_of_means_are_wrong_no_more_often_than_they_say(name, law):
    draw, mean = LAWS[law]
    assert wrong_bounds(lambda rng: BOUNDS[name](draw(rng)), mean) <= TOLERATED


@pytest.mark.parametrize("metric", LOSSES)
def test_certificates_tell_the_truth(metric):
    """On 200 splits of one corpus, 100 sequences of different lengths each: acceptance at delta = 0.05."""
    corpus = population()
    truth = ratio(corpus, metric)
    assert truth > 0.002

    def bound(rng: np.random.Generator) -> float:
        return upper(certify(split_of(corpus, rng), [Budget(metric, 1.0, "loss")], DESIGN))

    assert wrong_bounds(bound, truth) <= TOLERATED
    assert bound(np.random.default_rng(0)) < 15 * truth, "a bound that says nothing would be right as well"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_tells_the_truth_on_sequences_of_one_length(method):
    corpus = population(fixed_length=True)
    design = Design(split="made up", length=256, method=method)

    def bound(rng: np.random.Generator) -> float:
        return upper(certify(split_of(corpus, rng), [Budget("flips", 1.0, "loss")], design))

    assert wrong_bounds(bound, ratio(corpus, "flips")) <= TOLERATED


@pytest.mark.parametrize("broken", LOSSES)
def test_a_plan_that_breaks_one_of_several_budgets_is_not_certified_more_often_than_delta(broken):
    """Each budget is tested at full delta: that the others are met with ease must not help."""
    corpus = population()
    limit = math.nextafter(ratio(corpus, broken), 0)
    budgets = [Budget(metric, limit if metric == broken else 1.0, "loss") for metric in LOSSES]

    def margin(rng: np.random.Generator) -> float:
        return -1.0 if certify(split_of(corpus, rng), budgets, DESIGN).met else 1.0

    assert wrong_bounds(margin, 0.0) <= TOLERATED


def test_small_splits_tell_the_truth():
    corpus = population()

    def bound(rng: np.random.Generator) -> float:
        return upper(certify(split_of(corpus, rng, 5), [Budget("kl", 1.0, "loss")], DESIGN))

    assert wrong_bounds(bound, ratio(corpus, "kl")) <= TOLERATED


# --- wrong ways to bound, each of which the count finds out --------------------------------------------


def tokens_as_units(values: np.ndarray) -> float:
    """As if every token had been drawn by itself."""
    return hoeffding_bentkus(float(np.mean(values)), 256 * len(values), DELTA)


def central_limit(values: np.ndarray) -> float:
    return float(np.mean(values) + 1.645 * np.std(values, ddof=1) / math.sqrt(len(values)))


def ceiling_from_the_data(values: np.ndarray) -> float:
    """As if nothing worse could come than what was seen."""
    ceiling = max(float(values.max()), 1e-9)
    return ratio_upper(values, np.ones_like(values), DELTA, ceiling=ceiling) or 0.0


@pytest.mark.parametrize(
    ("wrong", "law"),
    [
        (tokens_as_units, "correlated"),
        (tokens_as_units, "skewed"),
        (central_limit, "rare"),
        (central_limit, "skewed"),
        (ceiling_from_the_data, "rare"),
        (ceiling_from_the_data, "skewed"),
    ],
)
def test_a_planted_wrong_bound_is_found_out(wrong, law):
    draw, mean = LAWS[law]
    assert wrong_bounds(lambda rng: wrong(draw(rng)), mean) > TOLERATED


def test_tokens_taken_for_sequences_are_found_out():
    """A certificate over the same corpus cut into pieces that are taken for independent ones."""
    corpus = population(fixed_length=True)

    def pieces(sequence: SequenceLoss, count: int = 32) -> list[SequenceLoss]:
        each = 256 // count
        flips = [min(each, max(0, sequence.flips - each * i)) for i in range(count)]
        return [SequenceLoss(each, each, 1.0, 1.0, 0.0, flip, 0, 0) for flip in flips]

    def bound(rng: np.random.Generator) -> float:
        cut = [piece for sequence in split_of(corpus, rng, 40) for piece in pieces(sequence)]
        return upper(certify(cut, [Budget("flips", 1.0, "loss")], Design(split="made up", length=8)))

    assert wrong_bounds(bound, ratio(corpus, "flips")) > TOLERATED


# --- several plans on the same text --------------------------------------------------------------------

LIMIT = 0.04
RATES = (0.01, 0.02, 0.041, 0.042, 0.043, 0.06)  # from the mildest plan to the hardest; from the third on too much


def plans(rng: np.random.Generator, rates: tuple[float, ...], units: int = 150) -> list[list[SequenceLoss]]:
    """Return the losses of plans on one text: sequences that are broken altogether, and the same ones first."""
    luck = rng.random(units)
    return [[SequenceLoss(8, 8, 1.0, 1.0, 0.0, 8 * bool(u < rate), 0, 0) for u in luck] for rate in rates]


@pytest.mark.parametrize("procedure", ["fixed-sequence", "bonferroni"])
def test_no_plan_is_falsely_certified_more_often_than_delta(procedure):
    budgets, design = [Budget("flips", LIMIT, "loss")], Design(split="made up", length=8, method="hoeffding-bentkus")
    false = 0
    for split in range(SPLITS):
        losses = plans(np.random.default_rng(split), RATES)
        tested = learn_then_test(losses, budgets, design, procedure, tries=len(RATES))
        false += any(c.met for c, rate in zip(tested, RATES, strict=False) if rate > LIMIT)
    assert false <= TOLERATED


def test_trying_plans_until_one_passes_is_found_out():
    """Twelve plans that all lose too much, each with luck of its own, each tested as if it were the only one."""
    budgets, design = [Budget("flips", LIMIT, "loss")], Design(split="made up", length=8, method="hoeffding-bentkus")
    naive, corrected = 0, 0
    for split in range(SPLITS):
        rng = np.random.default_rng([1, split])
        losses = [plans(rng, (0.0401,))[0] for _ in range(12)]
        naive += any(certify(plan, budgets, design).met for plan in losses)
        corrected += any(c.met for c in learn_then_test(losses, budgets, design, "bonferroni", tries=12))
    assert corrected <= TOLERATED < naive


def test_all_metrics_of_the_simulation_are_there():
    assert tuple(METRICS) == LOSSES
