"""Ctrl-C while a command is still being imported, before it can answer itself (see `cli.run`)."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, TracebackType


def is_ours(program: ModuleType) -> bool:
    """Whether what Python was started with is a command of polygon or a program of `runners`, by name or by path."""
    spec, path = getattr(program, "__spec__", None), getattr(program, "__file__", None)
    folder = Path(path or "").parent.name if spec is None else spec.name.partition(".")[0]
    return folder == "runners" or (spec is not None and spec.name.startswith("polygon."))


def say_interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An exception hook: one line in place of a KeyboardInterrupt's traceback; Python then ends by SIGINT."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)  # noqa: T201 - where the program talks
    else:
        sys.__excepthook__(kind, error, trace)
