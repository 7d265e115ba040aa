"""The plan: which worker holds which layers, which way every micro-batch goes, and how links are used.

A plan says only what cannot be derived. Shares follow from the routes, ranks from the devices, the order of every
worker's actions from routes and spans (`polygon.domain.schedule`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from polygon.domain.cluster import Cluster
from polygon.domain.errors import require
from polygon.domain.model import Batch, Model, check_sequence

COMPRESSIONS = ("none", "bf16", "int8", "int4", "topk", "powersgd")
"""How a message is packed; `none` sends it in the precision it has."""

RECOMPUTE = ("none", "selective", "full")
REDUCTIONS = ("all-reduce", "sharded-server", "central-server")


@dataclass(frozen=True, kw_only=True, eq=False)
class Constraints:
    """What the user demands of a plan beside being possible."""

    memory_headroom: float = 0.08
    """Part of a device's memory that a plan leaves free."""
    forbidden_regions: tuple[str, ...] = ()
    first_stage_regions: tuple[str, ...] = ()
    """Where the embedding (and so the raw data) may live; empty: anywhere."""
    last_stage_regions: tuple[str, ...] = ()
    compressions: tuple[str, ...] = ("none", "bf16", "int8")
    """Packings that the search may choose for messages between regions."""

    def __post_init__(self) -> None:
        require(0 <= self.memory_headroom < 1, "memory_headroom", self.memory_headroom, "a number in [0, 1)")
        for mode in self.compressions:
            require(mode in COMPRESSIONS, "compressions", mode, " or ".join(COMPRESSIONS))


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """What is asked: train this model with this batch on this cluster."""

    cluster: Cluster
    model: Model
    batch: Batch
    constraints: Constraints = field(default_factory=Constraints)

    def __post_init__(self) -> None:
        check_sequence(self.model, self.batch)
        names = {region.name for region in self.cluster.regions}
        for label in ("forbidden_regions", "first_stage_regions", "last_stage_regions"):
            for name in getattr(self.constraints, label):
                require(name in names, label, name, f"one of {sorted(names)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One device, or the devices of one tensor-parallel group (all on one node)."""

    pool: int
    devices: tuple[int, ...]
    """Numbers of the devices in the cluster."""

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return len(self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Contiguous layers [first, last) held by a group of workers, each with a whole copy (less what ZeRO shards)."""

    first_layer: int
    last_layer: int
    workers: tuple[Worker, ...]
    zero: int = 0
    recompute: str = "none"

    @property
    def width(self) -> int:
        """Workers of the stage."""
        return len(self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """How messages from one region to another (or the same) are packed and sent."""

    source: int
    target: int
    activations: str = "none"
    activation_gradients: str = "none"
    weight_gradients: str = "none"
    streams: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Who does what, and by which way.

    Parameters
    ----------
    stages : tuple of Stage
        In the order in which a micro-batch visits them; their layers cover the model without gap or overlap.
    routes : ndarray of int, shape (micro_batches, stages)
        ``routes[m, s]`` is the worker (its place in ``stages[s].workers``) that computes micro-batch m.
    micro_batch_size : int
        Sequences in a micro-batch; times micro_batches gives the global batch.
    spans : tuple of tuple of int
        ``spans[s][w]``: how many micro-batches are let pass while worker w of stage s is busy with one (see
        `polygon.domain.schedule`). All equal to the number of micro-batches: GPipe; all equal to the width: 1F1B.
    links : tuple of LinkUse
        Every ordered pair of regions over which the plan sends; a pair not named sends unpacked.
    reduction : str
        How a stage's workers combine weight gradients.
    local_steps : int
        Optimizer steps between two reductions (1: every step; more: local updates with an outer optimizer).
    """

    stages: tuple[Stage, ...]
    routes: np.ndarray
    micro_batch_size: int
    spans: tuple[tuple[int, ...], ...]
    links: tuple[LinkUse, ...] = ()
    reduction: str = "all-reduce"
    local_steps: int = 1
    solver: str = ""
    seed: int = 0

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step, over all workers."""
        return int(self.routes.shape[0])

    def shares(self, stage: int) -> np.ndarray:
        """Micro-batches that each worker of a stage takes per step, shape (width,)."""
        return np.bincount(self.routes[:, stage], minlength=self.stages[stage].width)

    @cached_property
    def device_ranks(self) -> dict[int, int]:
        """Rank of every used device: used devices in the order of their numbers, so a node's ranks are consecutive."""
        used = sorted(device for stage in self.stages for worker in stage.workers for device in worker.devices)
        return {device: rank for rank, device in enumerate(used)}

    @property
    def world_size(self) -> int:
        """Ranks that run the plan."""
        return len(self.device_ranks)

    @cached_property
    def rank_places(self) -> dict[int, tuple[int, int, int]]:
        """For every rank its stage, its worker in the stage and its place in the worker's tensor-parallel group."""
        return {
            self.device_ranks[device]: (s, w, t)
            for s, stage in enumerate(self.stages)
            for w, worker in enumerate(stage.workers)
            for t, device in enumerate(worker.devices)
        }

    @cached_property
    def _links_by_regions(self) -> dict[tuple[int, int], LinkUse]:
        return {(use.source, use.target): use for use in self.links}

    def link_use(self, source: int, target: int) -> LinkUse:
        """How messages between two regions (by number) are sent."""
        return self._links_by_regions.get((source, target)) or LinkUse(source=source, target=target)
