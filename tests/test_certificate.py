"""Certificates: what is met and what is only measured, what shares delta, and what is refused."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from certified_text import text
from pydantic import ValidationError

from collapse.budget import LOSSES, Budget, parse_budgets
from collapse.canonical import dumps
from collapse.certify import Certificate, Design, SequenceLoss, certify, learn_then_test
from collapse.certify.bounds import betting, empirical_bernstein, hoeffding_bentkus
from collapse.errors import PlanError

DESIGN = Design(split="5a" * 32, length=256)
MILD = text(300, bad=0.0, fixed_length=True)


def even(count: int = 200, tokens: int = 256, **changes: float) -> list[SequenceLoss]:
    """Return equal sequences of 2 nats a token, 4 bytes a token and no loss, but for `changes`."""
    plain = SequenceLoss(tokens, 4 * tokens, 2.0 * tokens, 2.0 * tokens, 0.0, 0, 128, 0)
    return [replace(plain, **changes)] * count


def bounds(sequences: list[SequenceLoss], budgets: str, design: Design = DESIGN) -> Certificate:
    return certify(sequences, parse_budgets(budgets), design)


# --- each metric ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "changes", "estimate", "excess"),
    [
        # What no data refute is a rare sequence at the cap; `excess` is its price for 200 units, per unit of scale.
        ("kl", {"kl": 2.56}, 0.01, 0.5),
        ("regret", {"nll": 2.02 * 256}, 0.01, 0.5 / 2),
        ("bits", {"nll": 2.02 * 256}, 0.02 / 4 / math.log(2), 0.5 / 4 / math.log(2)),
        ("flips", {"flips": 2}, 2 / 256, 1.0),
        ("confident-flips", {"flips": 2, "confident_flips": 1}, 1 / 128, 2.0),
    ],
)
def test_a_metric_is_the_ratio_of_its_sums(metric: str, changes: dict[str, float], estimate: float, excess: float):
    (bound,) = certify(even(**changes), [Budget(metric, 1.0, "loss")], DESIGN).bounds
    assert bound.estimate == pytest.approx(estimate, rel=1e-12)
    without_spread = betting([0.0] * 200, 0.05)  # of values in [0, 1]
    assert bound.upper == pytest.approx(estimate + excess * without_spread, rel=0.03)
    assert (bound.metric, bound.clipped) == (metric, 0)


def test_a_longer_sequence_weighs_more():
    sequences = even(100, flips=64) + even(100, tokens=128, confident=64, text_bytes=1)
    (bound,) = bounds(sequences, "flips<=50%").bounds
    assert bound.estimate == pytest.approx(64 / (256 + 128), rel=1e-12)


def test_a_mean_has_the_bound_of_its_method():
    for method, bound in [("empirical-bernstein", empirical_bernstein), ("betting", betting)]:
        (found,) = bounds(MILD, "flips<=5%", replace(DESIGN, method=method)).bounds
        assert found.upper == pytest.approx(bound([s.flips / 256 for s in MILD], 0.05), rel=1e-9)
    (found,) = bounds(MILD, "kl<=0.05", replace(DESIGN, method="hoeffding-bentkus", nats_cap=0.25)).bounds
    mean = sum(s.kl for s in MILD) / 256 / len(MILD)
    assert found.upper == pytest.approx(0.25 * hoeffding_bentkus(mean / 0.25, len(MILD), 0.05), rel=1e-9)


@pytest.mark.parametrize("method", ["hoeffding-bentkus", "empirical-bernstein"])
@pytest.mark.parametrize(
    ("sequences", "budget"),
    [(MILD, "regret<=1%"), (MILD, "confident-flips<=1%"), ([*MILD, *even(1, tokens=255)], "flips<=1%")],
)
def test_a_method_of_means_declines_ratios(method: str, sequences: list[SequenceLoss], budget: str):
    with pytest.raises(PlanError, match="is a ratio; use the method betting"):
        bounds(sequences, budget, replace(DESIGN, method=method))


def test_the_order_of_sequences_does_not_matter():
    shuffled = random.Random(0).sample(MILD, len(MILD))
    budgets = "regret<=1%,bits<=1,kl<=0.02,flips<=2%,confident-flips<=2%"
    for one, other in zip(bounds(MILD, budgets).bounds, bounds(shuffled, budgets).bounds, strict=True):
        assert one.upper == pytest.approx(other.upper, rel=1e-9)


# --- what is met ---------------------------------------------------------------------------------------


def test_a_budget_is_met_by_its_bound_and_not_by_its_estimate():
    (bound,) = bounds(even(kl=2.56), "kl<=0.012").bounds
    assert bound.estimate is not None and bound.upper is not None
    assert bound.estimate < 0.012 < bound.upper and not bound.met
    (bound,) = bounds(even(1000, kl=2.56), "kl<=0.012").bounds
    assert bound.met, "more sequences say more"


def test_the_limit_itself_is_met_and_anything_less_is_not():
    (bound,) = bounds(even(kl=2.56), "kl<=0.1").bounds
    assert bound.upper is not None
    assert certify(even(kl=2.56), [Budget("kl", bound.upper, "loss")], DESIGN).met
    assert not certify(even(kl=2.56), [Budget("kl", math.nextafter(bound.upper, 0), "loss")], DESIGN).met


@pytest.mark.parametrize(
    ("worst", "budget"),
    [
        ({"kl": 0.6 * 256}, "kl<=0.1"),
        ({"kl": math.inf}, "kl<=0.1"),
        ({"nll": 2.6 * 256}, "regret<=10%"),
        ({"nll": math.inf}, "bits<=0.1"),
    ],
)
def test_one_sequence_beyond_the_cap_certifies_nothing(worst: dict[str, float], budget: str):
    (bound,) = bounds(even() + even(1, **worst), budget).bounds
    assert bound.clipped == 1 and not bound.met
    assert bound.upper is not None and bound.at_most is None  # it bounds what was counted, not what was lost
    assert bound.upper is not None and bound.upper < bound.limit, "else the case shows nothing"
    assert bounds(even(201), budget).met


def test_a_loss_at_the_cap_is_not_beyond_it():
    assert bounds(even() + even(1, kl=0.5 * 256), "kl<=0.1").bounds[0].clipped == 0


def test_a_gain_is_bounded_by_zero_and_no_gain_is_claimed():
    (bound,) = bounds(even(nll=1.5 * 256), "regret<=0%").bounds
    assert (bound.estimate, bound.upper, bound.met) == (pytest.approx(-0.25), 0.0, True)


def test_text_without_confident_tokens_says_nothing_of_them():
    (bound,) = bounds(even(confident=0), "confident-flips<=1%").bounds
    assert (bound.estimate, bound.upper, bound.met) == (None, 1.0, False)
    (bound,) = bounds(even(text_bytes=0), "bits<=1").bounds
    assert (bound.estimate, bound.upper, bound.met) == (None, None, False)


def test_a_smaller_cap_on_rates_is_tighter_and_is_said():
    plain, capped = (bounds(MILD, "flips<=1.5%", replace(DESIGN, rate_cap=cap)) for cap in (1.0, 0.25))
    assert plain.bounds[0].upper > capped.bounds[0].upper
    assert capped.met and "flips up to 0.25 tokens per token" in capped.to_evidence().claim
    assert "up to 1 " not in bounds(MILD, "flips<=5%").to_evidence().claim


# --- sharing delta -------------------------------------------------------------------------------------


def test_tries_share_delta_and_metrics_do_not():
    alone = certify(MILD, parse_budgets("kl<=0.02"), replace(DESIGN, delta=0.05 / 3))
    shared = certify(MILD, parse_budgets("kl<=0.02,flips<=2%,params=-30%"), DESIGN, tries=3)
    assert shared.bounds[0] == alone.bounds[0]
    assert len(shared.bounds) == 2, "a size is no matter of statistics"
    method = shared.to_evidence().method
    assert shared.delta == 0.05 and "each at delta / 3; all budgets together at the same" in method
    assert "intersection-union" not in alone.to_evidence().method


def test_a_budget_that_is_met_does_not_help_another_that_is_not():
    sequences = even(kl=2.56)
    (bound,) = bounds(sequences, "kl<=1").bounds
    assert bound.upper is not None
    tight = f"kl<={math.nextafter(bound.upper, 0):.17g}"
    assert not bounds(sequences, f"{tight},flips<=50%").met
    assert bounds(sequences, f"kl<={math.nextafter(bound.upper, 1):.17g},flips<=50%").met


def harder(plans: int, asked: list[int]) -> Iterator[list[SequenceLoss]]:
    for plan in range(plans):
        asked.append(plan)
        yield even(kl=2.56 * plan)


def test_a_fixed_sequence_stops_at_the_first_plan_that_fails():
    asked: list[int] = []
    tested = learn_then_test(harder(9, asked), parse_budgets("kl<=0.035"), DESIGN)
    assert [certificate.met for certificate in tested] == [True, True, True, False]
    assert asked == [0, 1, 2, 3], "losses of harder plans are never computed"
    assert [certificate.rank for certificate in tested] == [1, 2, 3, 4]
    assert tested[2].bounds == certify(even(kl=5.12), parse_budgets("kl<=0.035"), DESIGN).bounds
    assert "plan 3 of a fixed sequence" in tested[2].to_evidence().method


def test_a_fixed_sequence_does_not_go_on_after_a_failure():
    plans = [even(kl=25.6), even()]
    assert [c.met for c in learn_then_test(plans, parse_budgets("kl<=0.04"), DESIGN)] == [False]
    assert [c.met for c in learn_then_test(plans, parse_budgets("kl<=0.04"), DESIGN, "bonferroni", 2)] == [False, True]


def test_bonferroni_pays_for_every_plan_and_refuses_one_too_many():
    tested = learn_then_test(harder(4, []), parse_budgets("kl<=0.04"), DESIGN, "bonferroni", tries=4)
    assert [certificate.tries for certificate in tested] == [4] * 4
    assert tested[1].bounds == certify(even(kl=2.56), parse_budgets("kl<=0.04"), DESIGN, tries=4).bounds
    with pytest.raises(PlanError, match="more plans than the 3 tries that share delta; say how many first"):
        learn_then_test(harder(4, []), parse_budgets("kl<=0.04"), DESIGN, "bonferroni", tries=3)


def test_no_plan_gives_no_certificate():
    assert learn_then_test([], parse_budgets("kl<=0.04"), DESIGN) == ()


# --- evidence ------------------------------------------------------------------------------------------


def test_evidence_is_certified_only_where_every_budget_is_met():
    met = bounds(even(flips=1), "kl<=0.02,flips<=5%").to_evidence()
    assert met.grade == "certified"
    assert met.claim == (
        "on average over text like the held-out sequences, up to 256 tokens each, where a sequence counts with its kl "
        "up to 0.5 nats per token of that length: kl<=0.02,flips<=5%, with confidence 0.95"
    ).replace("0.02,flips", "0.02, flips")
    missed = bounds(even(flips=1), "kl<=0.02,flips<=1%").to_evidence()
    assert missed.grade == "measured"
    assert missed.claim == (
        "on 200 held-out sequences: kl 0, flips 0.00391; not shown for text like the held-out sequences, up to 256 "
        "tokens each: flips<=1%"
    )


def test_figures_have_all_that_the_bound_rests_on():
    sequences = [replace(sequence, lost_mass=2.56) for sequence in even(flips=2)]
    certificate = bounds(sequences, "confident-flips<=5%")
    assert certificate.to_evidence().figures == {
        "delta": 0.05,
        "method": "betting",
        "sequences": 200,
        "tokens": 200 * 256,
        "length": 256,
        "lost_mass": pytest.approx(0.01),
        "split": "5a" * 32,
        "tries": 1,
        "rank": 1,
        "confident_flips_estimate": 0.0,
        "confident_flips_at_most": certificate.bounds[0].upper,
        "confident_flips_limit": 0.05,
        "confident_flips_cap": 1.0,
        "confident_flips_clipped": 0,
    }


def test_a_certificate_survives_its_file_and_cannot_say_that_it_was_met():
    certificate = bounds(MILD, ",".join(f"{m}<={'0.02' if m != 'regret' else '1%'}" for m in LOSSES))
    assert Certificate.model_validate_json(dumps(certificate.model_dump(mode="json"))) == certificate
    with pytest.raises(ValidationError, match="met"):
        Certificate.model_validate({**certificate.model_dump(), "met": True})


# --- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequences", "budgets", "message"),
    [
        ([], "kl<=0.02", "there is no sequence that the certificate was designed for"),
        (even(1, tokens=257), "kl<=0.02", "a sequence has 257 tokens, more than the 256 that the certificate"),
        (even(1), "params=-30%", "there is no budget of a loss to certify; give one, for example kl<=0.02"),
    ],
)
def test_what_cannot_be_certified_is_refused(sequences: list[SequenceLoss], budgets: str, message: str):
    with pytest.raises(PlanError, match=message):
        certify(sequences, parse_budgets(budgets), DESIGN)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": "normal"}, "unknown method 'normal'; choose among betting, hoeffding-bentkus"),
        ({"delta": 0.0}, "delta = 0.0 is no probability"),
        ({"delta": 1.0}, "delta = 1.0 is no probability"),
        ({"delta": math.nan}, "is no probability"),
        ({"length": 0}, "must be positive"),
        ({"nats_cap": math.inf}, "must be positive"),
        ({"rate_cap": 1.5}, "a rate's cap at most 1"),
    ],
)
def test_a_design_that_bounds_nothing_is_refused(wrong: dict[str, float], message: str):
    with pytest.raises(PlanError, match=message):
        replace(DESIGN, **wrong)
