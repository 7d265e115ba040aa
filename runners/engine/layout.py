"""Which rank does what under a plan: neighbours, tags, groups that sum. Pure functions of problem and plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from polygon_comm.reduction import TAGS_PER_GROUP, Members, members_of
from polygon_comm.shaped import LinkShape

from polygon.domain.errors import InputError
from polygon.domain.plan import COMPRESSIONS, Plan, Problem
from polygon.domain.schedule import worker_order

STEPS_IN_FLIGHT = 2
"""Messages of this many consecutive steps may be under way at once; their tags differ."""
MESSAGES = "FBV"
"""What a message between stages lets start: forward, backward, or forward of a validation."""

MOST_WARM_BYTES = 4 << 20
"""Linux' default limit of what a stream may have under way."""


@dataclass(frozen=True, eq=False)
class Layout:
    """A plan as its ranks see it."""

    problem: Problem
    plan: Plan
    context: int = 1
    """Parts into which every sequence is cut: a worker's devices are so many tensor-parallel groups, one a part."""
    expert: int = 1
    """Ranks that share out the experts of a layer, neighbours among those that hold the same slices."""

    def tensor_ranks(self, rank: int) -> list[int]:
        """The ranks that hold slices of the same layers for the same part of the sequence as `rank`, itself among."""
        ranks = self.worker_ranks(rank)
        size = len(ranks) // self.context
        first = ranks.index(rank) // size * size
        return ranks[first : first + size]

    def context_ranks(self, rank: int) -> list[int]:
        """The ranks of a worker that hold the same slices as `rank`, in the order of their parts of the sequence."""
        ranks = self.worker_ranks(rank)
        size = len(ranks) // self.context
        return ranks[ranks.index(rank) % size :: size]

    def expert_ranks(self, rank: int) -> list[int]:
        """The ranks that `rank` shares experts with, in the order of their experts."""
        if self.expert == 1:
            return [rank]
        lane = next(lane for lane in self._lanes([self.plan.rank_places[rank][0]]) if rank in lane)
        first = lane.index(rank) // self.expert * self.expert
        return lane[first : first + self.expert]

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
        stage, worker, _ = self.plan.rank_places[rank]
        return [self.plan.device_ranks[device] for device in self.plan.stages[stage].workers[worker].devices]

    def _lanes(self, stages: Sequence[int]) -> list[list[int]]:
        """Ranks that hold the same slices in all workers of some stages, for every slice.

        Where tensor-parallel degrees differ: the first ranks alone, for whole tensors.
        """
        workers = [(s, w) for s in stages for w in range(self.plan.stages[s].width)]
        sizes = {(s, w): self.plan.stages[s].workers[w].tp // self.context for s, w in workers}
        places = range(1) if len(set(sizes.values())) > 1 else range(sizes[workers[0]])
        return [
            [self.rank(s, w, part * sizes[s, w] + place) for s, w in workers for part in range(self.context)]
            for place in places
        ]

    def group_of(self, rank: int, kind: str, stages: Sequence[int]) -> str:
        """Name of the group of a kind (stage, experts, tied) that sums what a rank holds."""
        place = 0 if self.sums_whole(stages) else self.tensor_ranks(rank).index(rank)
        if kind == "tied":
            return f"tied.{place}"
        which = f".{self.expert_ranks(rank).index(rank)}" if kind == "experts" else ""
        return f"{kind}-{stages[0]}.{place}{which}"

    def sums_whole(self, stages: Sequence[int]) -> bool:
        """Whether workers of these stages are cut differently, so that their gradients are summed uncut."""
        return len({worker.tp for s in stages for worker in self.plan.stages[s].workers}) > 1

    def zero_of(self, stages: Sequence[int]) -> int:
        """ZeRO stage of what some stages hold together, as it is run.

        Workers that are cut differently, and parameter servers, hold whole weights and gradients.
        """
        if self.sums_whole(stages) or self.plan.reduction != "all-reduce":
            return 0
        return min(self.plan.stages[s].zero for s in stages)

    @property
    def gradient_everywhere(self) -> bool:
        """Whether every rank has the whole model's gradient once it is summed, and so its norm."""
        return self.expert == 1 and self.plan.gradient_everywhere

    def owners(self, rank: int) -> set[int]:
        """Ranks in the same region with which a rank splits gradients or weights (ZeRO-2 and 3)."""
        stage = self.plan.rank_places[rank][0]
        found: set[int] = set()
        for name, members in self.groups_of(rank).items():
            stages = [0, len(self.plan.stages) - 1] if name.startswith("tied") else [stage]
            if name != "all" and self.zero_of(stages) >= 2:
                found |= {r for region in members.regions if rank in region for r in region}
        return found - {rank}

    def peer(self, micro_batch: int, stage: int, part: int = 0) -> int:
        """First of the ranks that compute a micro-batch's part of the sequence in a stage."""
        worker = int(self.plan.routes[micro_batch, stage])
        return self.rank(stage, worker, part * self.plan.stages[stage].workers[worker].tp // self.context)

    def tag(self, step: int, kind: str, micro_batch: int) -> int:
        """Of the message that lets the action (one of `MESSAGES`) of a micro-batch start."""
        place = (step % STEPS_IN_FLIGHT) * len(MESSAGES) + MESSAGES.index(kind)
        return place * self.plan.micro_batches + micro_batch

    @property
    def tied_apart(self) -> bool:
        """Whether the head has a copy of the embedding's weight on another stage."""
        model = self.problem.model
        return model.tied_embeddings and model.family != "vit" and len(self.plan.stages) > 1

    def _codec(self, ranks: Iterable[int]) -> str:
        """Packing of weight gradients between the regions of these ranks: the strongest named for any pair.

        One packing for all pairs, because every leader must add up the same numbers.
        """
        regions = sorted({self.region_of[rank] for rank in ranks})
        names = [self.plan.link_use(a, b).weight_gradients for a in regions for b in regions if a != b]
        return max(names, key=COMPRESSIONS.index, default="none")

    @cached_property
    def groups(self) -> dict[str, Members]:
        """All groups that sum: `stage-<s>.<slice>`, `experts-<s>.<slice>.<which>` (those with the same experts),
        `tied.<slice>` (embedding and its copy), `all` (loss and norm)."""
        last = len(self.plan.stages) - 1
        ranks = {f"stage-{s}.{t}": lane for s in range(last + 1) for t, lane in enumerate(self._lanes([s]))}
        if self.expert > 1:
            ranks |= {
                f"experts-{s}.{t}.{which}": lane[which :: self.expert]
                for s in range(last + 1)
                for t, lane in enumerate(self._lanes([s]))
                for which in range(self.expert)
            }
        if self.tied_apart:
            ranks |= {f"tied.{t}": lane for t, lane in enumerate(self._lanes([0, last]))}
        first_tag = len(MESSAGES) * STEPS_IN_FLIGHT * self.plan.micro_batches
        groups = {
            name: members_of(
                name, members, self.region_of, self.node_of, self._codec(members), first_tag + place * TAGS_PER_GROUP
            )
            for place, (name, members) in enumerate(ranks.items())
        }
        last_tag = first_tag + len(groups) * TAGS_PER_GROUP
        groups["all"] = members_of("all", range(self.plan.world_size), self.region_of, first_tag=last_tag)
        return groups

    def groups_of(self, rank: int) -> dict[str, Members]:
        """The groups that a rank is in, in the same order on every rank."""
        return {name: members for name, members in self.groups.items() if rank in members.ranks}

    def streams(self, rank: int) -> dict[int, int]:
        """Every rank that `rank` exchanges messages with, and over how many TCP streams."""
        stage, worker, place = self.plan.rank_places[rank]
        peers: set[int] = set()
        # The first rank of a tensor-parallel group sends and receives for all of it.
        part, slice_ = divmod(place, self.plan.stages[stage].workers[worker].tp // self.context)
        for m in [] if slice_ else (self.plan.routes[:, stage] == worker).nonzero()[0]:
            peers |= {self.peer(int(m), s, part) for s in (stage - 1, stage + 1) if 0 <= s < len(self.plan.stages)}
        for members in self.groups_of(rank).values():
            peers |= {b if a == rank else a for a, b in members.leader_pairs() if rank in (a, b)}
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
        places = self.plan.rank_places
        stages = {places[r][0] for r in members.ranks}
        if any({places[r][0] for r in region} != stages for region in members.regions):
            return None
        here = next(region for region in members.regions if rank in region)
        shares = self.plan.shares(min(stages))
        mine = {places[r][1] for r in here if places[r][0] == min(stages)}
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
        mates = set(self.worker_ranks(rank)) | set(self.expert_ranks(rank))
        return sorted((near | set(self.streams(rank)) | mates | {0}) - {rank})


def check_runnable(
    problem: Problem, plan: Plan, context: int = 1, expert: int = 1, *, sequence_parallel: bool = False
) -> None:
    """Require what the runner can execute; `InputError` says what it cannot."""
    model = problem.model
    for s, stage in enumerate(plan.stages):
        if stage.zero == 3 and plan.local_steps > 1:
            raise InputError(f"plan.stages[{s}].zero: found 3, expected 0, 1 or 2 (with local steps)")
        for w, worker in enumerate(stage.workers):
            where = f"plan.stages[{s}].workers[{w}]"
            if worker.tp % context:
                raise InputError(f"{where}: found {worker.tp} devices, expected a multiple of the cp degree {context}")
            tp = worker.tp // context
            for what in ("heads", "kv_heads", "expert_ffn_size" if model.experts else "ffn_size"):
                if getattr(model, what) % tp:
                    raise InputError(
                        f"{where}: found a tensor-parallel group of {tp} devices, "
                        f"expected a divisor of the model's {what} = {getattr(model, what)}"
                    )
            if context > 1:
                check_context(problem, tp, context, where)
            if sequence_parallel:
                check_sequence_parallel(problem, tp, context, where)
    if expert > 1:
        check_experts(Layout(problem, plan, context, expert))
    servers = plan.reduction != "all-reduce"
    if servers and any(use.weight_gradients == "powersgd" for use in plan.links):
        raise InputError("plan.links: found weight_gradients 'powersgd', expected another packing (with servers)")
    if servers and plan.local_steps > 1:
        raise InputError(f"plan.reduction: found {plan.reduction!r}, expected 'all-reduce' (with local steps)")
    if plan.local_steps > 1 or servers:
        if plan.local_steps > 1 and problem.batch.precision == "fp16":
            raise InputError("batch.precision: found 'fp16', expected bf16 or fp32 (local steps have no loss scaling)")
        for s, stage in enumerate(plan.stages):
            degrees = sorted({worker.tp for worker in stage.workers})
            if len(degrees) > 1:
                raise InputError(
                    f"plan.stages[{s}]: found tp {degrees}, expected equal ones (with local steps or servers)"
                )


def check_context(problem: Problem, tp: int, context: int, where: str) -> None:
    """Require sequences and heads that the parts of a worker can share."""
    model, seq_len = problem.model, problem.batch.seq_len
    if model.family == "vit":
        raise InputError(f"{where}: found a cp degree of {context} with an image model, expected a language model")
    if seq_len % context:
        raise InputError(f"batch.seq_len: found {seq_len}, expected a multiple of the cp degree {context}")
    if model.heads // tp % context:
        raise InputError(
            f"{where}: found a cp degree of {context}, expected a divisor of the {model.heads // tp} heads of a device"
        )
    kv_heads = model.kv_heads // tp
    if kv_heads % context and context % kv_heads:
        raise InputError(
            f"{where}: found a cp degree of {context}, expected a divisor or multiple of its {kv_heads} kv heads"
        )


def check_sequence_parallel(problem: Problem, tp: int, context: int, where: str) -> None:
    """Require tokens that the devices of a tensor-parallel group can split."""
    model, tokens = problem.model, problem.batch.seq_len // context
    if model.family == "vit":
        raise InputError(f"{where}: found sequence parallelism with an image model, expected a language model")
    if tokens % tp:
        raise InputError(
            f"batch.seq_len: found {tokens} tokens on a device, expected a multiple of the tp degree {tp} (with "
            "sequence parallelism)"
        )


def check_experts(layout: Layout) -> None:
    """Require that ranks with different experts of a layer can exchange tokens: same place, same order of actions."""
    plan, model, expert = layout.plan, layout.problem.model, layout.expert
    if not model.experts or model.experts % expert:
        raise InputError(f"ep: found {expert}, expected a divisor of the model's {model.experts} experts")
    if plan.local_steps > 1 or plan.reduction != "all-reduce":
        raise InputError(f"ep: found {expert}, expected 1 (with local steps or parameter servers)")
    for s, stage in enumerate(plan.stages):
        if layout.sums_whole([s]) or stage.width * layout.context % expert:
            raise InputError(
                f"plan.stages[{s}]: found {stage.width} workers x {layout.context} parts of a sequence, "
                f"expected equal ones, and a multiple of the ep degree {expert}"
            )
        kinds = ["".join(action.kind for action in worker_order(plan, s, w)) for w in range(stage.width)]
        for rank in (layout.rank(s, w) for w in range(stage.width)):
            mates = layout.expert_ranks(rank)
            if len({layout.region_of[mate] for mate in mates}) > 1:
                raise InputError(
                    f"plan.stages[{s}]: found ranks {mates} in several regions, expected one (they share experts)"
                )
            if len({kinds[plan.rank_places[mate][1]] for mate in mates}) > 1:
                raise InputError(
                    f"plan.stages[{s}]: found ranks {mates} with different orders of forward and backward, "
                    "expected the same (they share experts)"
                )
