"""Which rank does what under a plan: neighbours, tags, groups that sum. Pure functions of problem and plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from polygon_comm.members import Members, Tree, members_of
from polygon_comm.shaped import LinkShape

from polygon.domain.plan import COMPRESSIONS, Plan, Problem, Worker, sums_over_trees
from polygon.domain.runtime import POLYGON, turns_of_region
from polygon.domain.schedule import Action

STEPS_IN_FLIGHT = 2
"""Messages of this many consecutive steps may be under way at once; their tags differ."""
MESSAGES = "FBV"
"""What a message between stages lets start: forward, backward, or forward of a validation."""

FEWEST_AHEAD, AHEAD_BYTES = POLYGON.posted_messages, POLYGON.posted_bytes
"""Receives that are posted whatever they take, and most bytes of all that are."""

MOST_WARM_BYTES = 4 << 20
"""Linux' default limit of what a stream may have under way."""


@dataclass(frozen=True, eq=False)
class Layout:
    """A plan as its ranks see it."""

    problem: Problem
    plan: Plan
    keeps_whole: bool = False
    """Whether no weights and gradients are split (ZeRO-2 and 3): those of additions are small, the others are fixed."""

    def worker_of(self, rank: int) -> Worker:
        """The worker that a rank belongs to."""
        stage, worker, _ = self.plan.rank_places[rank]
        return self.plan.stages[stage].workers[worker]

    def stages_of(self, rank: int) -> list[int]:
        """Numbers of the stages that a rank holds, in the order of its chunks."""
        return list(range(self.plan.rank_places[rank][0], len(self.plan.stages), self.plan.groups))

    def stage_of(self, rank: int, action: Action) -> int:
        """The stage on which a rank does an action."""
        return self.plan.rank_places[rank][0] + action.chunk * self.plan.groups

    def tensor_ranks(self, rank: int) -> list[int]:
        """The ranks that hold slices of the same layers for the same part of the sequence as `rank`, itself among."""
        ranks, size = self.worker_ranks(rank), self.worker_of(rank).tp
        first = ranks.index(rank) // size * size
        return ranks[first : first + size]

    def context_ranks(self, rank: int) -> list[int]:
        """The ranks of a worker that hold the same slices as `rank`, in the order of their parts of the sequence."""
        ranks, size = self.worker_ranks(rank), self.worker_of(rank).tp
        return ranks[ranks.index(rank) % size :: size]

    def expert_ranks(self, rank: int, stage: int) -> list[int]:
        """The ranks that `rank` shares a stage's experts with: neighbours among those with the same slices, and where
        experts are whole the rest of their tensor-parallel groups too."""
        ep = self.plan.stages[stage].ep
        lanes = self.lanes([stage])
        if self.whole_experts(stage):
            place = next(lane.index(rank) for lane in lanes if rank in lane) // ep * ep
            return [lane[member] for member in range(place, place + ep) for lane in lanes]
        if ep == 1:
            return [rank]
        lane = next(lane for lane in lanes if rank in lane)
        first = lane.index(rank) // ep * ep
        return lane[first : first + ep]

    def whole_experts(self, stage: int) -> bool:
        """Whether the devices of a stage's tensor-parallel groups have experts of their own, not slices of each."""
        return self.problem.whole_experts(self.plan.stages[stage])

    def experts_apart(self, stage: int) -> int:
        """Ranks over which the experts of a stage are spread."""
        return self.problem.experts_apart(self.plan.stages[stage])

    @cached_property
    def region_of(self) -> dict[int, int]:
        """Region (by number) of every rank."""
        pools = self.problem.cluster.pools
        return {
            self.plan.device_ranks[device]: pools[worker.pool].region
            for stage in self.plan.stages
            for worker in stage.workers
            for device in worker.devices
        }

    @cached_property
    def node_of(self) -> dict[int, int]:
        """A number for every rank that is the same for the ranks of one node and differs between nodes."""
        pools = self.problem.cluster.pools
        nodes_before = [sum(pool.nodes for pool in pools[: pool.index]) for pool in pools]
        return {
            self.plan.device_ranks[device]: nodes_before[worker.pool] + pools[worker.pool].node_of(device)
            for stage in self.plan.stages
            for worker in stage.workers
            for device in worker.devices
        }

    @cached_property
    def place_of(self) -> dict[int, int]:
        """A number for every rank of where gradients are added up plain: of its region, or of its node where nodes of
        the region send one another packed ones."""
        inside, regions = self.plan.packed_inside, len(self.problem.cluster.regions)
        return {
            rank: regions + self.node_of[rank] if region in inside else region
            for rank, region in self.region_of.items()
        }

    def near(self, rank: int) -> frozenset[int]:
        """Ranks of a rank's region, without those that it sends packed gradients: these messages are told apart by
        tags, which an accelerator's own have not."""
        here = self.region_of[rank]
        packed = {peer for members in self.groups_of(rank).values() for peer in members.leader_peers(rank)}
        return frozenset(peer for peer, region in self.region_of.items() if region == here) - packed

    def _far_peers(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """Ranks in other regions that a rank exchanges messages with: peer, the rank's region, the peer's region."""
        here = self.region_of[rank]
        for peer in self.streams(rank):
            if self.region_of[peer] != here:
                yield peer, here, self.region_of[peer]

    def link_shapes(self, rank: int) -> dict[int, LinkShape]:
        """The cluster's links from a rank to the ranks in other regions that it exchanges messages with."""
        cluster = self.problem.cluster
        return {
            peer: LinkShape(float(cluster.latency_s[a, b]), float(cluster.bytes_per_s[a, b]))
            for peer, a, b in self._far_peers(rank)
        }

    def warm_bytes(self, rank: int) -> dict[int, int]:
        """What ranks in other regions are sent first over every stream: four times what a link has under way."""
        cluster, found = self.problem.cluster, {}
        for peer, a, b in self._far_peers(rank):
            most_per_s = max(cluster.bytes_per_s[a, b], cluster.bytes_per_s[b, a])
            round_trip_s = cluster.latency_s[a, b] + cluster.latency_s[b, a]
            found[peer] = max(1, int(min(MOST_WARM_BYTES, 4 * round_trip_s * most_per_s)))
        return found

    def region_name(self, rank: int) -> str:
        """Name of the region that a rank is in."""
        return self.problem.cluster.regions[self.region_of[rank]].name

    def describe(self, rank: int) -> str:
        """A rank for people: its stage, worker and region."""
        stage, worker, _ = self.plan.rank_places[rank]
        return f"rank {rank} (stage {stage}, worker {worker}, region {self.region_name(rank)})"

    def rank(self, stage: int, worker: int, place: int = 0) -> int:
        """Rank at a place in a worker's tensor-parallel group."""
        return self.plan.device_ranks[self.plan.stages[stage].workers[worker].devices[place]]

    def worker_ranks(self, rank: int) -> list[int]:
        """All ranks of the worker that a rank belongs to."""
        return [self.plan.device_ranks[device] for device in self.worker_of(rank).devices]

    def lanes(self, stages: Sequence[int]) -> list[list[int]]:
        """Ranks that hold the same slices in all workers of some stages, for every slice.

        Where tensor-parallel degrees differ: the first ranks alone, for whole tensors.
        """
        workers = [(s, w, worker) for s in stages for w, worker in enumerate(self.plan.stages[s].workers)]
        places = range(1) if self.sums_whole(stages) else range(workers[0][2].tp)
        return [
            [self.rank(s, w, part * worker.tp + place) for s, w, worker in workers for part in range(worker.cp)]
            for place in places
        ]

    def group_of(self, rank: int, kind: str, stages: Sequence[int]) -> str:
        """Name of the group of a kind (stage, experts, tied) that sums what a rank holds."""
        place = 0 if self.sums_whole(stages) else self.tensor_ranks(rank).index(rank)
        if kind == "tied":
            return f"tied.{place}"
        if kind == "experts":
            place = 0 if self.whole_experts(stages[0]) else place
            return f"experts-{stages[0]}.{place}.{self.expert_ranks(rank, stages[0]).index(rank)}"
        return f"{kind}-{stages[0]}.{place}"

    def sums_whole(self, stages: Sequence[int]) -> bool:
        """Whether workers of these stages are cut differently, so that their gradients are summed uncut."""
        return len({worker.tp for s in stages for worker in self.plan.stages[s].workers}) > 1

    def zero_of(self, stages: Sequence[int]) -> int:
        """ZeRO stage of what some stages hold together, as it is run.

        Workers that are cut differently, and parameter servers, hold whole weights and gradients.
        """
        if self.sums_whole(stages) or self.plan.reduction != "all-reduce":
            return 0
        return min([*(self.plan.stages[s].zero for s in stages), 1 if self.keeps_whole else 3])

    @property
    def gradient_everywhere(self) -> bool:
        """Whether every rank has the whole model's gradient once it is summed, and so its norm."""
        return self.experts_apart(0) == 1 and self.plan.gradient_everywhere

    def shard_group(self, rank: int, group: str) -> tuple[int, ...]:
        """Ranks between which ZeRO divides what a group (by its name) sums: of one region, itself among them.

        All members there, or as many neighbours as the plan says (`Stage.shards`): the others hold copies. Of routed
        experts, which so many fewer ranks hold, as many fewer share a copy.
        """
        stages = [self.plan.stages[s] for s in self.stages_in(group)]
        region = next(region for region in self.groups[group].regions if rank in region)
        most = [stage.shards // (stage.ep if group.startswith("experts") else 1) for stage in stages if stage.shards]
        size = max(1, min([*most, len(region)]))
        first = region.index(rank) // size * size
        return region[first : first + size]

    @cached_property
    def shard_groups(self) -> dict[str, tuple[Members, Members | None]]:
        """Where ZeRO divides between fewer than all members of a region, by rank and group (as `2/stage-0.0`).

        Those that share a copy, and those that hold the same part of all copies in the region; None where the copies
        are cut unequally.
        """
        found: dict[str, tuple[Members, Members | None]] = {}
        for name, members in self.groups.items():
            if name == "all" or not any(self.plan.stages[s].shards for s in self.stages_in(name)):
                continue
            for region in members.regions:
                copies = list(dict.fromkeys(self.shard_group(rank, name) for rank in region))
                if len(copies) == 1 or not self.zero_of(self.stages_in(name)):
                    continue
                equal = len({len(copy) for copy in copies}) == 1
                for copy in copies:
                    own = members_of(f"shards/{name}", copy, self.region_of)
                    for place, rank in enumerate(copy):
                        parts = [other[place] for other in copies] if equal else []
                        same = members_of(f"parts/{name}", parts, self.region_of) if parts else None
                        found[f"{rank}/{name}"] = own, same
        return found

    def owners(self, rank: int) -> set[int]:
        """Ranks with which a rank splits gradients or weights (ZeRO-2 and 3)."""
        split = [n for n in self.groups_of(rank) if n != "all" and self.zero_of(self.stages_in(n)) >= 2]
        return {owner for name in split for owner in self.shard_group(rank, name)} - {rank}

    def peer(self, micro_batch: int, stage: int, part: int = 0) -> int:
        """First of the ranks that compute a micro-batch's part of the sequence in a stage."""
        worker = int(self.plan.routes[micro_batch, stage])
        return self.rank(stage, worker, part * self.plan.stages[stage].workers[worker].tp)

    def tag(self, step: int, action: Action) -> int:
        """Of the message that lets an action (of one of the kinds of `MESSAGES`) start."""
        place = (step % STEPS_IN_FLIGHT) * len(MESSAGES) + MESSAGES.index(action.kind)
        return (place * self.plan.chunks + action.chunk) * self.plan.micro_batches + action.micro_batch

    def source(self, rank: int, action: Action) -> int | None:
        """Who sends a rank what lets its action start; None where nothing has to come."""
        stage = self.stage_of(rank, action) + (1 if action.kind == "B" else -1)
        if not 0 <= stage < len(self.plan.stages):
            return None
        return self.peer(action.micro_batch, stage, self.context_ranks(rank).index(rank))

    def target(self, rank: int, action: Action) -> tuple[int, Action] | None:
        """Who is sent what a rank's action makes, and the action that it lets start there; None: nobody."""
        stage = self.stage_of(rank, action) + (-1 if action.kind == "B" else 1)
        if not 0 <= stage < len(self.plan.stages):
            return None
        peer = self.peer(action.micro_batch, stage, self.context_ranks(rank).index(rank))
        return peer, action._replace(chunk=stage // self.plan.groups)

    @property
    def tied_apart(self) -> bool:
        """Whether the head has a copy of the embedding's weight on another stage."""
        model = self.problem.model
        return model.tied_embeddings and model.family != "vit" and len(self.plan.stages) > 1

    def _codec(self, ranks: Iterable[int]) -> str:
        """Packing of weight gradients between the places of these ranks: the strongest named for any pair of regions.

        One packing for all pairs, because every leader must add up the same numbers.
        """
        regions = sorted({self.region_of[rank] for rank in ranks})
        names = [self.plan.link_use(a, b).weight_gradients for a in regions for b in regions]
        return max(names, key=COMPRESSIONS.index, default="none")

    def _trees(self, group: str) -> tuple[Tree, ...]:
        """Those that the plan gives for what a group (by its name) sums; experts and tied weights have none."""
        kind, (s, *_) = group.partition("-")[0], self.stages_in(group)
        if kind != "stage" or not sums_over_trees(self.problem, self.plan, s):
            return ()
        pools, stage = self.problem.cluster.pools, self.plan.stages[s]
        regions = sorted({pools[worker.pool].region for worker in stage.workers})
        return tuple(Tree(tree.part, tree.parents(regions)) for tree in stage.trees)

    @cached_property
    def groups(self) -> dict[str, Members]:
        """All groups that sum: `stage-<s>.<slice>`, `experts-<s>.<slice>.<which>` (those with the same experts),
        `tied.<slice>` (embedding and its copy), `all` (loss and norm)."""
        last = len(self.plan.stages) - 1
        ranks = {f"stage-{s}.{t}": lane for s in range(last + 1) for t, lane in enumerate(self.lanes([s]))}
        for s in range(last + 1):
            lanes = self.lanes([s])
            if self.whole_experts(s):  # in the order of `expert_ranks`
                lanes = [[lane[member] for member in range(len(lanes[0])) for lane in lanes]]
            apart = self.experts_apart(s)
            ranks |= {
                f"experts-{s}.{t}.{which}": lane[which::apart]
                for t, lane in enumerate(lanes)
                for which in range(apart if apart > 1 else 0)
            }
        if self.tied_apart:
            ranks |= {f"tied.{t}": lane for t, lane in enumerate(self.lanes([0, last]))}
        first_tag = len(MESSAGES) * STEPS_IN_FLIGHT * self.plan.chunks * self.plan.micro_batches
        turns = partial(turns_of_region, most=POLYGON.sum_turns)
        groups: dict[str, Members] = {}
        for name, members in ranks.items():
            codec = self._codec(members)
            trees = self._trees(name)
            groups[name] = members_of(name, members, self.place_of, self.node_of, codec, first_tag, turns, trees)
            first_tag += groups[name].tags
        groups["all"] = members_of("all", range(self.plan.world_size), self.region_of, first_tag=first_tag)
        return groups

    def stages_in(self, group: str) -> list[int]:
        """Stages whose parameters a group (by its name, but for `all`) sums."""
        kind, _, stage = group.partition(".")[0].partition("-")
        return [0, len(self.plan.stages) - 1] if kind == "tied" else [int(stage)]

    def groups_of(self, rank: int) -> dict[str, Members]:
        """The groups that a rank is in, in the same order on every rank."""
        return {name: members for name, members in self.groups.items() if rank in members.ranks}

    def streams(self, rank: int) -> dict[int, int]:
        """Every rank that `rank` exchanges messages with, and over how many TCP streams."""
        _, worker, place = self.plan.rank_places[rank]
        peers: set[int] = set()
        # The first rank of a tensor-parallel group sends and receives for all of it.
        part, slice_ = divmod(place, self.worker_of(rank).tp)
        for stage in [] if slice_ else self.stages_of(rank):
            for m in (self.plan.routes[:, stage] == worker).nonzero()[0]:
                peers |= {self.peer(int(m), s, part) for s in (stage - 1, stage + 1) if 0 <= s < len(self.plan.stages)}
        for members in self.groups_of(rank).values():
            peers |= members.leader_peers(rank)
        here = self.region_of[rank]
        return {
            peer: max(
                self.plan.link_use(here, self.region_of[peer]).streams,
                self.plan.link_use(self.region_of[peer], here).streams,
            )
            for peer in sorted(peers)
        }

    def local_fraction(self, rank: int, group: str) -> float | None:
        """Part of the samples that a rank's region computes, if a group's regions train by themselves between syncs.

        None: the group sums over all regions in every step. So does a tied weight's group if some region holds only
        one of the two copies, since then neither copy alone has the gradient.
        """
        members = self.groups[group]
        if self.plan.local_steps == 1 or len(members.regions) == 1:
            return None
        places, first = self.plan.rank_places, self.stages_in(group)[0]
        stages = {places[r][0] for r in members.ranks}
        if any({places[r][0] for r in region} != stages for region in members.regions):
            return None
        here = next(region for region in members.regions if rank in region)
        shares = self.plan.shares(first)
        mine = {places[r][1] for r in here if places[r][0] == first % self.plan.groups}
        return float(sum(shares[worker] for worker in mine)) / self.plan.micro_batches

    def watched(self, rank: int) -> list[int]:
        """Ranks whose loss this rank must notice: all it talks to, and rank 0, which sees everybody."""
        if rank == 0:
            return list(range(1, self.plan.world_size))
        near = {
            other
            for name, members in self.groups_of(rank).items()
            if name != "all"
            for region in members.regions
            if rank in region
            for other in region
        }
        mates = {mate for stage in self.stages_of(rank) for mate in self.expert_ranks(rank, stage)}
        mates |= set(self.worker_ranks(rank))
        return sorted((near | set(self.streams(rank)) | mates | {0}) - {rank})
