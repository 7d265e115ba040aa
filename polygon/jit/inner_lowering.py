"""Kernels that only kernels call are compiled as a part of these, and of nothing else.

numba optimizes every function with all that it calls, and makes machine code of it, before the next caller takes it in
and does so again: a function five calls deep was compiled five times. Here such a function stays intermediate code
until a kernel that Python calls has taken it in. It is not kept in numba's cache either: the kernels that hold it are.
"""

from __future__ import annotations

from typing import Any

from numba import _dynfunc  # type: ignore[attr-defined]
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import LoweringPass, register_pass
from numba.core.typed_passes import NativeLowering


class InnerLibrary(JITCodeLibrary):
    """Code to link into others, with what it calls itself."""

    def _optimize_final_module(self) -> None:
        """Leave that to the kernel that takes this in; single functions are optimized already."""

    def _finalize_final_module(self) -> None:
        """Make no machine code."""
        self._finalize_dynamic_globals()  # type: ignore[no-untyped-call]
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class InnerLowering(LoweringPass):
    """As numba's lowering, into an `InnerLibrary`."""

    _name = "polygon_inner_lowering"

    def __init__(self) -> None:
        LoweringPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        """Lower one function and let others call it."""
        state.library = InnerLibrary(  # type: ignore[no-untyped-call]
            state.targetctx.codegen(), state.func_id.func_qualname
        )
        state.flags.no_compile = True
        NativeLowering().run_pass(state)
        state.flags.no_compile = False
        lowered = state["cr"]
        module, name = lowered.fndesc.lookup_module(), lowered.fndesc.qualname.split(".")[-1]
        # What callers know it by; there is nothing to run.
        entry = _dynfunc.make_function(module, name, "a part of kernels", 0, lowered.env, (state.library,))
        state.targetctx.insert_user_function(entry, lowered.fndesc, [state.library])
        state["cr"] = lowered._replace(cfunc=entry)
        return True


class InnerCompiler(CompilerBase):
    """numba's compiler with that lowering."""

    def define_pipelines(self) -> list[Any]:
        """The one way to compile: without Python objects."""
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [(InnerLowering if kind is NativeLowering else kind, why) for kind, why in passes.passes]
        passes.finalize()
        return [passes]
