"""How numba compiles the kernels of the search: as little as will do, for every user waits for it once.

All but the general ones do without reference counts of arrays (so they allocate nothing: callers hand in room to work
in), checks of divisions, and ways to call them from C; together a fifth of the time that compiling took.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from numba import njit
from numba.core import event
from numba.core.dispatcher import Dispatcher
from numba.core.types import unliteral

from polygon.jit.cache import ensure_kernel_cache
from polygon.jit.inner_lowering import InnerCompiler
from polygon.jit.stamp import stamped

ensure_kernel_cache()
Function = TypeVar("Function", bound=Callable[..., Any])


def _kept(**options: Any) -> Callable[[Function], Function]:
    """A decorator that compiles a function when it is first called, once for all processes to come."""
    return lambda function: stamped(_without_literals(njit(cache=True, **options)(function)))


def _part_of_others(function: Function) -> Function:
    """A function that kernels may call; from Python it crashes."""
    options: dict[str, Any] = {
        "no_cpython_wrapper": True,
        "no_cfunc_wrapper": True,
        "error_model": "numpy",
        "_nrt": False,
    }
    part: Function = _without_literals(njit(pipeline_class=InnerCompiler, **options)(function))
    return part


def _without_literals(kernel: Any) -> Any:
    """Let kernels call this one with a constant as with any other number: numba makes another version for constants."""
    if isinstance(kernel, Dispatcher):
        template = kernel.get_call_template

        def unliteral_template(args: Sequence[Any], kws: Mapping[str, Any]) -> Any:
            return template(tuple(map(unliteral, args)), {name: unliteral(kind) for name, kind in kws.items()})

        kernel.get_call_template = unliteral_template  # type: ignore
    return kernel


general = _kept()
"""For functions that allocate arrays, or divide as Python does."""

kernel = _kept(no_cfunc_wrapper=True, error_model="numpy", _nrt=False)
"""For functions that Python calls."""

inner = _part_of_others
"""For functions that only kernels call, and that are compiled with these; called from Python they crash."""


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
