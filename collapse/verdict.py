"""What the verifier says: a list of checks that were run, and what they add up to."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from collapse.plan import Record

Status = Literal["verified", "refuted", "inconclusive"]


class Check(Record):
    """One check. `passed` is None where it could not be run; `detail` then says why."""

    name: str
    passed: bool | None
    detail: str
    figures: dict[str, float | int | str] = Field(default_factory=dict)


class Blamed(Record):
    """What a refutation comes down to: a rewrite by its pass and site, or a tensor, with the reason."""

    pass_name: str = Field(alias="pass")
    site: str
    reason: str


class Verdict(Record):
    """The outcome of all checks on one output directory.

    `counterexample` is the input on which source and output differ, as token ids and the two results. `blamed` names
    the rewrites, tensors or config edits that are wrong, where they were looked for.
    """

    checks: tuple[Check, ...]
    counterexample: dict[str, Any] | None = None
    blamed: tuple[Blamed, ...] = ()

    @property
    def status(self) -> Status:
        """Refuted by any failed check; verified only when every check was run and passed."""
        if any(check.passed is False for check in self.checks):
            return "refuted"
        return "verified" if self.checks and all(check.passed for check in self.checks) else "inconclusive"

    @property
    def exit_code(self) -> int:
        """0 verified, 1 refuted, 2 inconclusive."""
        return {"verified": 0, "refuted": 1, "inconclusive": 2}[self.status]

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.passed is False)
