"""What a compiled kernel holds of other files, so that a kept one is never older than what it was made of.

numba keeps compiled kernels and makes one anew when the kernel's own file changes. But a kernel also holds the kernels
that it calls, constants, and the layout of named tuples, wherever they come from: here they are part of the stamp that
tells old from new.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType
from typing import Any

import numpy as np
from numba.core.dispatcher import Dispatcher

from polygon.jit.shipped import offer_shipped

CONSTANTS = (bool, int, float, str, tuple, np.ndarray, np.generic)
"""Types of values that numba compiles into a kernel."""

_stamps: dict[str, str] = {}
"""By file; kernels come after a file's imports, so whatever it has from others is there at its first kernel."""


def stamped(kernel: Any) -> Any:
    """A kernel that numba keeps in its cache, made anew when anything changes that it holds.

    Without a compiler (NUMBA_DISABLE_JIT) it is a plain function, and has no cache. The stamp's place is no public part
    of numba: in one that keeps it elsewhere, kernels are made anew when their own file changes, as numba has it.
    """
    cache: Any = getattr(kernel, "_cache", None)
    index: Any = getattr(cache, "_cache_file", None)
    if hasattr(index, "_source_stamp"):
        index._source_stamp = stamp(kernel.py_func.__globals__)
        index._load_index = _or_nothing(index._load_index)
        offer_shipped(cache, index._source_stamp)
    return kernel


def _or_nothing(load: Callable[[], dict[Any, Any]]) -> Callable[[], dict[Any, Any]]:
    """Take an index that cannot be read for an empty one: it names modules of an earlier version, or was cut short."""

    def load_what_can_be_read() -> dict[Any, Any]:
        try:
            return load()
        except (ImportError, AttributeError, EOFError, UnpicklingError):
            return {}

    return load_what_can_be_read


def stamp(names: dict[str, Any]) -> str:
    """Digest of a module's file, of the constants that it has, and of the files of others' kernels and named tuples.

    Parameters
    ----------
    names : dict
        The module's global names.
    """
    file = str(names["__file__"])
    if file not in _stamps:
        digest = hashlib.blake2b(Path(file).read_bytes())
        _stamps[file] = ""  # while it is worked out: for modules that know each other
        for name, value in sorted(names.items()):
            origin = _origin(value)
            if origin is not None:
                digest.update(stamp(origin).encode())
            elif isinstance(value, CONSTANTS) and not name.startswith("__"):
                digest.update(f"{name} {value!r}".encode())
        _stamps[file] = digest.hexdigest()
    return _stamps[file]


def _origin(value: Any) -> dict[str, Any] | None:
    """Global names of the module that a kernel or a named tuple comes from, or that has some; None for other values."""
    if isinstance(value, Dispatcher):
        names: dict[str, Any] = value.py_func.__globals__
        return names
    if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
        return vars(sys.modules[value.__module__])
    if isinstance(value, ModuleType) and any(isinstance(held, Dispatcher) for held in vars(value).values()):
        return vars(value)
    return None
