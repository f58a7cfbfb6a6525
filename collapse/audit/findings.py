"""What an audit says: findings, each under a rule of this table, and what could not be decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from pydantic import Field, field_validator

from collapse.canonical import printable
from collapse.plan import Record

Outcome = Literal["clean", "refuted", "undecided"]
SEARCH = "erased-bytes"  # the rule that needs the source


@dataclass(frozen=True)
class Rule:
    """What a rule is about, as the sentence that a finding refutes, and how to repair it."""

    claim: str
    fix: str


_AGAIN = "export again into a new directory"
_REMOVE = "remove the file, or export again into a new directory"
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "manifest-damaged": Rule("collapse.json is a manifest in canonical form", _AGAIN),
        "plan-edited": Rule("the plan in collapse.json has the digest that stands beside it", _AGAIN),
        "signature-missing": Rule("the manifest is signed", "export with --sign, or do not ask for a signature"),
        "signature-damaged": Rule("collapse.sig holds one signature and nothing else", "export again with --sign"),
        "signature-key": Rule("the manifest is signed with the expected key", "find out who signed it; trust nothing"),
        "signature-mismatch": Rule("the signature fits collapse.json", "do not use the model; export and sign again"),
        "file-missing": Rule("every file of collapse.json is there", _AGAIN),
        "file-unlisted": Rule("every file is listed in collapse.json", _REMOVE),
        "file-changed": Rule("every file has its recorded size and SHA-256", _AGAIN),
        "file-special": Rule("every file is a plain file", _REMOVE),
        "side-file": Rule("config and tokenizer files are what source and plan make of them", _AGAIN),
        "foreign-weights": Rule("no file holds weights in another format, or an archive", _REMOVE),
        "stale-weights": Rule("no weight file is there that the manifest does not list", _REMOVE),
        "weights-damaged": Rule("every weight file has a whole header and whole tensors", _AGAIN),
        "header-bytes": Rule("every header holds its tensors and nothing else", _AGAIN),
        "gap-bytes": Rule("every byte between header and end belongs to one tensor", _AGAIN),
        "trailing-bytes": Rule("no byte follows the last tensor", _AGAIN),
        "index": Rule("the index lists the tensors that are there and nothing else", _AGAIN),
        "totals": Rule("number and size of the tensors are those of collapse.json", _AGAIN),
        "tensor-twice": Rule("each tensor is in one file", _REMOVE),
        "tensor-erased": Rule("no file has a tensor that the plan erases", _AGAIN),
        "tensor-unplanned": Rule("no file has a tensor that the plan does not keep", _AGAIN),
        "tensor-form": Rule("each tensor has the dtype and shape that the plan gives it", _AGAIN),
        "tensor-missing": Rule("each tensor that the plan keeps is there", _AGAIN),
        "tensor-bytes": Rule("each kept tensor has the bytes of the source", _AGAIN),
        "tensor-values": Rule("each replaced tensor has the data whose SHA-256 is in the plan", _AGAIN),
        SEARCH: Rule("no file holds the bytes of an erased row, at any offset", "remove them; see the other findings"),
    }
)


class Finding(Record):
    """One thing that is wrong: `offset` is in bytes from the start of `file`, None where the whole file is meant.

    `member` is the entry of an archive; the offset is then in its expanded data.
    """

    rule: str
    file: str
    what: str
    offset: int | None = None
    member: str | None = None

    @field_validator("file", "what", "member", mode="before")
    @classmethod
    def _printable(cls, text: str | None) -> str | None:
        return None if text is None else printable(text)

    @property
    def fix(self) -> str:
        """How to repair it."""
        return RULES[self.rule].fix

    @property
    def place(self) -> str:
        """File, member and offset in one word, as people write it."""
        name = f"{self.file}!{self.member}" if self.member is not None else self.file
        return f"{name}:{self.offset}" if self.offset is not None else name

    def to_json(self) -> dict[str, object]:
        """Return the finding as plain JSON values, with its fix."""
        return {**self.model_dump(mode="json"), "fix": self.fix}


class Audit(Record):
    """The outcome of an audit.

    `undecided` says what could not be looked at, `notes` what was not asked for; `figures` counts bytes and rows.
    """

    findings: tuple[Finding, ...] = ()
    undecided: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    searched: bool = Field(default=False, description="whether erased rows were searched for, which needs the source")
    figures: dict[str, int] = Field(default_factory=dict)

    @property
    def status(self) -> Outcome:
        """Refuted by any finding; clean only where nothing is undecided."""
        if self.findings:
            return "refuted"
        return "undecided" if self.undecided else "clean"

    @property
    def exit_code(self) -> int:
        """0 clean, 1 refuted, 2 undecided."""
        return {"clean": 0, "refuted": 1, "undecided": 2}[self.status]

    def to_json(self) -> dict[str, object]:
        """Return the audit as plain JSON values."""
        found = [finding.to_json() for finding in self.findings]
        return {"status": self.status, **self.model_dump(mode="json"), "findings": found}


def first_difference(there: bytes, right: bytes) -> int | None:
    """Return the offset of the first byte that differs, or where the shorter one ends; None where both are equal."""
    if there == right:
        return None
    pairs = enumerate(zip(there, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(there), len(right)))
