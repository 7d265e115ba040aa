"""How long to search, by name."""

from __future__ import annotations

from polygon.planning.search_engine import Effort

EFFORTS = {
    "quick": Effort(fluid_evaluations=1500, exact_evaluations=40, patience=600),
    "thorough": Effort(),
    "long": Effort(rounds=8),
}
"""Quick answers in about a second for clusters of up to some hundred devices; long is the best of thorough searches."""
UNTIL_ROUNDS = 32
"""Rounds at most of a search that goes on until a gap, where no number is given."""
