"""Waiting on a machine that may be busy with other things.

A loaded machine makes anything late and nothing early: waits end only what hangs, and what is measured too slow is
measured again, until the machine has a moment for it. Where a clock can be handed in, nothing is waited for at all.
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
