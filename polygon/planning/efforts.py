"""How long to search, by name."""

from __future__ import annotations

from dataclasses import replace

from polygon.planning.search_engine import Effort

QUICK = Effort(fluid_evaluations=2000, exact_evaluations=40, polish_evaluations=80, patience=1600)
THOROUGH = Effort(
    fluid_evaluations=20_000, exact_evaluations=160, polish_evaluations=100, patience=1600, rounds=2, begins_with=QUICK
)


def times_thorough(count: int) -> Effort:
    """So many thorough searches, the quick one before them made once."""
    return replace(THOROUGH, rounds=count * THOROUGH.rounds)


EFFORTS = {"quick": QUICK, "thorough": THOROUGH, "long": times_thorough(8)}
"""Quick answers in one to three CPU seconds for clusters of up to some hundred devices; each begins with the one
before."""
UNTIL_ROUNDS = 32 * THOROUGH.rounds
"""Rounds at most of a search that goes on until a gap, where no number is given."""
