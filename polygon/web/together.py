"""HTTP connections that send an answer's head and body in one piece.

The web server hands the head on before it has the body, and the event loop sends each at once: twice a system call, and
whoever waits for the answer wakes for its head and sleeps again.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.auto import AutoHTTPProtocol


class Together:
    """A connection that sends what was written in one turn of the event loop at the turn's end."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._parts: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def write(self, part: bytes) -> None:
        """Send it, after what was written before."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(part)

    def close(self) -> None:
        """Send what is left, and end."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._parts:
            self._transport.write(b"".join(self._parts))
            self._parts.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class TogetherProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """The web server's protocol on such connections."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        super().connection_made(cast(Any, Together(cast(asyncio.Transport, transport))))
