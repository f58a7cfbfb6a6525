"""Budgets: what their text says, that it survives a round trip, and that a bad one gets one clear line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapse.budget import LOSSES, PERCENT, RATES, SIZES, Budget, format_budgets, parse_budget, parse_budgets
from collapse.errors import PlanError


@pytest.mark.parametrize(
    ("text", "metric", "limit", "kind"),
    [
        ("kl<=0.02", "kl", 0.02, "loss"),
        ("bits<=1e-3", "bits", 0.001, "loss"),
        ("regret<=1%", "regret", 0.01, "loss"),
        ("regret<=0.01", "regret", 0.01, "loss"),
        (" confident-flips <= 0.7 % ", "confident-flips", 0.007, "loss"),
        ("flips<=2%", "flips", 0.02, "loss"),
        ("flips<=0%", "flips", 0.0, "loss"),
        ("params=-30%", "params", -0.3, "size"),
        ("flops=-40%", "flops", -0.4, "size"),
        ("decode = -12.5%", "decode", -0.125, "size"),
    ],
)
def test_a_budget_says_what_it_says(text: str, metric: str, limit: float, kind: str) -> None:
    assert parse_budget(text) == Budget(metric, limit, kind)  # type: ignore[arg-type]


def test_several_budgets_keep_their_order_and_text() -> None:
    text = "kl<=0.02,confident-flips<=1%,params=-30%"
    assert [budget.metric for budget in parse_budgets(text)] == ["kl", "confident-flips", "params"]
    assert format_budgets(parse_budgets(text)) == text


losses = st.sampled_from(LOSSES).flatmap(
    lambda name: st.builds(
        Budget, st.just(name), st.floats(0, 0.999 if name in RATES else 50.0, allow_subnormal=False), st.just("loss")
    )
)
sizes = st.builds(Budget, st.sampled_from(SIZES), st.floats(-0.999, -1e-6), st.just("size"))


@given(losses | sizes)
def test_a_budget_survives_its_text(budget: Budget) -> None:
    assert parse_budget(str(budget)) == budget


def test_every_rate_is_written_in_per_cent() -> None:
    assert set(RATES) < set(PERCENT) < set(LOSSES)
    assert str(Budget("flips", 0.07, "loss")) == "flips<=7%"  # 0.07 * 100 is not 7 in binary


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "budget '': is not METRIC<=LIMIT or METRIC=-PERCENT%"),
        ("kl<=0.02,", "budget '': is not METRIC<=LIMIT"),
        ("kl<0.02", "budget 'kl<0.02': is not METRIC<=LIMIT"),
        ("kl<=nan", "is not METRIC<=LIMIT"),
        ("kl<=1e9999", "is not METRIC<=LIMIT"),
        ("kl<=1e999", "the limit of kl must be at least 0"),
        ("kl<=2%", "kl is in nats per token, not in per cent"),
        ("bits<=2%", "bits is in bits per byte, not in per cent"),
        ("kl=0.02", "kl is a loss and takes an upper limit, as in kl<=0.02"),
        ("flips=1%", "flips is a loss and takes an upper limit, as in flips<=1%"),
        ("kl<=-0.1", "the limit of kl must be at least 0"),
        ("flips<=100%", "the limit of flips must be at least 0% and below 100%"),
        ("params<=-30%", "params is a size and takes a cut between -100% and 0%, as in params=-30%"),
        ("params=30%", "params is a size"),
        ("params=-100%", "params is a size"),
        ("params=-0.3", "params is a size"),
        ("speed=-30%", "unknown metric speed; choose among regret, bits, kl, flips, confident-flips, params"),
        ("kl<=1,kl<=2", "kl is given more than once; give it once"),
    ],
)
def test_a_bad_budget_gets_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_budgets(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)
