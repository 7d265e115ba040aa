"""Settings for all tests: no law depends on the machine's speed, on luck or on other tests, and none leaves traces."""

import gc
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

# See tests/nightly.py.
settings.register_profile("nightly", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=1000)
settings.register_profile("polygon", settings.get_profile("nightly"), derandomize=True, max_examples=100)
# For benchmarks/mutants.py, which asks whether a law fails and not for the smallest example.
settings.register_profile("unshrunk", settings.get_profile("polygon"), phases=(Phase.explicit, Phase.generate))
settings.load_profile("polygon")
# As the Makefile does: lab programs set it when they are imported, wherever it is not set.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's compiler takes the machine's vector units as its processor names them: to compile a program for each and see
# whether it runs takes ten times as long as to compile what a test asks for.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

SLOW = frozenset({
    "accuracy", "api/test_quickstart.py", "commands/test_pareto.py", "docs", "export/test_deepspeed_run.py",
    "export/test_managed_hosts.py", "export/test_started.py", "export/test_targets.py", "jit", "lab",
    "planning/test_alternatives.py", "planning/test_exact.py", "planning/test_monotone.py",
    "planning/test_naive_plans.py", "planning/test_objectives.py", "recipes", "rivals",
    "runners/test_bench_device.py", "runners/test_checkpoint.py", "runners/test_data_files.py",
    "runners/test_export_hf.py", "runners/test_launch.py", "runners/test_local_updates.py",
    "runners/test_native_sweep.py", "runners/test_optimizers.py", "runners/test_training.py",
    "test_environment.py", "test_wheel.py", "web/test_api.py", "web/test_fuzz.py", "web/test_page.py",
    "web/test_runs.py",
})  # fmt: skip
"""Files and folders that `--quick` leaves out: browsers, notebooks, many ranks, long searches."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
VARIABLES = ("CUDA_", "LOCAL_", "MASTER_", "NUMBA_", "OMP_", "POLYGON_", "RANK", "WANDB_", "WORLD_")
"""How names of environment variables begin that we read or set, directly or through libraries."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--quick`, for `make quick`."""
    parser.addoption("--quick", action="store_true", help="leave out files whose tests take long")


def pytest_configure() -> None:
    """Programs that tests interrupt see it: what a shell starts in the background ignores Ctrl-C, and hands that on."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what takes long."""
    path = collection_path.relative_to(Path(__file__).parent).as_posix()
    return True if config.getoption("--quick") and path in SLOW else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Pages first: they wait for browsers and servers, while other workers compute."""
    items.sort(key=lambda item: item.path.parent.name != "web")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported now stays: Python need not look through half a million objects meanwhile, nor later, whenever it
    collects what tests left, which it does less often: they make many objects and leave few."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()


def pytest_collection_finish() -> None:
    """Whatever was imported last, ranks are forked from a server that has loaded what they need."""
    if "tests.real_ranks" in sys.modules:
        sys.modules["tests.real_ranks"].prepare_server()


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
