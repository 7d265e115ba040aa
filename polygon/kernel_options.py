"""How numba compiles the kernels of the search: as little as will do, for every user waits for it once.

These kernels do without reference counts of arrays (so they allocate nothing: callers hand in room to work in), checks
of divisions, and ways to call them from C; together a fifth of the time that compiling took.
"""

from __future__ import annotations

import gc
from typing import Any

from numba import njit
from numba.core import event

kernel = njit(cache=True, no_cfunc_wrapper=True, error_model="numpy", _nrt=False)  # type: ignore[call-overload]
"""For functions that Python calls."""

inner = njit(  # type: ignore[call-overload]
    cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy", _nrt=False
)
"""For functions that only kernels call; called from Python they crash."""


class _NoCollector(event.Listener):
    """Keeps Python's cyclic garbage collector out of compilations.

    They make millions of small objects that live until the end: looking through them took a tenth of the time.
    """

    depth = 0
    collects = False

    def on_start(self, _: Any) -> None:
        if self.depth == 0:
            self.collects = gc.isenabled()
            gc.disable()
        self.depth += 1

    def on_end(self, _: Any) -> None:
        self.depth -= 1
        if self.depth == 0 and self.collects:
            gc.enable()


event.register("numba:compile", _NoCollector())
