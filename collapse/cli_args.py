"""What the command line adds to typer: an option that takes all the words after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand


def repeat_option(arguments: Sequence[str], option: str) -> list[str]:
    """Return `arguments` with `option A B C` as `option A option B option C`.

    Words belong to the option up to the next one that begins with a dash; `--` ends everything.
    """
    expanded: list[str] = []
    taking = fresh = False
    for position, word in enumerate(arguments):
        if word == "--":
            return [*expanded, *arguments[position:]]
        if taking and not fresh and not word.startswith("-"):
            expanded.append(option)
        taking, fresh = (word == option, word == option) if word.startswith("-") else (taking, False)
        expanded.append(word)
    return expanded


class CorpusCommand(TyperCommand):
    """A command whose `--corpus` and `--protect` take any number of files, as a shell pattern gives them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Expand `--corpus A B` and `--protect A B` before the usual parsing."""
        return super().parse_args(ctx, repeat_option(repeat_option(args, "--corpus"), "--protect"))
