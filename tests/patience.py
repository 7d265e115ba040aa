"""Waiting and measuring on a machine that may be busy with other things.

A loaded machine makes anything late and nothing early: waits end only what hangs, and what is measured once too slow is
measured again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 900.0
"""Longest wait for what takes seconds: reached by what hangs, not by what is slow."""


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether a condition comes to hold within `PATIENCE_S`."""
    end_s = time.monotonic() + PATIENCE_S
    while not (held := holds()) and time.monotonic() < end_s:
        time.sleep(0.02)
    return held


def at_times(holds: Callable[[], bool], tries: int = 30) -> bool:
    """Whether a measurement is as it should be at least once in some tries: other load spoils some, our faults all."""
    return any(holds() for _ in range(tries))
