"""The language that a caller wants, and answers in it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request

from polygon.domain.message import Language, Message, is_message_data, message_from, say


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


def in_language(data: Any, language: Language) -> Any:
    """An answer with its messages (also those that were stored as plain data) as words of a language."""
    if isinstance(data, Message):
        return say(data, language)
    if is_message_data(data):
        return say(message_from(data), language)
    if isinstance(data, dict):
        return {key: in_language(value, language) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [in_language(item, language) for item in data]
    return data
