"""Run the command line in this process, as a user would from a shell."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from collapse.cli import main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


class Command:
    """`command("plan", model)` gives exit code and both streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> Outcome:
        self._monkeypatch.setattr(sys, "argv", ["collapse", *map(str, arguments)])
        self._capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        out, err = self._capsys.readouterr()
        return Outcome(code, out, err)
