"""A rank in the middle of a run: executes the plan's steps, updates the weights, saves, logs."""

from __future__ import annotations

import math
import sys
import threading
import time
from dataclasses import replace
from typing import Any, TypeVar

import torch
from polygon_comm.accelerator import Accelerator
from polygon_comm.exchange import ExchangeGroup
from polygon_comm.link_watch import LinkWatch, WatchedLink
from polygon_comm.members import CUT
from polygon_comm.parameter_server import ServerGroup
from polygon_comm.reduction import SumGroup
from polygon_comm.sharding import PartExchange
from polygon_comm.tensor_group import TensorGroup
from polygon_comm.transport import Wires
from torch.distributed import PrefixStore, Store

from polygon.domain.schedule import Action
from runners.data.samples import Samples, Shuffled, count_targets, digest_of
from runners.engine.agreement import Agreement, Scalars
from runners.engine.checkpoint import (
    Checkpoints,
    DivergedError,
    SavedProgress,
    UnsavedError,
    canonical,
    file_of,
    region_file,
)
from runners.engine.collector import Collector
from runners.engine.device import accelerator_of, choose_device, device_memory, memory_bytes
from runners.engine.emulation import Pace, backward_shares, kind_of, least_seconds
from runners.engine.failure_detector import Watch
from runners.engine.gradients import Bucket
from runners.engine.log import RunLog
from runners.engine.metrics import StepFigures, validation_figures
from runners.engine.options import OF_LOCAL_STEPS, Options
from runners.engine.rank_layout import Layout
from runners.engine.rendezvous import plan_digest
from runners.engine.rounds import Rounds
from runners.engine.trackers import Trackers
from runners.engine.update import Update
from runners.engine.user_model import OwnModel
from runners.engine.worker import StageWorker, WorkerGroups

G = TypeVar("G", bound=TensorGroup)


