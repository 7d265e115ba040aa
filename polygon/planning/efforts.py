"""How long to search, by name."""

from __future__ import annotations

from dataclasses import replace

from polygon.planning.search_engine import Effort

QUICK = Effort(fluid_evaluations=4000, exact_evaluations=60, patience=1600)
THOROUGH = Effort(begins_with=QUICK)
EFFORTS = {"quick": QUICK, "thorough": THOROUGH, "long": replace(THOROUGH, rounds=8)}
"""Quick answers in two to five CPU seconds for clusters of up to some hundred devices; each begins with the one
before."""
UNTIL_ROUNDS = 32
"""Rounds at most of a search that goes on until a gap, where no number is given."""
