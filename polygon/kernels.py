"""How numba compiles kernels that only other kernels call."""

from __future__ import annotations

from numba import njit

inner = njit(cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy")  # type: ignore[call-overload]
"""For functions of a bank that only kernels call; called from Python they crash. What Python would need to call them,
the checks of divisions, and whole-array expressions (each brings its own functions along) made up more than half of the
time that compiling took."""
