"""Every error that a user can cause, each one line long: what is wrong, where, and what to do."""

from __future__ import annotations

LONGEST = 2000  # characters; names come from files, and a file may name anything


def _one_line(text: str) -> str:
    """Return `text` as one line that any terminal shows as it stands."""
    line = " ".join(text.split())
    if len(line) > LONGEST:
        line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


class CollapseError(Exception):
    """A mistake in what the user gave us; the command line prints it as one line and exits with `exit_code`.

    Args:
        what: what is wrong, in the user's words, without a full stop.
        where: the file, field, tensor or module that it is about.
        fix: what to do next.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        located = f"{where}: {what}" if where else what
        super().__init__(_one_line(f"{located}; {fix}" if fix else located))


class SchemaError(CollapseError):
    """The schema is malformed, or a text or token breaks it."""


class CheckpointError(CollapseError):
    """The checkpoint cannot be read, or is not one that we accept."""


class PlanError(CollapseError):
    """The plan is malformed, or was made for another source."""


class OutputError(CollapseError):
    """The output cannot be written where it was asked for."""


class UnsupportedError(CollapseError):
    """A model, tokenizer or operator that we decline by name rather than guess about."""


class RefutedError(CollapseError):
    """The verifier found an input on which the claim is false."""

    exit_code = 1
