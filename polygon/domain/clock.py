"""How long an answer has taken and may still take: the one place where planning and the grid read the time."""

from __future__ import annotations

import math
from time import perf_counter


class Clock:
    """Of one answer, from when it was asked for: all that is worked out for it gets of what is left.

    Parameters
    ----------
    limit_s : float, optional
        Of the whole answer; None is no limit.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self.limit_s = math.inf if limit_s is None else limit_s
        self._began_s = perf_counter()

    @property
    def spent_s(self) -> float:
        """Seconds since it was asked for."""
        return perf_counter() - self._began_s

    def left_s(self, part: float = 1.0) -> float:
        """Seconds left of a part of the limit."""
        return part * self.limit_s - self.spent_s

    def before_s(self, part: float, most_s: float) -> float:
        """Seconds left, at least 0, where a part of the limit, at most so many seconds, is kept for what follows."""
        return max(0.0, self.left_s() - min(part * self.limit_s, most_s))
