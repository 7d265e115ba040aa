"""Which of torch's compilers blocks go through, if any."""

from __future__ import annotations

import os
import shutil

from polygon.domain.errors import one_of, require
from polygon.domain.runtime import Runtime
from runners.engine.options import Options

NONE = "none"
INDUCTOR = "inductor"


def compiler_of(runtime: Runtime, options: Options) -> str | None:
    """torch.compile's backend for the blocks: the option's, else the one that the plan's runtime means."""
    asked = options.compile or (INDUCTOR if runtime.fused else NONE)
    return None if asked == NONE else asked


def has_compiler() -> bool:
    """Whether there is a C++ compiler, which inductor calls for CPUs and GPUs alike."""
    asked = os.environ.get("CXX")
    return any(map(shutil.which, [asked] if asked else ["g++", "clang++", "c++"]))


def check_compiler(backend: str | None) -> None:
    """Require a backend that torch has, and for inductor a C++ compiler."""
    if backend is None:
        return
    from torch._dynamo import list_backends  # brings torch's compiler along

    known = [*list_backends(exclude_tags=()), NONE]
    require(backend in known, "--compile", backend, one_of(backend, known))
    if backend == INDUCTOR:
        require(has_compiler(), "--compile", INDUCTOR, "a C++ compiler (g++), or --compile none")
