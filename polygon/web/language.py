"""English and Chinese of what the server says: the planner writes English, and known sentences are put into Chinese.

`strings.json` is the one catalogue of words, of the page and of the server. A sentence of the server is a pair of
templates: `{name}` stands for names and numbers, which stay as they are, `<name>` for a part that is translated by
itself. What no template fits stays English.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from importlib import resources
from typing import Annotated, Any, Literal

from fastapi import Depends, Request

Language = Literal["en", "zh"]

WORDS = frozenset(
    {"detail", "error", "note", "notes", "reason", "idea", "text", "what", "limited_by", "memory_owner", "layers",
     "formula", "numbers", "start", "left_out", "found", "assumptions"}
)  # fmt: skip
"""Keys of answers whose text is for people."""

PLACE = re.compile(r"\{\w+\}|<\w+>")


def preferred(accept_language: str) -> Language:
    """The better of the two languages by an Accept-Language header; English where it names neither."""
    best, chosen = 0.0, "en"
    for part in accept_language.lower().split(","):
        name, _, quality = part.strip().partition(";q=")
        try:
            weight = float(quality) if quality else 1.0
        except ValueError:
            continue
        language = name.split("-")[0]
        if language in ("en", "zh") and weight > best:
            best, chosen = weight, language
    return "zh" if chosen == "zh" else "en"


async def _asked(request: Request) -> Language:
    return preferred(request.headers.get("accept-language", ""))


Asked = Annotated[Language, Depends(_asked)]
"""Parameter of an operation: the language that its caller wants."""


def catalogue() -> dict[str, Any]:
    """All words: of the page by key, and of the server as pairs of templates."""
    return dict(json.loads(resources.files("polygon.web").joinpath("strings.json").read_text("utf-8")))


@lru_cache(maxsize=1)
def _templates() -> list[tuple[str, re.Pattern[str], str]]:
    """Patterns of English sentences and their Chinese templates, as they are tried; each with its longest literal part,
    without which it need not be.

    Lines of validator and ledger first, as these hold other sentences; then sentences in several parts, so that no
    place takes in the parts that follow; then those with most words of their own.
    """

    def order(pair: list[str]) -> tuple[bool, bool, int]:
        line = any(part in pair[0] for part in ("found <found>", "not JSON: ", "not YAML: ", " [<source>]"))
        own = PLACE.sub("", pair[0])
        return not line, "; " not in own, -len(own)

    rows = []
    for english, chinese in sorted(catalogue()["server"], key=order):
        pattern, last = "", 0
        for place in PLACE.finditer(english):
            pattern += re.escape(english[last : place.start()]) + f"(?P<{place[0][1:-1]}>.+?)"
            last = place.end()
        literal = max(PLACE.split(english), key=len)
        rows.append((literal, re.compile(pattern + re.escape(english[last:]), re.DOTALL), chinese))
    return rows


@lru_cache(maxsize=5000)
def in_chinese(text: str) -> str | None:
    """The Chinese of a sentence of the server; None where no template fits."""
    for literal, pattern, chinese in _templates():
        match = pattern.fullmatch(text) if literal in text else None
        if match:

            def part(place: re.Match[str], found: re.Match[str] = match) -> str:
                value = found[place[0][1:-1]]
                return (in_chinese(value) or value) if place[0][0] == "<" else value

            return PLACE.sub(part, chinese)
    return None


def say(text: str, language: Language) -> str:
    """A sentence of the server in a language."""
    return (in_chinese(text) or text) if language == "zh" else text


def in_language(data: Any, language: Language) -> Any:
    """An answer with its words (`WORDS`) in a language."""
    if language == "en":
        return data
    if isinstance(data, dict):
        return {key: _words(value) if key in WORDS else in_language(value, language) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [in_language(item, language) for item in data]
    return data


def _words(value: Any) -> Any:
    if isinstance(value, str):
        return say(value, "zh")
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return [say(item, "zh") for item in value]
    return in_language(value, "zh")
