"""What stands before every request: host check, optional token, size limit; and the headers of every answer."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from polygon.web.language import preferred, say

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


class Guard:
    """ASGI middleware.

    A request that comes from another origin's page is refused: browsers send `Sec-Fetch-Site` and `Origin`, and no
    CORS header is ever sent. The token is asked of /api alone, as `Authorization: Bearer TOKEN` (never in an address,
    which is kept in histories and logs).
    """

    def __init__(self, app: Any, token: str = "") -> None:
        self.app = app
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}

        async def sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(key.lower().encode(), value.encode()) for key, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *extra]
            await send(message)

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
                await _answer(sealed, headers, 413, f"the request is larger than {MOST_BYTES} bytes")
                return
            if message["type"] != "http.request" or not message.get("more_body", False):
                break
        queue = iter(parts)

        async def replay() -> Message:
            part = next(queue, None)
            return await receive() if part is None else part

        await self.app(scope, replay, sealed)

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        if headers.get("sec-fetch-site") == "cross-site":
            return 403, "requests of other sites' pages are refused"
        origin = headers.get("origin", "")
        if origin and origin.split("://")[-1] != headers.get("host", ""):
            return 403, "requests of other sites' pages are refused"
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > MOST_BYTES:
            return 413, f"the request is larger than {MOST_BYTES} bytes"
        if self.token and scope["path"].startswith("/api/"):
            given = headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self.token.encode()):
                return 401, "the token is missing or wrong"
        return None


async def _answer(send: Send, asked: dict[str, str], status: int, text: str) -> None:
    body = json.dumps({"detail": say(text, preferred(asked.get("accept-language", "")))}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
