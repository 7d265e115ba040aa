"""What several tests need and takes long to make: made by the first process of a run that asks, read by the others."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar

import pytest
from filelock import FileLock

Made = TypeVar("Made")


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[], Made]) -> Made:
    """What `make` returns, which can be pickled; all processes of a run of pytest share it by its name."""
    base = factory.getbasetemp()
    # Processes of pytest-xdist have folders of their own beside one another.
    path = (base.parent if base.name.startswith("popen-") else base) / f"{name}.pickle"
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            path.write_bytes(pickle.dumps(make()))
    found: Made = pickle.loads(path.read_bytes())
    return found
