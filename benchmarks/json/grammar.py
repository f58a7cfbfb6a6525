"""JSON character by character: can what was read become a document (RFC 8259), and do its brackets match.

`Grammar` is strict. `Brackets` looks at brackets and strings alone, so that it goes on behind a missing comma.
"""

from __future__ import annotations

from dataclasses import dataclass, field

CLOSERS = {"{": "}", "[": "]"}
SPACE = frozenset(" \t\n\r")
DIGITS = frozenset("0123456789")
HEX = frozenset("0123456789abcdefABCDEF")
ESCAPES = frozenset('"\\/bfnrt')
LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
# Of a number: state -> what may follow, as (characters, next state). States in ENDS may be the last.
NUMBER = {
    "minus": ((frozenset("0"), "zero"), (DIGITS, "int")),
    "zero": ((frozenset("."), "point"), (frozenset("eE"), "exp")),
    "int": ((DIGITS, "int"), (frozenset("."), "point"), (frozenset("eE"), "exp")),
    "point": ((DIGITS, "fraction"),),
    "fraction": ((DIGITS, "fraction"), (frozenset("eE"), "exp")),
    "exp": ((frozenset("+-"), "sign"), (DIGITS, "exponent")),
    "sign": ((DIGITS, "exponent"),),
    "exponent": ((DIGITS, "exponent"),),
}
ENDS = frozenset({"zero", "int", "fraction", "exponent"})


@dataclass
class Brackets:
    """`open` are the closers that are due, innermost last; `broken` once one came that was not due."""

    open: list[str] = field(default_factory=list)
    broken: bool = False
    closed: bool = False
    _string: bool = False
    _escaped: bool = False

    @property
    def over(self) -> bool:
        """Whether nothing that follows matters."""
        return self.broken or self.closed

    def feed(self, text: str) -> int:
        """Read on until it is over; return how many characters were read."""
        for number, character in enumerate(text):
            if self.over:
                return number
            self._read(character)
        return len(text)

    def _read(self, character: str) -> None:
        if self._string:
            self._string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._string = True
        elif character in CLOSERS:
            self.open.append(CLOSERS[character])
        elif character in "}]":
            self.broken = not self.open or self.open.pop() != character
            self.closed = not self.broken and not self.open


@dataclass
class Grammar:
    """Reads a document; `alive` as long as what was read can begin one.

    `_due` is what comes next: a `value`, a `first` value or `]`, a `first key` or `}`, a `key`, a `colon`, `more` (a
    comma or closer, at the top only space), or the inside of a `string`, `number` or `literal`.
    """

    alive: bool = True
    _due: str = "value"
    _open: list[str] = field(default_factory=list)
    _rest: str = ""  # of a literal; of a number its state
    _hex: int = 0  # digits that are left of an escape
    _escaped: bool = False
    _is_key: bool = False

    @property
    def complete(self) -> bool:
        """Whether what was read is a whole document."""
        ended = self._due == "more" or (self._due == "number" and self._rest in ENDS)
        return self.alive and not self._open and ended

    def feed(self, text: str) -> bool:
        """Read on, and return whether it is alive."""
        for character in text:
            if not self.alive:
                break
            self.alive = self._read(character)
        return self.alive

    def _read(self, character: str) -> bool:
        if self._due == "string":
            return self._in_string(character)
        if self._due == "literal":
            return self._in_literal(character)
        if self._due == "number":
            following = next((state for allowed, state in NUMBER[self._rest] if character in allowed), None)
            if following is not None:
                self._rest = following
                return True
            if self._rest not in ENDS:
                return False
            self._due = "more"
        if character in SPACE:
            return True
        return self._between(character)

    def _between(self, character: str) -> bool:
        if self._due == "colon":
            self._due = "value"
            return character == ":"
        if self._due == "more":
            return self._after_value(character)
        if character == ("]" if self._due == "first" else "}") and self._due in {"first", "first key"}:
            return self._close(character)
        if self._due in {"first key", "key"}:
            self._due, self._is_key = "string", True
            return character == '"'
        return self._begin(character)

    def _begin(self, character: str) -> bool:
        if character in CLOSERS:
            self._open.append(CLOSERS[character])
            self._due = "first key" if character == "{" else "first"
        elif character == '"':
            self._due, self._is_key = "string", False
        elif character in LITERALS:
            self._due, self._rest = "literal", LITERALS[character]
        elif character in DIGITS or character == "-":
            self._due, self._rest = "number", {"-": "minus", "0": "zero"}.get(character, "int")
        else:
            return False
        return True

    def _after_value(self, character: str) -> bool:
        if character == "," and self._open:
            self._due = "key" if self._open[-1] == "}" else "value"
            return True
        return self._close(character)

    def _close(self, character: str) -> bool:
        self._due = "more"
        return bool(self._open) and self._open.pop() == character

    def _in_string(self, character: str) -> bool:
        if self._hex:
            self._hex -= 1
            return character in HEX
        if self._escaped:
            self._escaped, self._hex = False, 4 if character == "u" else 0
            return character in ESCAPES or character == "u"
        if character == '"':
            self._due = "colon" if self._is_key else "more"
        self._escaped = character == "\\"
        return character >= " "

    def _in_literal(self, character: str) -> bool:
        fits, self._rest = self._rest[0] == character, self._rest[1:]
        if not self._rest:
            self._due = "more"
        return fits
