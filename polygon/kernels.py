"""How numba compiles the kernels of the search: as little as will do, for every user waits for it once.

Half of the time went into what these kernels do without: reference counts of arrays (so they allocate nothing: callers
hand in room to work in), checks of divisions, and ways to call them from C.
"""

from __future__ import annotations

from numba import njit

kernel = njit(cache=True, no_cfunc_wrapper=True, error_model="numpy", _nrt=False)  # type: ignore[call-overload]
"""For functions that Python calls."""

inner = njit(  # type: ignore[call-overload]
    cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy", _nrt=False
)
"""For functions that only kernels call; called from Python they crash."""