class Training:
    """A rank in the middle of a run."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        store: Store,
        address: str,
        options: Options,
        watch: Watch | None,
        samples: Samples,
        trackers: Trackers | None = None,
        own: OwnModel | None = None,
        validation: Shuffled | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        problem, plan = layout.problem, layout.plan
        self._watch, self._validation, self._built_in = watch, validation, own is None
        self.layout, self.rank, self.options, self.store = layout, rank, options, store
        self._accelerator = accelerator or self._own_accelerator()
        self._address = address
        self.wires, watched = self._open_wires()
        groups = WorkerGroups(
            self._group(TensorGroup, "compute", layout.tensor_ranks(rank)),
            self._group(TensorGroup, "sums", layout.tensor_ranks(rank)),
            self._group(ExchangeGroup, "context", layout.context_ranks(rank)),
            self._expert_groups(),
        )
        sums = self._open_sums()
        self._sums, self._all = sums, sums["all"]
        path = None if options.log_dir is None else options.log_dir / f"rank-{rank}.jsonl"
        self.log = RunLog(path, options.traced_steps, self._pace(), self._accelerator)
        doing = (lambda action: None) if watch is None else (lambda action: setattr(watch, "doing", action))
        parts = (self._part_exchange("gradients"), self._part_exchange("weights")) if layout.owners(rank) else None
        self.worker = StageWorker(
            *(layout, rank, self.wires, sums, groups, samples, options, self.log, parts, own, doing)
        )
        self._link_watch = LinkWatch(watched, self._say)
        self.buckets = self.worker.reducer.buckets
        self.update = Update(
            self.buckets,
            rank,
            problem.batch.optimizer,
            options,
            scaled=problem.batch.precision == "fp16",
        )
        self.rounds = Rounds(self.buckets, self._all, plan.local_steps, options, self.worker.reducer.line)
        self.progress = SavedProgress(seed=options.seed, data=digest_of(samples))
        self.unsaved: UnsavedError | None = None
        """Why the last checkpoint could not be written, if so."""
        self.diverged: DivergedError | None = None
        """What is no number any more, if so: then nothing is saved, and the run ends."""
        self._lost_gradient = False
        """Whether a gradient of this region was no number since all met."""
        self.stop_requested = threading.Event()
        self._agreement = Agreement(rank, self.worker, self._all, self.stop_requested)
        self.checkpoints: Checkpoints | None = None
        if options.checkpoint_dir is not None:
            self.checkpoints = Checkpoints(
                options.checkpoint_dir,
                problem.model,
                options.checkpoints_kept,
                rank,
                plan.world_size,
                store.clone(),  # type: ignore[attr-defined]
                options.additions,
            )
        self._figures = StepFigures(problem, plan, self.worker.step_flops)
        self.collector: Collector | None = None
        if options.track and trackers is not None:
            self.collector = Collector(store.clone(), rank, self._figures, trackers)  # type: ignore[attr-defined]
        if options.resume:
            self._resume()
        self._say_what_is_not_run()
        self.worker.begin(self.progress.step, options.steps, self.progress.samples)
        self._log_run()

    def _own_accelerator(self) -> Accelerator:
        """Of the device that the plan gives this rank, on this machine."""
        plan = self.layout.plan
        pool = self.layout.problem.cluster.pools[self.layout.worker_of(self.rank).pool]
        device = next(number for number, rank in plan.device_ranks.items() if rank == self.rank)
        local_rank = (device - pool.first_device) % pool.devices_per_node
        return accelerator_of(choose_device(self.options, local_rank))

    def _open_wires(self) -> tuple[Wires, list[WatchedLink]]:
        """Connections to the peers of this rank, and those of them whose rate is watched."""
        layout, rank, options = self.layout, self.rank, self.options
        links = layout.link_shapes(rank)
        wires = Wires(
            PrefixStore("wires", self.store),
            rank,
            layout.streams(rank),
            address=self._address,
            timeout_s=options.timeout_s,
            accelerator=self._accelerator,
            near=layout.near(rank),
            shapes=links if options.emulate_links else None,
            warm_bytes=layout.warm_bytes(rank),
            bytes_per_s={peer: link.bytes_per_s for peer, link in links.items()},
        )
        watched = [
            WatchedLink(layout.describe(peer), wires.connections[peer], link.bytes_per_s)
            for peer, link in links.items()
            if wires.connections.get(peer) and not options.emulate_links
        ]
        return wires, watched

    @property
    def _served(self) -> bool:
        """Whether parameter servers hold the weights."""
        return self.layout.plan.reduction != "all-reduce"

    def _open_sums(self) -> dict[str, SumGroup]:
        """This rank's part in all sums: of its stages, of tied weights, of shard groups, and of all ranks."""
        layout, rank = self.layout, self.rank
        sums = {
            name: (ServerGroup if self._served and name != "all" else SumGroup)(members, self.wires)
            for name, members in layout.groups_of(rank).items()
        }
        for name in list(sums):
            for members in filter(None, layout.shard_groups.get(f"{rank}/{name}", ())):
                sums[members.name] = SumGroup(members, self.wires)
        return sums

    def _pace(self) -> Pace | None:
        """How long computations take at least, where devices are emulated."""
        problem, plan = self.layout.problem, self.layout.plan
        if not self.options.emulate_devices:
            return None
        seconds = least_seconds(problem, plan, self.rank, self.options.emulate_devices)
        shares = {
            kind_of(str(Action("B", 0, chunk))): backward_shares(problem, plan, self.rank, chunk)
            for chunk in range(plan.chunks)
        }
        return Pace(seconds, shares)

    def _say_what_is_not_run(self) -> None:
        """What of the plan this rank does otherwise: ZeRO that others cannot share, products that its device lacks."""
        layout, rank = self.layout, self.rank
        stage, _, _ = layout.plan.rank_places[rank]
        for s in layout.stages_of(rank) if rank == layout.rank(stage, 0) else ():
            zero = layout.plan.stages[s].zero
            if zero >= 1 and not layout.zero_of([s]):
                why = "parameter servers" if self._served else "workers of different tensor-parallel degrees"
                self._say(f"stage {s}: ZeRO-{zero} is not run: {why} hold whole weights and gradients")
            elif zero > layout.zero_of([s]):
                self._say(f"stage {s}: ZeRO-{zero} is run as ZeRO-1: with LoRA every worker holds the fixed weights")
        if layout.problem.batch.precision == "fp8" and not self.worker.eight_bits:
            self._say(f"rank {rank}: {self._accelerator.device} has no products in 8 bits, computing in bf16")
        default = Options()
        unheeded = [name for name in OF_LOCAL_STEPS if getattr(self.options, name) != getattr(default, name)]
        if rank == 0 and layout.plan.local_steps == 1 and unheeded:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in unheeded)
            self._say(f"{flags}: not heeded, the plan has no local steps (all regions sum the gradients of every step)")

    def _log_run(self) -> None:
        """Write the first line of the log."""
        layout, rank = self.layout, self.rank
        stage, worker, _ = layout.plan.rank_places[rank]
        self.log.write(
            "run", rank=rank, world_size=layout.plan.world_size, stage=stage, worker=worker,
            region=layout.region_name(rank), device=str(self._accelerator.device), model=layout.problem.model.name,
            parameters=sum(bucket.size for bucket in self.buckets), time_s=time.time(),
            first_step=self.progress.step, torch=torch.__version__, options=self.options.shared(),
            step_flops=self.worker.step_flops,
        )  # fmt: skip

    def _group(self, kind: type[G], purpose: str, ranks: list[int]) -> G | None:
        """Ranks that work together on a micro-batch. Threads that use them at the same time need a group each."""
        if len(ranks) == 1:
            return None
        return kind(
            PrefixStore(f"worker/{ranks[0]}/{purpose}", self.store),
            ranks.index(self.rank),
            len(ranks),
            devices=self.wires.devices,
            timeout_s=self.options.timeout_s,
            accelerator=self._accelerator,
        )

    def _expert_groups(self) -> dict[int, ExchangeGroup]:
        """Ranks that share out the experts of a stage; stages with the same ones have a group in common."""
        made: dict[tuple[int, ...], ExchangeGroup | None] = {}
        found = {}
        for stage in self.layout.stages_of(self.rank):
            ranks = tuple(self.layout.expert_ranks(self.rank, stage))
            if ranks not in made:
                made[ranks] = self._group(ExchangeGroup, f"experts/{len(ranks)}", list(ranks))
            group = made[ranks]
            if group is not None:
                found[stage] = group
        return found

    def _part_exchange(self, what: str) -> PartExchange:
        """Connections to the ranks of this region with which gradients or weights are split (ZeRO-2 and 3)."""
        owners = self.layout.owners(self.rank)
        return PartExchange(
            Wires(
                PrefixStore(f"parts/{what}", self.store),
                self.rank,
                dict.fromkeys(sorted(owners), 1),
                address=self._address,
                timeout_s=self.options.timeout_s,
                accelerator=self._accelerator,
                near=frozenset(owners),
            )
        )

    def _resume(self) -> None:
        """Load the newest checkpoint that every rank can load; none: start from the beginning."""
        assert self.checkpoints is not None
        model = self.layout.problem.model
        names = [name for bucket in self.buckets for name in bucket.parameters]
        step, faults = self.checkpoints.agree(file_of(model, name) for name in names)
        for fault in faults:
            self._say(f"rank {self.rank}: checkpoint not used: {fault}")
        if step is None:
            if self.rank == 0:
                self._say(f"no whole checkpoint in {self.options.checkpoint_dir}: starting from step 0")
            return
        here = self.progress.data
        found, states = self.checkpoints.load(step, names, self.options.seed)
        self.progress = replace(found, data=here)
        self.update.resume_scaling(found.loss_scale, found.good_steps)
        if self.rank == 0 and found.data not in ("", here):
            self._say(f"other data than the checkpoint's: going on with sample {found.samples} of what is read now")
        self._resume_region(step, states)
        for bucket in self.buckets:
            self.update.load(bucket, {name: states[name] for name in bucket.parameters}, self._more(bucket))
        self.rounds.restart()
        self._resume_owed(step)
        if self.rank == 0:
            self._say(f"resumed from step {step}")

    def _resume_region(self, step: int, states: dict[str, dict[str, Any]]) -> None:
        """Where regions train by themselves, put the optimizer state that this one had in place of another one's."""
        assert self.checkpoints is not None
        if not self.alone:
            return
        names = [name for bucket in self.buckets if bucket.fraction is not None for name in bucket.parameters]
        region = self.layout.region_name(self.rank)
        own = self.checkpoints.load_region(step, names, region)
        for name, state in (own or {}).items():
            states[name] = states[name] | state
        if own is None and self._all.near_place == 0:
            self._say(f"region {region}: optimizer state of its own is not in the checkpoint: taking another one's")

    def _owed(self) -> dict[str, Any]:
        """What packing dropped from this rank's weight gradients and owes to the next messages; empty: nothing."""
        groups = {name: group.feedback(self.update.loss_scale) for name, group in self._sums.items()}
        owed = {name: states for name, states in groups.items() if states}
        return {**self._messages, "groups": owed} if owed else {}

    @property
    def _messages(self) -> dict[str, Any]:
        """By what it is known whether error feedback of a checkpoint is of the messages of this run."""
        return {"plan": plan_digest(self.layout.problem, self.layout.plan), "cut": CUT}

    def _resume_owed(self, step: int) -> None:
        """Go on with the error feedback of a checkpoint; under another plan messages are others, and it is dropped."""
        assert self.checkpoints is not None
        if not any(group.leads for group in self._sums.values()):
            return
        owed = self.checkpoints.load_owed(step)
        if owed is not None and self._messages.items() <= owed.items():
            for name, states in owed["groups"].items():
                self._sums[name].restore_feedback(states, self.update.loss_scale)
        else:
            why = "of another plan or version" if owed is not None else "not in it"
            self._say(f"rank {self.rank}: error feedback of the checkpoint is {why}: starting without")

    def _more(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of a bucket beside weights and optimizer state."""
        outer = self.rounds.outer.get(bucket.name)
        return {} if outer is None else {"outer_momentum": outer.momentum}

    def _say(self, text: str) -> None:
        self.log.write("note", text=text)
        print(text, file=sys.stderr, flush=True)  # noqa: T201

    @property
    def alone(self) -> bool:
        """Whether the regions sum the gradients of the next step, or that under way, each for itself."""
        return self.rounds.alone(self.progress.step)

    def _expect(self) -> None:
        """Let the others send early what is summed in the step."""
        if not self.alone and self.options.lookahead:
            self.worker.reducer.expect()
            self._agreement.expect()

    def step(self, *, meet: bool = False, validate: bool = False) -> tuple[dict[str, Any], bool]:
        """One optimizer step: what was measured, and whether to go on.

        `meet`: make the regions' weights equal soon; `validate`: where they are, hold them against the samples for it.
        """
        start_s, worker, step = time.time(), self.worker, self.progress.step
        last = step + 1 == self.options.steps
        for bucket in self.buckets:
            bucket.alone = self.alone
        together = last or self.rounds.meets(step, wanted=meet)
        self.log.step = step
        worker.overflow_scale = self.update.loss_scale
        self._expect()
        worker.run_schedule(step)
        schedule_end_s = time.time()
        with self.log.interval("exposed", "wait for reduction"):
            scalars = self._agreement.reduce(alone=self.alone)
        reduced_s = time.time()
        with self.log.interval("update", "update"):
            applied = self.update.apply(scalars.norm, step)
        exchanged_s, norm = time.time(), scalars.norm
        if self.alone:
            self._lost_gradient |= not applied
            scalars = self._exchange(step, scalars, together=together)
        elif self.rounds.alone(step + 1):
            self.rounds.restart()
        met_s = time.time()
        worker.messages.finish_sends(step)
        self.progress = replace(self.progress, step=step + 1, samples=self.progress.samples + worker.global_batch)
        # The host has waited for the device once before, to know the gradient's norm; here it does for the figures.
        self._accelerator.finish()
        seconds, tokens = time.time() - start_s, self.layout.problem.batch.tokens
        by_kind = self.log.take_seconds()
        working = by_kind.get("compute", 0.0) + by_kind.get("update", 0.0)
        self.log.write("order", step=step, actions=" ".join(map(str, worker.executed)))
        result = {
            "step": step, "loss": scalars.loss, "gradient_norm": norm / worker.overflow_scale,
            "applied": applied, "together": together, "seconds": seconds, "tokens": tokens,
            "tokens_per_s": tokens / seconds, "mfu": self._figures.mfu(seconds), "seconds_by_kind": by_kind,
            "idle": max(0.0, 1 - working / seconds),
            "memory_bytes": memory_bytes(self.wires.device), "packing_error": self._packing_error(),
            "start_s": start_s, "schedule_end_s": schedule_end_s - start_s, "reduced_s": reduced_s - start_s,
            "outer_s": [exchanged_s - start_s, met_s - start_s],
            "clock_offset_s": self._clock_offset_s(), **self.log.take_messages(start_s),
            "sent_bytes": {str(peer): n for peer, n in sorted(self.wires.sent_bytes.items())},
            "device_memory": device_memory(self.wires.device),
            "exchanged_bytes": worker.take_exchanged_bytes(), "tokens_here": worker.tokens,
        }  # fmt: skip
        self.wires.sent_bytes.clear()
        self._accelerator.set_clock()
        # Gradients of a loss that is scaled may overflow, and so may a batch's activations; what is not scaled never
        # comes back, nor does a loss at the end.
        finite = math.isfinite(scalars.loss) and math.isfinite(scalars.norm)
        ends = last or (together and scalars.stop)
        if together and not finite and (worker.overflow_scale <= 1 or (ends and not math.isfinite(scalars.loss))):
            found = norm if math.isfinite(scalars.norm) else scalars.norm
            self.diverged = self._has_diverged(step, scalars.loss, found)
        elif together and validate:
            result |= self._validate()
        self.log.write("step", **result)
        if self.collector is not None:
            self.collector.add(result)
        return result, not ends and self.diverged is None

    def _has_diverged(self, step: int, loss: float, norm: float) -> DivergedError:
        last = ""
        if self.checkpoints is not None:
            self._note_write_errors()
            last = f"; {self.checkpoints.last}"
        return DivergedError(
            f"step {step}: found loss {loss:g} and gradient norm {norm:g}, expected finite numbers; "
            f"training ends without a checkpoint of it{last}"
        )

    def validates(self, step: int) -> bool:
        """Whether validation is to follow a step."""
        every = self.options.validate_every
        if self._validation is None or not every:
            return False
        return (step + 1) % every == 0 or step + 1 == self.options.steps

    def _validate(self) -> dict[str, float]:
        """Mean loss of the samples for validation and, of images, the part that is classified rightly."""
        assert self._validation is not None
        start_s, worker, samples = time.time(), self.worker, self._validation
        values = worker.validate(samples) * float(worker.is_last and worker.place == 0)
        worker.reducer.line.submit(lambda: self._all.sum_(values, "validation")).result()
        targets = count_targets(samples, range(len(samples)), worker.targets_per_sample)
        loss, correct = values.tolist()
        tokens = self._built_in and not samples.classified
        seconds = time.time() - start_s
        found = validation_figures(loss, correct, targets, seconds, classified=samples.classified, tokens=tokens)
        # The next step's figures begin where it does.
        self.log.take_seconds(), self.log.take_messages(start_s), worker.take_exchanged_bytes()
        self.wires.sent_bytes.clear()
        return found

    def _packing_error(self) -> dict[str, float]:
        """Part that packing dropped from messages of this step, by what they carried; what was not packed is not named.

        Of weight gradients the largest, of activations and their gradients that of the first message.
        """
        groups = {id(bucket.group): bucket.group for bucket in self.buckets if bucket.group is not None}
        errors = {"weight_gradients": max((group.packing_error for group in groups.values()), default=0.0)}
        errors |= {kind: float(error) for kind, error in self.worker.messages.packing_error.items()}
        return {kind: error for kind, error in errors.items() if error}

    def _clock_offset_s(self) -> float:
        return 0.0 if self._watch is None else self._watch.clock_offset_s

    def _exchange(self, step: int, near: Scalars, *, together: bool) -> Scalars:
        """What the regions send one another after local steps; the loss of all where they meet, else this region's."""
        with self.log.interval("reduce", "outer step"):
            if not together:
                self._take_weights(self.rounds.go_on(step, stop=self.stop_requested.is_set()))
                return near
            self._take_weights(self.rounds.meet())
            lost, self._lost_gradient = self._lost_gradient, False
            return self._agreement.meet(lost=lost)

    def _take_weights(self, names: set[str]) -> None:
        def take() -> None:
            self.update.take_weights(names)
            self._accelerator.finish()  # what comes next is on another thread's stream

        if names:  # owners share them, which must not be while sums begin: after those that do
            self.worker.reducer.line.submit(take).result()

    def held_bytes(self) -> dict[str, int]:
        """Bytes of weights, gradients and optimizer state between two steps; `passing`: most that were there besides.

        Besides are whole weights and gradients of layers that are split (ZeRO-2 and 3).
        """
        return {
            "weights": sum(bucket.weights_bytes for bucket in self.buckets),
            "gradients": sum(bucket.vector.nbytes for bucket in self.buckets),
            "optimizer": self.update.state_bytes() + self.rounds.held_bytes,
            "passing": self.worker.passing_bytes,
        }

    def save(self) -> None:
        """Start writing a checkpoint of the steps done so far."""
        if self.checkpoints is None:
            return
        self._note_write_errors()
        model = self.layout.problem.model
        region, alone = self.layout.region_name(self.rank), self.alone
        files: dict[str, dict[str, dict[str, Any]]] = {}
        for index, bucket in enumerate(self.buckets):
            state = self.update.state(bucket, self._more(bucket))
            # Several hold the same: they take turns. A tied weight has another place on the other stage that holds it.
            turn = 0 if bucket.name == "tied" else index % len(bucket.writers)
            first = bucket.first_here(self.worker.place)
            if first and bucket.writers[turn] == self.rank:
                for name, tensors in state.items():
                    files.setdefault(file_of(model, name), {})[canonical(model, name)] = tensors
            if alone and bucket.fraction is not None and bucket.group is not None and first:
                near = bucket.group.near_ranks
                for name, tensors in state.items() if near[turn % len(near)] == self.rank else ():
                    own = {key: tensors[key] for key in self.update.state_keys if key in tensors}
                    files.setdefault(region_file(model, name, region), {})[canonical(model, name)] = own
        with self.log.interval("checkpoint", "copy for checkpoint"):
            self.checkpoints.save(replace(self.progress, **self.update.scaling()), files, self._owed())

    def _note_write_errors(self) -> None:
        """A checkpoint that could not be written is reported, not a reason to stop training."""
        assert self.checkpoints is not None
        try:
            self.checkpoints.wait()
        except UnsavedError as error:
            self._say(f"rank {self.rank}: {error}")
            self.unsaved = error
        else:
            self.unsaved = None

    def close(self) -> None:
        """Wait for the last messages and files, and end the threads."""
        self.worker.messages.finish_sends()
        self._link_watch.close()
        self.worker.close()
        if self.checkpoints is not None:
            self._note_write_errors()
            self.checkpoints.close()
        if self.collector is not None:
            self.collector.close()
        self.log.write("end", time_s=time.time(), held_bytes=self.held_bytes())
        self.log.close()
