"""How long to search, by name."""

from __future__ import annotations

from polygon.planning.search_engine import Effort

EFFORTS = {
    "quick": Effort(fluid_evaluations=1500, exact_evaluations=40, patience=600),
    "thorough": Effort(),
    "long": Effort(fluid_evaluations=100_000, exact_evaluations=2000, patience=20_000),
}
"""Quick answers in about a second for clusters of up to some hundred devices."""
