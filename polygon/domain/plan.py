"""The plan: which worker holds which layers, which way every micro-batch goes, and how links are used.

A plan says only what cannot be derived. Shares follow from the routes, ranks from the devices, the order of every
worker's actions from routes and spans, unless the plan says it (`polygon.domain.schedule`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from polygon.domain.cluster import EVERY_REGION, Cluster, Pool
from polygon.domain.errors import one_of, require, require_number
from polygon.domain.message import Message
from polygon.domain.model import Batch, Model, check_sequence
from polygon.domain.runtime import POLYGON, Runtime

COMPRESSIONS = ("none", "bf16", "int8", "int4", "topk", "powersgd")
"""How a message is packed; `none` sends it in the precision it has."""

PARITY_LEVELS = ("exact", "safe", "known", "any")
"""How sure it must be that the loss is kept, from surest to least sure (`polygon.cost.convergence`)."""

RECOMPUTE = ("none", "selective", "full")
REDUCTIONS = ("all-reduce", "sharded-server", "central-server")
REGION_LISTS = ("forbidden_regions", "first_stage_regions", "last_stage_regions")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRule:
    """Where one stage may lie."""

    stage: int
    """Counted from 0, or from the end as -1, -2, ...; a plan without that stage keeps the rule."""
    only_regions: tuple[str, ...] = ()
    """Empty: anywhere."""
    never_regions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Constraints:
    """What the user demands of a plan beside being possible."""

    memory_headroom: float = 0.08
    """Part of a device's memory that a plan leaves free."""
    forbidden_regions: tuple[str, ...] = ()
    forbidden_devices: tuple[str, ...] = ()
    """Device types that no plan may use."""
    first_stage_regions: tuple[str, ...] = ()
    """Where the embedding (and so the raw data) may live; empty: anywhere."""
    last_stage_regions: tuple[str, ...] = ()
    stage_rules: tuple[StageRule, ...] = ()
    """Regions that stages are pinned to or kept out of."""
    most_stages: int | None = None
    parity: str = "safe"
    """Which packings and local steps the search may choose, by what is known of the loss under them."""
    compressions: tuple[str, ...] = ()
    """Packings that the search may choose for messages; empty: those of `parity`."""
    local_steps: tuple[int, ...] = ()
    """Numbers of local steps that the search may choose (1: reduce in every step); empty: those of `parity`."""
    egress_bytes_per_step: Mapping[str, float] = field(default_factory=dict)
    """Most bytes that may leave a region in a step, by region; `*` is for every region not named."""
    most_usd_per_step: float | None = None
    most_usd_per_hour: float | None = None
    """Of all used devices and egress together."""
    most_step_s: float | None = None
    """Deadline of one step [s]."""

    def __post_init__(self) -> None:
        require(0 <= self.memory_headroom < 1, "memory_headroom", self.memory_headroom, "a number in [0, 1)")
        require(self.parity in PARITY_LEVELS, "parity", self.parity, one_of(str(self.parity), PARITY_LEVELS))
        for mode in self.compressions:
            require(mode in COMPRESSIONS, "compressions", mode, " or ".join(COMPRESSIONS))
        for steps in self.local_steps:
            require(steps >= 1, "local_steps", steps, "whole numbers >= 1")
        for name in ("most_usd_per_step", "most_usd_per_hour", "most_step_s"):
            if getattr(self, name) is not None:
                require_number(getattr(self, name), name, above=0)
        for region, n_bytes in self.egress_bytes_per_step.items():
            require_number(n_bytes, f"egress_bytes_per_step.{region}", at_least=0)
        if self.most_stages is not None:
            require(self.most_stages >= 1, "most_stages", self.most_stages, "a whole number >= 1")

    @property
    def rules(self) -> tuple[StageRule, ...]:
        """All stage rules, those of the first and the last stage among them."""
        ends = ((0, self.first_stage_regions), (-1, self.last_stage_regions))
        return (*(StageRule(stage=s, only_regions=names) for s, names in ends if names), *self.stage_rules)

    @property
    def limits_cost(self) -> bool:
        """Whether anything that a whole plan costs is limited: money, time or egress."""
        limits = (self.most_usd_per_step, self.most_usd_per_hour, self.most_step_s)
        return bool(self.egress_bytes_per_step) or any(limit is not None for limit in limits)


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """What is asked: train this model with this batch on this cluster."""

    cluster: Cluster
    model: Model
    batch: Batch
    constraints: Constraints = field(default_factory=Constraints)
    runtime: Runtime = POLYGON
    """The program that is to execute the step."""

    def __post_init__(self) -> None:
        check_sequence(self.model, self.batch)
        limits = self.constraints
        regions = sorted({region.name for region in self.cluster.regions})
        named = [(label, getattr(limits, label)) for label in REGION_LISTS]
        for i, rule in enumerate(limits.stage_rules):
            where = f"stage_rules[{i}]"
            most = self.model.layers
            expected = Message("expected.stage", most=most, last=most - 1)
            require(-most <= rule.stage < most, f"{where}.stage", rule.stage, expected)
            named += [(f"{where}.only_regions", rule.only_regions), (f"{where}.never_regions", rule.never_regions)]
        named.append(("egress_bytes_per_step", [name for name in limits.egress_bytes_per_step if name != EVERY_REGION]))
        for label, names in named:
            for name in names:
                require(name in regions, label, name, one_of(name, regions))
        devices = sorted(self.cluster.catalogue)
        for name in limits.forbidden_devices:
            require(name in devices, "forbidden_devices", name, one_of(name, devices))

    def whole_experts(self, stage: Stage) -> bool:
        """Whether tensor-parallel devices of a stage have experts of their own, not slices of each."""
        return self.runtime.whole_experts(
            self.model.experts, tp=stage.workers[0].tp, ep=stage.ep, sequence_parallel=stage.sequence_parallel
        )

    def experts_apart(self, stage: Stage) -> int:
        """Devices over which the experts of a layer are spread."""
        return stage.ep * (stage.workers[0].tp if self.whole_experts(stage) else 1)

    def may_use(self, pool: Pool) -> bool:
        """Whether the constraints leave a pool's devices to a plan."""
        return (
            self.cluster.regions[pool.region].name not in self.constraints.forbidden_regions
            and pool.device.name not in self.constraints.forbidden_devices
        )


