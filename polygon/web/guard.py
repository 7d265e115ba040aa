"""What stands before every request: host and origin check, tokens, size limit; and the headers of every answer."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from polygon.domain.message import Message as Words
from polygon.domain.message import say
from polygon.web.language import preferred

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MOST_BYTES = 8_000_000
"""Of a request's body."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Scripts come from this host alone and never from the page's text; charts set inline styles."""
SEALED = [(key.lower().encode(), value.encode()) for key, value in HEADERS.items()]
"""The same as they are sent."""


class Guard:
    """ASGI middleware.

    The name in `Host` must be one of `hosts`: a page of another site that lets its own name point here (DNS rebinding)
    is of the same origin for the browser, and only the name tells it apart. A request that comes from another origin's
    page is refused: browsers send `Sec-Fetch-Site` and `Origin`, and no CORS header is ever sent. The token is asked of
    /api alone, as `Authorization: Bearer TOKEN` (never in an address, which is kept in histories and logs).
    """

    def __init__(self, app: Any, tokens: Mapping[str, str], hosts: frozenset[str]) -> None:
        self.app = app
        self.tokens = tokens
        """Of users, by their names; none: nobody is asked."""
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}

        begun = False

        async def sealed(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [*message.get("headers", []), *SEALED]
            await send(message)

        scope.setdefault("state", {})["user"] = ""
        wrong = self._refusal(scope, headers)
        if wrong is not None:
            await _answer(sealed, headers, *wrong)
            return
        taken = 0
        parts: list[Message] = []
        # The body is read here, so that a chunked one cannot grow without limit.
        while True:
            message = await receive()
            parts.append(message)
            taken += len(message.get("body", b""))
            if taken > MOST_BYTES:
                await _answer(sealed, headers, 413, Words("refused.too_large", most_bytes=MOST_BYTES))
                return
            if message["type"] != "http.request" or not message.get("more_body", False):
                break
        queue = iter(parts)

        async def replay() -> Message:
            part = next(queue, None)
            return await receive() if part is None else part

        try:
            await self.app(scope, replay, sealed)
        except asyncio.CancelledError:  # the server ends and waits no longer
            if begun:
                raise
            await _answer(sealed, headers, 503, Words("refused.ending"))

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, Words] | None:
        host = host_name(headers.get("host", ""))
        if host and host not in self.hosts:
            return 421, Words("refused.host", host=host)
        if headers.get("sec-fetch-site") == "cross-site":
            return 403, Words("refused.other_site")
        origin = headers.get("origin", "")
        if origin and origin.split("://")[-1] != headers.get("host", ""):
            return 403, Words("refused.other_site")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > MOST_BYTES:
            return 413, Words("refused.too_large", most_bytes=MOST_BYTES)
        if self.tokens and scope["path"].startswith("/api/"):
            given = headers.get("authorization", "").removeprefix("Bearer ").encode()
            users = [user for user, token in self.tokens.items() if hmac.compare_digest(given, token.encode())]
            if not users:
                return 401, Words("refused.token")
            scope["state"]["user"] = users[0]
        return None


def host_name(host: str) -> str:
    """The name of a Host header or an address, without port and brackets."""
    name = host.rsplit("]", 1)[0].removeprefix("[") if host.startswith("[") else host.rsplit(":", 1)[0]
    return name.lower().rstrip(".")


async def _answer(send: Send, asked: dict[str, str], status: int, text: Words) -> None:
    body = json.dumps({"detail": say(text, preferred(asked.get("accept-language", "")))}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
