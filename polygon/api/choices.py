"""The words that a search understands; light, so that a command line can be parsed before the planner is imported."""

from __future__ import annotations

from typing import Literal, get_args

Objective = Literal["time", "money", "energy", "tokens-per-usd"]
"""Least step time, least money or energy per step, or most tokens per dollar."""
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

Method = Literal["memetic", "grid3d", "exhaustive"]
"""Genetic with local search; every uniform split of all devices; every allocation, with proof (small problems)."""
METHODS: tuple[Method, ...] = get_args(Method)

EffortName = Literal["quick", "thorough", "long"]
"""Quick answers in about a second for clusters of up to some hundred devices."""

Status = Literal["feasible", "proved", "infeasible", "interrupted"]