def sums_over_trees(problem: Problem, plan: Plan, stage: int) -> bool:
    """Whether the regions of a stage may sum its gradients over trees: three or more of them that add up what they
    have before any of it leaves, all numbers of it, in a program that does so."""
    of, pools = plan.stages[stage], problem.cluster.pools
    if not problem.runtime.sum_trees or plan.reduction != "all-reduce" or of.ep > 1:
        return False
    inside = {pools[worker.pool].region for worker in of.workers if 0 <= worker.pool < len(pools)}
    packings = {u.weight_gradients for u in plan.links if u.source in inside and u.target in inside}
    return len(inside) > 2 and "powersgd" not in packings and not inside & plan.packed_inside


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The devices that compute a micro-batch together: tp x cp of them, a tensor-parallel group's side by side."""

    pool: int
    devices: tuple[int, ...]
    """Numbers of the devices in the cluster."""
    cp: int = 1
    """Context-parallel degree: parts into which the sequence is cut."""

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return len(self.devices) // self.cp


@dataclass(frozen=True, slots=True, kw_only=True)
class SumTree:
    """A way in which a part of a stage's gradients is summed: from region to region to a root, and the sum back.

    Every region sends what it has to its parent, which adds that to its own, and its parent gives it the sum.
    """

    part: float
    """Of the gradient: those of a stage's trees make 1."""
    root: int
    """Region that has the sum first."""
    relays: tuple[tuple[int, int], ...] = ()
    """(region, parent) of every region whose parent is not the root, by region; the parent of such a parent is."""

    def parents(self, regions: Sequence[int]) -> tuple[int, ...]:
        """Place among the stage's regions of the parent of each, -1 for the root."""
        place, relay = {region: i for i, region in enumerate(regions)}, dict(self.relays)
        return tuple(-1 if r == self.root else place[relay.get(r, self.root)] for r in regions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Contiguous layers [first, last) held by a group of workers, each with a whole copy (less what ZeRO shards)."""

    first_layer: int
    last_layer: int
    workers: tuple[Worker, ...]
    zero: int = 0
    shards: int = 0
    """Devices over which ZeRO divides, the others holding copies; 0: all that hold the same."""
    recompute: str = "none"
    recompute_blocks: int | None = None
    """Of the stage's blocks, its first so many are recomputed, the others not; None: all are."""
    sequence_parallel: bool = False
    """Whether norms and dropout work on a tensor-parallel rank's part of the sequence (Korthikanti et al.)."""
    ep: int = 1
    """Expert-parallel degree: devices of the stage with the same slices over which the experts of a layer are spread
    (and ep x tp devices where the runtime leaves experts whole, `Problem.experts_apart`)."""
    trees: tuple[SumTree, ...] = ()
    """How regions sum its gradients; empty: each is the root of an equal part, and the parent of all others there."""

    @property
    def width(self) -> int:
        """Workers of the stage."""
        return len(self.workers)

    @property
    def members(self) -> int:
        """Devices that hold the same slices of its layers: a worker has one for each part of a sequence."""
        return sum(worker.cp for worker in self.workers)

    @property
    def layers(self) -> tuple[int, int]:
        """First layer, and the one behind the last."""
        return self.first_layer, self.last_layer

    @property
    def recomputed_until(self) -> int:
        """Layers [first_layer, recomputed_until) are recomputed; the embedding, layer 0, is no block."""
        if self.recompute == "none":
            return self.first_layer
        if self.recompute_blocks is None:
            return self.last_layer
        return min(self.last_layer, max(self.first_layer, 1) + self.recompute_blocks)

    def only(self, layer: int) -> Stage:
        """A stage of one of its layers, executed as it is here."""
        recompute = self.recompute if layer < self.recomputed_until else "none"
        return replace(self, first_layer=layer, last_layer=layer + 1, recompute=recompute, recompute_blocks=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """How messages from one region to another (or the same) are packed and sent.

    Weight gradients that are packed from a region to itself: its nodes add them up with one another, and with other
    regions, as regions do (`Plan.packed_inside`).
    """

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
    chunks : int
        Stages on each group of workers.
    order : ndarray of int, shape (2, micro_batches, stages), optional
        The place of every forward [0] and backward [1] among its worker's actions; spans then say nothing.
    """

    stages: tuple[Stage, ...]
    routes: np.ndarray
    micro_batch_size: int
    spans: tuple[tuple[int, ...], ...]
    links: tuple[LinkUse, ...] = ()
    reduction: str = "all-reduce"
    local_steps: int = 1
    chunks: int = 1
    """Stages that every worker holds (interleaving): of n stages, stage s + n / chunks is on the workers of stage s."""
    order: np.ndarray | None = None
    solver: str = ""
    seed: int = 0

    @property
    def groups(self) -> int:
        """Groups of workers: as many as stages, but for interleaving."""
        return len(self.stages) // self.chunks

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Every worker once, group by group."""
        return tuple(worker for stage in self.stages[: self.groups] for worker in stage.workers)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step, over all workers."""
        return int(self.routes.shape[0])

    def with_spans(self, spans: tuple[tuple[int, ...], ...]) -> Plan:
        """The plan in the order that spans give."""
        return replace(self, spans=spans, order=None)

    @property
    def gradient_everywhere(self) -> bool:
        """Whether every device has the whole model's gradient once it is summed, and so its norm."""
        first = self.stages[0]
        whole = len(self.stages) == 1 and all(worker.tp == 1 for worker in first.workers)
        return whole and self.reduction == "all-reduce" and first.zero < 2

    def shares(self, stage: int) -> np.ndarray:
        """Micro-batches that each worker of a stage takes per step, shape (width,)."""
        return np.bincount(self.routes[:, stage], minlength=self.stages[stage].width)

    @cached_property
    def ends_alike(self) -> bool:
        """Whether all workers of the first and of the last stage have one tensor-parallel degree."""
        return len({worker.tp for stage in (self.stages[0], self.stages[-1]) for worker in stage.workers}) == 1

    def cuts_tied_unlike(self, model: Model) -> bool:
        """Whether embedding and head share a weight that the first and the last stage cut differently."""
        return model.tied_embeddings and model.family != "vit" and len(self.stages) > 1 and not self.ends_alike

    @cached_property
    def device_ranks(self) -> dict[int, int]:
        """Rank of every used device: used devices in the order of their numbers, so a node's ranks are consecutive."""
        used = sorted({device for stage in self.stages for worker in stage.workers for device in worker.devices})
        return {device: rank for rank, device in enumerate(used)}

    @cached_property
    def link_ends(self) -> np.ndarray:
        """Numbers of the regions of `links`: sources and targets, shape (2, links)."""
        return np.array([(use.source, use.target) for use in self.links], dtype=np.int64).reshape(-1, 2).T

    @cached_property
    def packings(self) -> dict[str, tuple[list[str], np.ndarray]]:
        """By field of `LinkUse`: the packings that occur, and which of them every link has, shape (links,)."""
        result = {}
        for name in ("activations", "activation_gradients", "weight_gradients"):
            of_link = [getattr(use, name) for use in self.links]
            kinds = list(dict.fromkeys(of_link))
            result[name] = kinds, np.array([kinds.index(kind) for kind in of_link], dtype=np.int64)
        return result

    def regions(self, cluster: Cluster) -> set[int]:
        """Numbers of the regions that the plan's workers lie in."""
        return {cluster.pools[worker.pool].region for stage in self.stages for worker in stage.workers}

    def stays_in_regions(self, cluster: Cluster) -> bool:
        """Whether every micro-batch visits workers of one region alone, and there are several regions.

        Each region then holds a whole copy of the model, so that regions can train by themselves for some steps.
        """
        places = [np.array([cluster.pools[worker.pool].region for worker in stage.workers]) for stage in self.stages]
        visited = np.stack([place[self.routes[:, s]] for s, place in enumerate(places)], axis=1)
        return bool((visited == visited[:, :1]).all()) and len(self.regions(cluster)) > 1

    @cached_property
    def devices_of_pools(self) -> Counter[int]:
        """Devices that the plan uses, by the number of their pool."""
        used = Counter[int]()
        for worker in self.workers:
            used[worker.pool] += len(worker.devices)
        return used

    @property
    def world_size(self) -> int:
        """Ranks that run the plan."""
        return len(self.device_ranks)

    @cached_property
    def rank_places(self) -> dict[int, tuple[int, int, int]]:
        """For every rank its stage (the first that it holds), its worker there and its place among those devices."""
        return {
            self.device_ranks[device]: (s, w, t)
            for s, stage in enumerate(self.stages[: self.groups])
            for w, worker in enumerate(stage.workers)
            for t, device in enumerate(worker.devices)
        }

    @cached_property
    def packed_inside(self) -> frozenset[int]:
        """Numbers of the regions whose nodes send one another packed weight gradients."""
        return frozenset(
            use.source for use in self.links if use.source == use.target and use.weight_gradients != "none"
        )

    @cached_property
    def strongest(self) -> dict[frozenset[int], str]:
        """The strongest packing of weight gradients between some regions, by their numbers, where it was looked for."""
        return {}

    @cached_property
    def _links_by_regions(self) -> dict[tuple[int, int], LinkUse]:
        return {(use.source, use.target): use for use in self.links}

    def link_use(self, source: int, target: int) -> LinkUse:
        """How messages between two regions (by number) are sent."""
        return self._links_by_regions.get((source, target)) or LinkUse(source=source, target=target)
