"""TCP ports for servers that tests start in other processes.

They lie below those that the system itself gives to outgoing connections (from 32768 in Linux), in a part for each test
worker and no port twice in a row: nobody else takes one between the choice and the server's start.
"""

from __future__ import annotations

import os
import random
import socket

_FIRST, _PER_WORKER, _WORKERS = 10_000, 1000, 20
_place = random.Random().randrange(_PER_WORKER)
"""Where in its part this process is; two test runs on one machine begin at different places."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody uses."""
    global _place
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    for _ in range(_PER_WORKER):
        _place = (_place + 1) % _PER_WORKER
        port = _FIRST + worker * _PER_WORKER + _place
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port among {_PER_WORKER} from {_FIRST + worker * _PER_WORKER}")
