"""The exceptions that polygon raises on purpose, in one tree."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class PolygonError(Exception):
    """Root of the errors that polygon raises on purpose."""


class InputError(PolygonError):
    """Input that cannot be used; the message alone lets the user mend it (where, found, expected)."""


class Phrase(str):
    """Words about what was found, to be shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def require(condition: bool, name: str, found: object, expected: str) -> None:
    """Raise `InputError` naming the field, what was found and what is allowed, unless `condition` holds."""
    if not condition:
        raise InputError(f"{name}: found {'nothing' if found is None else repr(found)}, expected {expected}")


def require_number(value: float, name: str, *, above: float | None = None, at_least: float | None = None) -> None:
    """Require a finite number, optionally above or at least a limit."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if above is not None:
        require(is_number and value > above, name, value, f"a number > {above:g}")
    elif at_least is not None:
        require(is_number and value >= at_least, name, value, f"a number >= {at_least:g}")
    else:
        require(is_number, name, value, "a finite number")


@contextmanager
def located(prefix: str) -> Iterator[None]:
    """Put `prefix` (a file, a path ending in a dot) before the message of an `InputError` raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{prefix}{error}") from None


def one_of(found: str, allowed: Iterable[str]) -> str:
    """What to say is expected where `found` is none of the allowed words: the nearest first, then all."""
    words = sorted(allowed)
    near = difflib.get_close_matches(found, words, n=1, cutoff=0.5)
    return f"{near[0]!r} (nearest) or another of {', '.join(words)}" if near else f"one of {', '.join(words)}"
