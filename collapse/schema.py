"""The contract about a model's inputs: what kind of text, how long, which characters, and what comes out.

Whatever collapse concludes is true only under this contract; its digest is part of every plan.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator

from collapse.canonical import digest
from collapse.domain import CHARSETS, Domain, OutputDomain, StatedDomain
from collapse.errors import SchemaError
from collapse.plan import Record, first_problem

__all__ = [
    "BUILTIN",
    "CHARSETS",
    "TYPES",
    "Domain",
    "InputSchema",
    "OutputDomain",
    "TextType",
    "Workload",
    "load_schema",
]

TextType = Literal["log", "json", "code", "text"]
TYPES: tuple[str, ...] = get_args(TextType)

BUILTIN = Path(__file__).with_name("schemas")
_FORMS = 'give a built-in name, a .json or .toml file, or inline JSON such as \'{"type": "log"}\''
_LINE_END = re.compile(r"\r\n|\n|\r")


class Workload(Record):
    """The shape of one request: prompt tokens, new tokens, and sequences at a time."""

    prompt: int = Field(default=512, ge=1, strict=True)
    new: int = Field(default=128, ge=1, strict=True)
    batch: int = Field(default=1, ge=1, strict=True)


class Violation(NamedTuple):
    """Where a text breaks the schema: the clause, and the 1-based line and column."""

    clause: str
    line: int
    column: int

    def error(self, file: str = "") -> SchemaError:
        """Return the error that names `file` (with what separates it), line, column and clause."""
        where = f"{file}line {self.line}, column {self.column}"
        return SchemaError(f"breaks {self.clause}", where=where, fix="change the text or the schema")


class InputSchema(StatedDomain):
    """The contract. Lengths are counted in tokens of the source tokenizer and in characters of a line.

    `max_tokens` bounds the whole sequence: prompt and new tokens together when the task is to generate, the
    prompt when it is to score. A workload that is not given is made to fit it.
    """

    type: TextType
    max_tokens: int | None = Field(default=None, ge=1, strict=True)
    max_line_length: int | None = Field(default=None, ge=1, strict=True)
    padding: Literal["none", "left"] = "left"
    modality: Literal["text"] = "text"
    task: Literal["generate", "score"] = "generate"
    workload: Workload = Workload()
    output: OutputDomain = OutputDomain()

    @model_validator(mode="before")
    @classmethod
    def _fit_workload(cls, data: Any) -> Any:
        if not isinstance(data, dict) or type(data.get("max_tokens")) is not int:
            return data
        workload = data.get("workload", {})
        if not isinstance(workload, dict):
            return data
        return data | {"workload": _fitting(workload, data["max_tokens"], data.get("task") == "score")}

    @model_validator(mode="after")
    def _workload_fits(self) -> InputSchema:
        generated = self.workload.new if self.task == "generate" else 0
        if self.max_tokens is not None and self.workload.prompt + generated > self.max_tokens:
            shape = f"prompt {self.workload.prompt}" + (f" + new {generated}" if generated else "")
            raise ValueError(f"field workload = {shape}: allowed are {self.max_tokens} tokens (max_tokens)")
        return self

    @property
    def input(self) -> Domain:
        """The domain of the inputs."""
        return Domain(charset=self.charset, tokens=self.tokens)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON of the schema."""
        return digest(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the schema as plain JSON values, defaults included."""
        return self.model_dump(mode="json")

    def violation(self, text: str) -> Violation | None:
        """Return the first character outside the charset, else the first line that is too long, else None.

        A line ends at LF, CR LF or CR; its length does not count the line end.
        """
        allowed = self.input.characters
        if allowed is not None and (outside := set(text) - allowed):
            return _stray(text, outside, str(self.charset))
        if self.max_line_length is None:
            return None
        for number, line in enumerate(_LINE_END.split(text), start=1):
            if len(line) > self.max_line_length:
                clause = f"max_line_length {self.max_line_length}: the line has {len(line)} characters"
                return Violation(clause, number, self.max_line_length + 1)
        return None

    def check_text(self, text: str) -> None:
        """Raise `SchemaError` naming the clause, line and column that keep `text` from being an input."""
        if found := self.violation(text):
            raise found.error()

    def check_tokens(self, ids: Sequence[int]) -> None:
        """Raise `SchemaError` if there are more than `max_tokens` ids or one is not in `tokens`."""
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            raise SchemaError(f"{len(ids)} tokens break max_tokens {self.max_tokens}", fix="shorten the input")
        allowed = None if self.tokens is None else set(self.tokens)
        for position, token in enumerate(ids):
            if token < 0 or (allowed is not None and token not in allowed):
                clause = f"token id {token} breaks tokens {_listed(self.tokens)}"
                raise SchemaError(clause, where=f"position {position}", fix="change the input or the schema")


def _fitting(workload: Mapping[str, Any], limit: int, scores: bool) -> dict[str, Any]:
    """Return `workload` with what it does not state made to fit `limit` tokens, at most the usual sizes."""
    usual = Workload()
    prompt, new = workload.get("prompt"), workload.get("new")
    if type(new) is not int:
        new = max(1, min(usual.new, limit // 5 if type(prompt) is not int else limit - prompt))
    if type(prompt) is not int:
        prompt = max(1, min(usual.prompt, limit if scores else limit - new))
    return {"prompt": prompt, "new": new} | dict(workload)


def _stray(text: str, outside: set[str], charset: str) -> Violation:
    at = next(index for index, character in enumerate(text) if character in outside)
    ends = list(_LINE_END.finditer(text, 0, at))
    column = at - (ends[-1].end() if ends else 0) + 1
    shown = charset if len(charset) <= 40 else charset[:37] + "..."
    return Violation(f"charset {shown!r}: it has no {text[at]!r} (U+{ord(text[at]):04X})", len(ends) + 1, column)


def _listed(tokens: tuple[int, ...] | None) -> str:
    if tokens is None:
        return "(any, 0 or more)"
    shown = ", ".join(map(str, tokens[:8]))
    return f"({shown}{', ...' if len(tokens) > 8 else ''}; {len(tokens)} ids)"


def load_schema(spec: str | Path | Mapping[str, Any] | InputSchema) -> InputSchema:
    """Return the schema that `spec` stands for.

    A string is inline JSON if it starts with a brace, else a built-in name (which wins over a file of that
    name), else a file. Raises `SchemaError`, one line with field, value and what is allowed.
    """
    if isinstance(spec, InputSchema):
        return spec
    if isinstance(spec, Mapping):
        return _validated(dict(spec), "schema")
    if isinstance(spec, str) and spec.lstrip().startswith("{"):
        return _validated(_parsed_json(spec, "inline schema"), "inline schema")
    if isinstance(spec, str) and spec in TYPES:
        return _from_file(BUILTIN / f"{spec}.json")
    return _from_file(Path(spec))


def _from_file(path: Path) -> InputSchema:
    if path.suffix not in {".json", ".toml"} and not path.exists():
        close = difflib.get_close_matches(str(path), TYPES, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise SchemaError(f"no schema named {str(path)!r}{hint}; allowed are {', '.join(TYPES)}", fix=_FORMS)
    if path.suffix not in {".json", ".toml"}:
        raise SchemaError(f"suffix {path.suffix!r} is not .json or .toml", where=str(path), fix=_FORMS)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SchemaError(f"cannot be read ({error.strerror})", where=str(path), fix=_FORMS) from error
    except UnicodeDecodeError as error:
        raise SchemaError(f"not UTF-8 at byte {error.start}", where=str(path)) from None
    parse = _parsed_toml if path.suffix == ".toml" else _parsed_json
    return _validated(parse(text, str(path)), str(path))


def _parsed_json(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, where))
    except (json.JSONDecodeError, RecursionError) as error:
        raise SchemaError(f"not JSON ({error})", where=where, fix="correct it") from None


def _parsed_toml(text: str, where: str) -> Any:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SchemaError(f"not TOML ({error})", where=where, fix="correct it") from None


def _unique(pairs: Iterable[tuple[str, Any]], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise SchemaError(f"field {name} is given twice", where=where, fix="keep one of them")
        found[name] = value
    return found


def _validated(data: Any, where: str) -> InputSchema:
    if not isinstance(data, dict):
        raise SchemaError("not an object with fields", where=where, fix=f"allowed are {', '.join(_fields(()))}")
    try:
        return InputSchema.model_validate(data)
    except ValidationError as error:
        raise SchemaError(_problem(error), where=where) from None


def _problem(error: ValidationError) -> str:
    """Return one problem; an unknown field first, since a mistyped name leaves a required one missing too."""
    problems = error.errors(include_url=False)
    for problem in problems:
        if problem["type"] == "extra_forbidden":
            return _unknown(tuple(map(str, problem["loc"])))
    first = problems[0]
    if first["type"] == "missing":
        allowed = f": allowed are {', '.join(TYPES)}" if first["loc"] == ("type",) else ""
        return f"field {'.'.join(map(str, first['loc']))} is missing{allowed}"
    if first["type"] == "value_error" and str(first["ctx"]["error"]).startswith("field"):
        return ": ".join((*map(str, first["loc"]), str(first["ctx"]["error"])))
    return first_problem(error).replace("value error, ", "")


def _unknown(location: tuple[str, ...]) -> str:
    known = _fields(location[:-1])
    close = difflib.get_close_matches(location[-1], known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"unknown field {'.'.join(location)}{hint}: allowed are {', '.join(known)}"


def _fields(location: tuple[str, ...]) -> list[str]:
    model: type[BaseModel] = InputSchema
    for name in location:
        model = model.model_fields[name].annotation  # type: ignore[assignment]
    return sorted(model.model_fields)
