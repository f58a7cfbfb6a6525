"""Fixtures of all tests."""

from tests.command import command

__all__ = ["command"]
