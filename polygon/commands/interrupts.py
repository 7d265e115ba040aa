"""Ctrl-C while a command is still being imported, before it can answer itself (see `cli.run`)."""

from __future__ import annotations

import sys
from types import TracebackType


def say_interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An exception hook: one line in place of a KeyboardInterrupt's traceback; Python then ends by SIGINT."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)  # noqa: T201 - where the program talks
    else:
        sys.__excepthook__(kind, error, trace)
