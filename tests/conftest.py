"""Settings for all tests: no law depends on the machine's speed, on luck or on other tests, and none leaves traces."""

import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings

# The same examples in every run: who changes nothing sees no new failure. `--hypothesis-profile=explore` draws others.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("polygon", settings.get_profile("explore"), derandomize=True)
# For benchmarks/mutants.py, which asks whether a law fails and not for the smallest example.
settings.register_profile("unshrunk", settings.get_profile("polygon"), phases=(Phase.explicit, Phase.generate))
settings.load_profile("polygon")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
VARIABLES = ("CUDA_", "LOCAL_", "MASTER_", "NUMBA_", "OMP_", "POLYGON_", "RANK", "WANDB_", "WORLD_")
"""How names of environment variables begin that we read or set, directly or through libraries."""


def process_state() -> dict[str, Any]:
    """What all tests of a process share, as far as tests and what they call are likely to change it."""
    torch = sys.modules.get("torch")
    return {
        "signal handlers": [signal.getsignal(number) for number in SIGNALS],
        "environment": {key: value for key, value in os.environ.items() if key.startswith(VARIABLES)},
        "current folder": Path.cwd(),
        "torch": torch and (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()),
    }


def seed_generators() -> None:
    """Let the global random generators begin as in every test."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - libraries draw from it
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def extensions_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What DeepSpeed compiles when it is first used is compiled in every run, once for all its processes.

    A compilation that was killed leaves a lock behind for which all later ones in the same folder wait for ever.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / "torch_extensions")


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Whoever changes what all tests of a process share puts back what was there."""
    seed_generators()
    before = process_state()
    yield
    after = process_state()
    if before["torch"] is None:  # imported by this test
        after["torch"] = None
    for number, handler in zip(SIGNALS, before["signal handlers"], strict=True):
        signal.signal(number, handler)
    os.chdir(before["current folder"])
    assert after == before
