"""HEAD: the headers that GET would have, and no body, of every address that GET has."""

from __future__ import annotations

import asyncio
from typing import Any

from polygon.web.guard import Message, Receive, Scope, Send


class HeadAsGet:
    """ASGI middleware: a HEAD request is answered as GET until the headers are sent; then whoever asked has gone."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        told = asyncio.Event()

        async def headers_alone(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})
                told.set()

        body = iter([await receive()])

        async def until_told() -> Message:
            part = next(body, None)
            if part is not None:
                return part
            await told.wait()  # a stream of events would not end by itself
            return {"type": "http.disconnect"}

        await self.app({**scope, "method": "GET"}, until_told, headers_alone)
