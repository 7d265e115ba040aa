"""One lab at a time on a machine, whatever the number of test workers."""

import fcntl
import tempfile
from pathlib import Path

import pytest

from polygon.commands import cli
from runners.lab_net.linux import missing_capability


@pytest.fixture(scope="session")
def lab_capability():
    """Skip where namespaces or TUN devices cannot be had, and say why."""
    missing = missing_capability()
    if missing:
        pytest.skip(f"no lab on this machine: {missing}")


@pytest.fixture
def alone(lab_capability):
    """Hold the machine's lab lock: two labs at once would share the cores and measure each other."""
    with (Path(tempfile.gettempdir()) / "polygon-lab-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def status_of():
    """A function: with what status a command ends that is given these words."""

    def status(main, words):
        try:
            return cli.run(main, words)
        except SystemExit as stop:
            return stop.code

    return status
