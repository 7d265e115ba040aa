"""The exceptions that polygon raises on purpose, in one tree."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from polygon.domain.message import Message, say


class PolygonError(Exception):
    """Root of the errors that polygon raises on purpose."""


class InputError(PolygonError):
    """Input that cannot be used; the message alone lets the user mend it (where, found, expected).

    Parameters
    ----------
    message : Message or str
        Text alone is said in English whatever the language: for what only the command line can meet.
    """

    def __init__(self, message: Message | str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return say(self.message)


class OutOfTimeError(PolygonError):
    """The time that was given ended before the answer was known; who set the limit says so."""


class Phrase(str):
    """Words about what was found, to be shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def fault(name: str | Message, found: object, expected: str | Message) -> InputError:
    """The error that says where, what was found there and what is allowed.

    Parameters
    ----------
    name : str or Message
        Field or place; empty where whoever catches the error knows it (`located`).
    found : object
        A `Message` or `Phrase` is shown as it is, None as nothing, all else by its `repr`.
    expected : str or Message
        A text with a name or number in it is a message; one without is its own key in the catalogue (`phrases`).
    """
    shown = "nothing" if found is None else found if isinstance(found, Message) else repr(found)
    if name == "":
        return InputError(Message("input.found", found=shown, expected=expected))
    return InputError(Message("input.expected", where=name, found=shown, expected=expected))


def require(condition: bool, name: str | Message, found: object, expected: str | Message) -> None:
    """Raise the `fault` that names the field, what was found and what is allowed, unless `condition` holds."""
    if not condition:
        raise fault(name, found, expected)


def require_number(value: float, name: str, *, above: float | None = None, at_least: float | None = None) -> None:
    """Require a finite number, optionally above or at least a limit."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if above is not None:
        require(is_number and value > above, name, value, Message("expected.number_above", limit=above))
    elif at_least is not None:
        require(is_number and value >= at_least, name, value, Message("expected.number_at_least", limit=at_least))
    else:
        require(is_number, name, value, "a finite number")


@contextmanager
def located(prefix: str | Message) -> Iterator[None]:
    """Put `prefix` (a file, a path ending in a dot) before the message of an `InputError` raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(_after(prefix, error.message)) from None


def _after(prefix: str | Message, fault: Message | str) -> Message | str:
    """A fault behind its place; what has a place of its own gets a longer one."""
    if isinstance(fault, Message) and fault.kind == "input.expected":
        where = fault["where"]
        texts = isinstance(prefix, str) and isinstance(where, str)
        longer = f"{prefix}{where}" if texts else Message("input.place", prefix=prefix, where=where)
        return Message("input.expected", **{**fault.arguments, "where": longer})
    if isinstance(fault, str) and isinstance(prefix, str):
        return prefix + fault
    if isinstance(fault, Message) and fault.kind == "input.found" and isinstance(prefix, str) and prefix.endswith(": "):
        return Message("input.expected", where=prefix[:-2], **fault.arguments)
    return Message("input.located", prefix=prefix, fault=fault)


def one_of(found: object, allowed: Iterable[str]) -> Message:
    """What to say is expected where `found` is none of the allowed words: the nearest first, then all."""
    words = sorted(allowed)
    near = difflib.get_close_matches(found, words, n=1, cutoff=0.5) if isinstance(found, str) else []
    if near:
        return Message("expected.nearest", nearest=near[0], words=tuple(words))
    return Message("expected.one_of", words=tuple(words))
