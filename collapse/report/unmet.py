"""Which sizes that were asked for were not reached, and why: what a user must not have to look for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from collapse.budget import Budget
from collapse.plan import Skipped
from collapse.search_path import PathPoint, SearchPath

CLOSE = 1e-6  # shares in a path are rounded to that
MOST = 3  # reasons of single sites: the report lists all


def unmet(
    budgets: Sequence[Budget], path: SearchPath | None, skipped: Sequence[Skipped], passes: Sequence[str]
) -> tuple[str, ...]:
    """Return a sentence for each budget of a size that is not met, and one where nothing met the budgets of losses.

    Sizes are those of the point that was taken, without what other passes save. Reasons are those that the `passes` of
    the search gave.
    """
    taken = next((point for point in path.points if point.taken), None) if path else None
    given = [one for one in skipped if one.pass_name in passes]
    whole = [one for one in given if one.site == "model"]  # what the search says of itself; others are of single sites
    reasons = dict.fromkeys(one.reason for one in whole or given[:MOST])
    why = f" ({'; '.join(reasons)})" if reasons else ""
    return tuple(f"{said}{why}." for said in _said(budgets, taken))


def _said(budgets: Sequence[Budget], taken: PathPoint | None) -> Iterator[str]:
    sizes = [one for one in budgets if one.kind == "size"]
    for one in sizes:
        if taken is None:
            yield f"Budget not met: {one}; nothing was taken for it"
        elif (left := {**taken.shares, **taken.counted}[one.metric]) > 1 + one.limit + CLOSE:
            yield f"Budget not met: {one}; with what was taken it is {left - 1:+.1%}"
    if taken is None and not sizes and budgets:
        yield f"Nothing was taken within the budget {', '.join(map(str, budgets))}"
