"""A real server in a process of its own, with a plan in it, for the tests of API and page."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the web application's libraries are not installed (pip install -e '.[web]')")

from polygon.commands.serve import main
from polygon.formats.convert_plan import plan_data
from polygon.formats.serialization import format_json
from tests.exported_plans import planned, wide
from tests.patience import PATIENCE_S
from tests.real_programs import Program

ROOT = Path(__file__).resolve().parents[2]


class Server:
    """A running `python -m polygon.serve` and its data.

    It is forked from a process that has loaded what it needs, unless it is to be started `anew`, as from a shell: that
    takes six CPU-seconds.
    """

    def __init__(self, folder: Path, *arguments: str, anew: bool = False) -> None:
        self.folder = folder
        self.process: Program | subprocess.Popen[str]
        words = ["--port", "0", "--database", "jobs.sqlite", *arguments]
        if anew:
            environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'comm'}"}
            command = [sys.executable, "-m", "polygon.serve", *words]
            self.process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, env=environment)
        else:
            self.process = Program(main, words, folder, forks=True)
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = re.search(r"http://[\d.]+:\d+", line)
        if not found:
            raise RuntimeError(line + self.process.stderr.read())
        self.url = found[0]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> str:
        """End it as a service manager would, or by another signal; what it has said since it began."""
        with self.process:
            self.process.send_signal(number)
            assert self.process.stderr is not None
            said = self.process.stderr.read()
            self.process.wait()
        return said

    def request(
        self, method: str, path: str, data: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and answer (parsed if it is JSON)."""
        body = data if isinstance(data, bytes) or data is None else format_json(data).encode()
        asked = urllib.request.Request(
            self.url + path, body, {"Content-Type": "application/json", **(headers or {})}, method=method
        )
        try:
            with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
                status, got, text = answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            with error:
                status, got, text = error.code, dict(error.headers), error.read()
        got = {key.lower(): value for key, value in got.items()}
        return status, got, json.loads(text) if text and "json" in got.get("content-type", "") else text.decode()


def run_lines(steps: int, first: int = 0, seconds: float = 0.5, *, end: bool = True) -> str:
    """A rank's log: a run, steps that take turns between two lengths, the end."""
    rows: list[dict[str, Any]] = [
        {"type": "run", "rank": 0, "device": "cpu", "first_step": first, "options": {"steps": str(steps)}}
    ]
    rows += [{"type": "step", "step": i, "seconds": seconds + i % 2, "loss": 5 - 0.01 * i} for i in range(first, steps)]
    return "".join(json.dumps(row) + "\n" for row in [*rows, *([{"type": "end"}] * end)])


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests of a worker process."""
    running = Server(tmp_path_factory.mktemp("server"))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def plan_id(server: Server) -> str:
    """A plan on two campuses, uploaded."""
    status, _, row = server.request("POST", "/api/v1/plans", plan_data(*planned()))
    assert status == 201
    return str(row["id"])


@pytest.fixture(scope="session")
def wide_plan(server: Server) -> str:
    """A plan over ten regions of the world, whose stages span regions."""
    status, _, row = server.request("POST", "/api/v1/plans", plan_data(*wide()))
    assert status == 201
    return str(row["id"])
