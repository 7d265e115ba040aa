"""Numbers that divide another."""

from __future__ import annotations

import math


def divisors(number: int) -> list[int]:
    """Divisors in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
