"""Chat templates of a checkpoint, rendered in a sandbox: what text a chat adds around the messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from collapse.checkpoint import Checkpoint
from collapse.token_ids import names_in

Message = Mapping[str, Any]
SAMPLE = "a"  # stands for a message's text in the sample chats; one byte, whose token is kept anyway
SHAPES: tuple[tuple[str, ...], ...] = (
    ("user",),
    ("system", "user"),
    ("user", "assistant"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user"),
)
# Templates may print today's date. Every month, day and year of a working life, so that nothing depends on
# the day on which the analysis ran.
DATES = tuple(
    dict.fromkeys(
        (
            *(date(2026, 1 + at % 12, 1 + at % 28) for at in range(84)),
            *(date(2026, 1, at) for at in (29, 30, 31)),
            *(date(year, 6, 15) for year in range(2020, 2050)),
        )
    )
)


@dataclass(frozen=True)
class ChatTemplate:
    """One Jinja template and the special-token strings that it may print."""

    source: str
    specials: Mapping[str, str]

    @cached_property
    def _compiled(self) -> Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        return environment.from_string(self.source)

    def render(self, messages: Sequence[Message], *, generate: bool, today: date = DATES[0]) -> str | None:
        """Return the chat as text, or None where the template refuses such a chat."""
        values = {**self.specials, "messages": messages, "add_generation_prompt": generate}
        try:
            return self._compiled.render(values, strftime_now=today.strftime)
        except Exception:  # a template is somebody else's program; whatever it trips over is a refusal
            return None

    def samples(self) -> tuple[str, ...]:
        """Return the template's sample chats: all role shapes, with and without the generation prompt."""
        dates = DATES if "strftime_now" in self.source else DATES[:1]
        texts = [
            self.render(_chat(shape, SAMPLE), generate=generate, today=today)
            for shape in SHAPES
            for generate in (False, True)
            for today in dates
        ]
        return tuple(dict.fromkeys(text for text in texts if text is not None))

    def wrapper(self) -> Callable[[str], str] | None:
        """Return a function that puts a text into a one-message chat with generation prompt, or None.

        Templates often trim a message; then the wrapped text is trimmed too.
        """
        if self.render(_chat(("user",), SAMPLE), generate=True) is None:
            return None
        return lambda text: self.render(_chat(("user",), text), generate=True) or text


def _chat(roles: Sequence[str], text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role in roles]


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)


class _Generation(loopcontrols):
    """Accepts `{% generation %} ... {% endgeneration %}`, which marks the assistant's text, as nothing."""

    tags = {"generation"}  # noqa: RUF012 (the name and type that jinja2 asks for)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def chat_templates(checkpoint: Checkpoint) -> tuple[ChatTemplate, ...]:
    """Return the chat templates of a checkpoint: its .jinja files and those in its JSON files."""
    settings = checkpoint.read_json("tokenizer_config.json") or {}
    specials = dict(names_in({**(checkpoint.read_json("special_tokens_map.json") or {}), **settings}))
    named = {key: value for key, value in specials.items() if key.endswith("_token")}
    return tuple(ChatTemplate(source, named) for source in dict.fromkeys(_sources(checkpoint, settings)))


def _sources(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> Iterator[str]:
    for name in checkpoint.side_files:
        if name.endswith(".jinja"):
            yield (checkpoint.root / name).read_text(encoding="utf-8")
    for holder in (settings, checkpoint.read_json("chat_template.json") or {}):
        template = holder.get("chat_template")
        if isinstance(template, str):
            yield template
        elif isinstance(template, list):
            yield from (entry["template"] for entry in template if isinstance(entry, dict) and "template" in entry)
