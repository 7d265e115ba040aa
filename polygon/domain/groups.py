"""Groups: which devices form which pipeline stage, before layers, workers and routes are decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polygon.domain.errors import Phrase, require
from polygon.domain.message import Message
from polygon.domain.plan import Problem


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """An allocation of the cluster's devices to pipeline stages.

    Parameters
    ----------
    problem : Problem
    allocation : ndarray of int, shape (stages, pools)
        Devices of each pool that each stage holds; a column sums to at most the pool's devices, and no row is zero.
    objective : mapping
        What the solver found it to cost, free in form; for the reader only.
    solver, seed : str, int
        Where it comes from.
    """

    problem: Problem
    allocation: np.ndarray
    objective: Mapping[str, Any] = field(default_factory=dict)
    solver: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        pools = self.problem.cluster.pools
        shape = self.allocation.shape
        require(
            self.allocation.ndim == 2 and shape[1] == len(pools),
            "allocation",
            shape,
            Message("expected.stages_by_pools", pools=len(pools)),
        )
        require(bool((self.allocation >= 0).all()), "allocation", Phrase("a negative entry"), "entries >= 0")
        for s in np.flatnonzero(self.allocation.sum(axis=1) == 0):
            require(False, f"stages[{s}]", Phrase("no devices"), "at least one")
        for pool, total in zip(pools, self.allocation.sum(axis=0), strict=True):
            region = self.problem.cluster.regions[pool.region].name
            require(
                total <= pool.devices,
                f"pool {pool.index} ({region}, {pool.device.name})",
                Message("found.devices_in_stages", devices=int(total)),
                Message("expected.at_most_that_it_has", most=pool.devices),
            )

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return int(self.allocation.shape[0])
