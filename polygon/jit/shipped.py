"""Kernels that a wheel brings compiled, so that nobody's first command waits for the compiler.

They are made for any x86-64 processor since 2013 (level v3), by one version of Python and numba. Where any of these
differs, or the source does (`polygon.jit.stamp`), kernels are compiled when they are first called, as in a checkout.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from llvmlite import binding
from numba.core.caching import IndexDataCacheFile

FOLDER = Path(__file__).parent / "shipped"
CPU = "x86-64-v3"
NEEDS = (
    *("avx", "avx2", "bmi", "bmi2", "cx16", "f16c", "fma", "lzcnt"),
    *("movbe", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3", "xsave"),
)
"""Features of that level, by LLVM's names (x86-64 psABI)."""


def environment(folder: Path) -> dict[str, str]:
    """What makes numba compile for that processor, and keep the kernels below a folder."""
    return {"NUMBA_CPU_NAME": CPU, "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(folder)}


def collect(kept: Path, folder: Path) -> int:
    """Move all kernels that numba keeps below one folder into another; the number of files.

    Raises
    ------
    FileExistsError
        If two are called alike: numba tells them apart by their folders.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(kept.rglob("*.nb[ic]"))
    for path in files:
        if (folder / path.name).exists():
            raise FileExistsError(folder / path.name)
        shutil.move(path, folder / path.name)
    return len(files)


@cache
def run_here() -> bool:
    """Whether this processor can run them."""
    if not binding.get_process_triple().startswith("x86_64"):
        return False
    features: Mapping[str, bool] = binding.get_host_cpu_features()
    return all(features.get(name, False) for name in NEEDS)


class _Target:
    """Names in numba's index what shipped kernels were compiled for."""

    def __init__(self, codegen: Any) -> None:
        self._triple = codegen.magic_tuple()[0]

    def magic_tuple(self) -> tuple[str, str, str]:
        return self._triple, CPU, ""


def offer_shipped(kept: Any, stamp: str) -> None:
    """Let a kernel's cache look among the shipped ones for what the user's own folder lacks.

    Parameters
    ----------
    kept : numba.core.caching.Cache
    stamp : str
        Of the source, as it is now.
    """
    if not FOLDER.is_dir() or not run_here():
        return
    shipped = IndexDataCacheFile(str(FOLDER), kept._impl.filename_base, stamp)
    own = kept._load_overload

    def load(sig: Any, target_context: Any) -> Any:
        found = own(sig, target_context)
        if found is None:
            data = shipped.load(kept._index_key(sig, _Target(target_context.codegen())))
            found = None if data is None else kept._impl.rebuild(target_context, data)
        return found

    kept._load_overload = load
