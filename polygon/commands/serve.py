"""Serve the web application.

    python -m polygon.serve [--host 127.0.0.1] [--port 5000] [--token TOKEN] [--allow-host NAME]

Jobs and plans are kept in an SQLite file; deployments are written below `deployments/`. Nothing else of the machine is
served. Whoever lets other machines in (--host) must give every user a token, which the page asks for, and name by
--allow-host what they call this machine: requests under any other name are refused.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from polygon.commands import cli
from polygon.domain.errors import InputError


def main(argv: list[str] | None = None) -> int:
    """Entry point; see the module's docstring."""
    parser = cli.CommandParser(prog="polygon serve", description="Serve the web application.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default %(default)s: this machine)")
    parser.add_argument("--port", type=cli.whole(0, 65535), default=5000, help="default %(default)s; 0: any free one")
    parser.add_argument("--token", action="append", default=[], metavar="[USER=]TOKEN",
                        help="a user's; may be given several times (or POLYGON_TOKEN)")  # fmt: skip
    parser.add_argument("--allow-host", action="append", default=[], metavar="NAME",
                        help="a name by which browsers may call this, beside 127.0.0.1 and localhost")  # fmt: skip
    parser.add_argument("--database", type=Path, default=Path("polygon.sqlite"), help="default %(default)s")
    parser.add_argument("--deployments", type=Path, default=Path("deployments"), help="default %(default)s/")
    parser.add_argument("--runs", type=Path, default=Path("runs"),
                        help="rehearsals and runs that were opened in the page (default %(default)s/)")  # fmt: skip
    parser.add_argument("--logs", type=Path, action="append", default=[], metavar="FOLDER",
                        help="follow the runs that write their logs there; may be given several times")  # fmt: skip
    parser.add_argument("--allow-rehearsals", action="store_true",
                        help="let users rehearse plans on this machine's processors")  # fmt: skip
    parser.add_argument("--instances", type=Path, help="folder of clusters to offer (default: the project's)")
    args = parser.parse_args(argv)
    try:
        import uvicorn

        from polygon.web.app import LOOPBACK, Settings, create_app
        from polygon.web.together import TogetherProtocol
    except ImportError as error:
        raise InputError(
            f"serve: found no {error.name}, expected it installed (pip install 'polygon-train[web]')"
        ) from None
    tokens = _tokens(args.token or [t for t in [os.environ.get("POLYGON_TOKEN", "")] if t])
    if not tokens and args.host not in LOOPBACK:
        raise InputError(f"host: found {args.host} and no --token, expected one where other machines are let in")
    hosts = LOOPBACK | {args.host.lower()} | {name.lower() for name in args.allow_host}
    from polygon.formats.files import shipped_instances

    shipped = shipped_instances()
    instances = args.instances or (shipped if shipped.is_dir() else None)
    listening = _listen(args.host, args.port)
    app = create_app(
        Settings(
            database=args.database,
            deployments=args.deployments,
            instances=instances,
            tokens=tokens,
            hosts=hosts,
            runs=args.runs,
            logs=tuple(args.logs),
            rehearsals=args.allow_rehearsals,
        )
    )
    config = uvicorn.Config(
        app, host=args.host, port=args.port, http=TogetherProtocol, log_level="warning", server_header=False,
        timeout_graceful_shutdown=2,
    )  # fmt: skip

    class Server(uvicorn.Server):
        """Says where it listens once it does."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            if self.started:
                host, port = self.servers[0].sockets[0].getsockname()[:2]
                cli.Talk().say(f"polygon is at http://{host}:{port}")

    server = Server(config)
    server.run(sockets=[listening])
    return cli.EXIT_OK if server.started else cli.EXIT_BAD_INPUT


def _tokens(given: list[str]) -> dict[str, str]:
    """Tokens by their users, who are numbered where they have no name.

    Raises
    ------
    InputError
        For a user who is named twice, and for an empty token.
    """
    tokens: dict[str, str] = {}
    for i, text in enumerate(given):
        user, _, token = text.rpartition("=")
        user = user or f"user-{i + 1}"
        if not token or user in tokens:
            raise InputError(f"token: found {text!r}, expected USER=TOKEN with a user of its own and a token")
        tokens[user] = token
    return tokens


def _listen(host: str, port: int) -> socket.socket:
    """A socket at an address, before anything else is started.

    Raises
    ------
    InputError
        For a host that is none of this machine's, and a port that is taken or not for everybody.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InputError(f"host: found {host!r} ({error.strerror}), expected an address of this machine") from None
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise InputError(
            f"port: found {host}:{port} ({error.strerror}), expected a free address (--port 0: any port)"
        ) from None
    return listening


if __name__ == "__main__":
    sys.exit(cli.run(main))
