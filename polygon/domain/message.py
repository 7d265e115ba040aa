"""What the program tells people, as data: an identifier and its arguments; the words stand in `words.json`.

Programs ask a message for its `kind` and its arguments, never for its words: a template may be reworded, or put into
another language, and nothing but the words changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from string import Formatter
from typing import Any, Literal

Language = Literal["en", "zh"]

LANGUAGES: tuple[Language, ...] = ("en", "zh")
"""In the order in which the catalogue gives them."""


class Message:
    """Something to be said: what it is and its arguments (names, numbers in SI units, messages, tuples of them).

    `str` gives its English words. No dataclass, so that `dataclasses.asdict` of what holds one leaves it whole.
    """

    __slots__ = ("arguments", "kind")

    kind: str
    arguments: Mapping[str, Any]

    def __init__(self, kind: str, /, **arguments: Any) -> None:
        self.kind = kind
        self.arguments = arguments

    __contains__ = None
    """Nobody looks for words in a message."""

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return self.kind == other.kind and self.arguments == other.arguments

    def __hash__(self) -> int:
        return hash((self.kind, tuple(self.arguments)))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join([repr(self.kind), *(f'{k}={v!r}' for k, v in self.arguments.items())])})"
        )

    def __str__(self) -> str:
        return say(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: kind, arguments, and the English words beside them."""
        arguments = {name: plain(value) for name, value in self.arguments.items()}
        return {"kind": self.kind, "arguments": arguments, "text": say(self)}


class Violation(Message):
    """A rule that a plan breaks; `stage` and `worker` say where, the other arguments name and measure it."""

    __slots__ = ()

    @property
    def stage(self) -> int | None:
        """Stage that breaks it; None where it is the plan as a whole."""
        return self.arguments.get("stage")

    @property
    def worker(self) -> int | None:
        """Worker of the stage; None where it is the stage as a whole."""
        return self.arguments.get("worker")


def plain(data: Any) -> Any:
    """Data with its messages as plain data."""
    if isinstance(data, Message):
        return data.to_dict()
    return [plain(item) for item in data] if isinstance(data, (list, tuple)) else data


def message_from(data: Mapping[str, Any]) -> Message:
    """The message that `Message.to_dict` gave."""

    def value(part: Any) -> Any:
        if is_message_data(part):
            return message_from(part)
        return tuple(value(item) for item in part) if isinstance(part, list) else part

    return Message(data["kind"], **{name: value(part) for name, part in data["arguments"].items()})


def is_message_data(data: Any) -> bool:
    """Whether plain data is that of a message."""
    return isinstance(data, Mapping) and set(data) == {"kind", "arguments", "text"}


@cache
def words() -> dict[str, dict[str, Any]]:
    """Words: `messages`, by kind templates in `LANGUAGES`; `phrases`, by English words their Chinese."""
    return dict(json.loads(resources.files("polygon.domain").joinpath("words.json").read_text("utf-8")))


def say(message: Message | str, language: Language = "en") -> str:
    """The words of a message in a language; text is said as it is.

    Templates are those of `str.format` with named places. Messages in a place are said in the same language, tuples
    are joined by what follows the colon (a comma if nothing does), ``{n_bytes:memory}`` stands for bytes in MiB, GiB or
    TiB, ``{n_bytes:traffic}`` for bytes in kB, MB, GB, TB or PB, ``{n:stage|stages}`` for a number and its noun, and
    ``{word:phrase}`` for its `phrases`.
    """
    if isinstance(message, str):
        return message
    template: str = words()["messages"][message.kind][LANGUAGES.index(language)]
    arguments, fill, said = message.arguments, _Words(language), []
    for text, name, spec, how in _parts(template):
        said.append(text)
        if name is not None:
            value = fill.convert_field(arguments[name], how) if how else arguments[name]
            said.append(fill.format_field(value, spec or ""))
    return "".join(said)


MEMORY_UNITS = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20))
"""Of memory, largest first."""
TRAFFIC_UNITS = (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
"""Of what is sent, largest first."""


@cache
def _parts(template: str) -> tuple[tuple[str, str | None, str | None, str | None], ...]:
    """A template's text and the place behind it: its name, what follows the colon, and what follows the exclamation
    mark."""
    return tuple(Formatter().parse(template))


class _Words(Formatter):
    """Fills templates."""

    def __init__(self, language: Language) -> None:
        self._language = language

    def format_field(self, value: Any, format_spec: str) -> str:
        if type(value) is float and format_spec not in ("memory", "traffic") and "|" not in format_spec:
            return format(value, format_spec)
        if isinstance(value, Message):
            return say(value, self._language)
        if isinstance(value, (tuple, list)):
            return (format_spec or ", ").join(self.format_field(item, "") for item in value)
        if format_spec == "memory":
            unit, scale = next(((u, s) for u, s in MEMORY_UNITS if value >= s), MEMORY_UNITS[-1])
            return f"{value / scale:.1f} {unit}"
        if format_spec == "traffic":
            unit, scale = next(((u, s) for u, s in TRAFFIC_UNITS if value >= s), TRAFFIC_UNITS[-1])
            return f"{value / scale:.4g} {unit}"
        if format_spec == "phrase":
            return str(value) if self._language == "en" else words()["phrases"].get(value, str(value))
        if "|" in format_spec:
            one, many = format_spec.split("|")
            return f"{value} {one if value == 1 else many}"
        try:
            return str(super().format_field(value, format_spec))
        except (OverflowError, ValueError):
            if not isinstance(value, int):
                raise
            return "> 1e+308" if value > 0 else "< -1e+308"  # more digits than a float has, or than Python writes
