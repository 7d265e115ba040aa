"""A run of one rank: meet the others, execute the plan's steps, update the weights, log."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from polygon_comm.reduction import SumGroup
from polygon_comm.transport import PeerLostError, Wires, local_address
from torch.distributed import PrefixStore, Store, TCPStore

from polygon.domain.errors import InputError, PolygonError
from polygon.domain.plan import Plan, Problem
from runners.engine.data import samples_for
from runners.engine.layout import Layout, check_runnable
from runners.engine.log import RunLog
from runners.engine.options import Options
from runners.engine.worker import StageWorker


class RunFailedError(PolygonError):
    """A run that cannot go on; the message says who noticed what."""


def choose_device(options: Options, local_rank: int) -> torch.device:
    """The device to compute on: a GPU where there is one, unless told otherwise."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device: found 'cuda', expected cpu (torch sees no GPU here)")
    if options.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def open_store(host: str, port: int, rank: int, timeout_s: float, listen_fd: int | None = None) -> TCPStore:
    """The place where ranks meet, kept by rank 0 (on a socket that listens already, where it is given one)."""
    timeout = timedelta(seconds=timeout_s)
    try:
        return TCPStore(host, port, None, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listen_fd)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise RunFailedError(f"rank {rank}: no meeting point at tcp://{host}:{port}: {reason}") from error


def run_digest(problem: Problem, plan: Plan, options: Options) -> str:
    """A short name of what is to be run; equal on ranks that run the same thing."""
    parts = [repr(problem.model), repr(problem.batch), repr(plan.stages), plan.routes.tolist(), plan.micro_batch_size]
    parts += [plan.spans, repr(plan.links), plan.reduction, plan.local_steps, options.shared()]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:12]


def agree(store: Store, rank: int, world_size: int, digest: str) -> None:
    """Wait for all ranks and require that they run the same thing; the same error on all of them if not."""
    try:
        store.set(f"digest/{rank}", digest)
        if rank == 0:
            store.set("verdict", _verdict(store, world_size, digest))
        verdict = store.get("verdict").decode()
        store.set(f"seen/{rank}", "1")
        if rank == 0:
            # Rank 0 keeps the meeting point: it must not leave before all who came have read the verdict.
            for other in range(world_size):
                if store.check([f"digest/{other}"]):
                    store.get(f"seen/{other}")
    except RuntimeError as error:
        raise RunFailedError(f"rank {rank}: the ranks did not meet: {str(error).splitlines()[0]}") from error
    if verdict != "ok":
        raise InputError(verdict)


def _verdict(store: Store, world_size: int, digest: str) -> str:
    for other in range(world_size):
        try:
            found = store.get(f"digest/{other}").decode()
        except RuntimeError:
            return f"rank {other} did not come"
        if found != digest:
            return f"plan and options of rank {other}: found digest {found}, expected {digest} as on rank 0"
    return "ok"


class Training:
    """A rank in the middle of a run."""

    def __init__(self, problem: Problem, plan: Plan, rank: int, store: Store, address: str, options: Options) -> None:
        check_runnable(problem, plan)
        self.layout, self.rank, self.options = Layout(problem, plan), rank, options
        pool = problem.cluster.pools[plan.stages[plan.rank_places[rank][0]].workers[plan.rank_places[rank][1]].pool]
        device_number = next(number for number, r in plan.device_ranks.items() if r == rank)
        device = choose_device(options, (device_number - pool.first_device) % pool.devices_per_node)
        here = self.layout.region_of[rank]
        self.wires = Wires(
            PrefixStore("wires", store),
            rank,
            self.layout.streams(rank),
            address=address,
            timeout_s=options.timeout_s,
            device=device,
            near=frozenset(r for r, region in self.layout.region_of.items() if region == here),
            shapes=self.layout.link_shapes(rank) if options.emulate_links else None,
        )
        sums = {name: SumGroup(members, self.wires) for name, members in self.layout.groups_of(rank).items()}
        self._all = sums["all"]
        path = None if options.log_dir is None else options.log_dir / f"rank-{rank}.jsonl"
        self.log = RunLog(path, options.traced_steps)
        samples = samples_for(problem.model, problem.batch.seq_len, options.seed, options.data)
        self.worker = StageWorker(self.layout, rank, self.wires, sums, samples, options, self.log)
        self.optimizer = self._make_optimizer(problem.batch.optimizer)
        self.tokens = problem.batch.tokens
        self.log.write(
            "run", rank=rank, world_size=plan.world_size, stage=self.worker.stage, worker=self.worker.worker,
            region=self.layout.region_name(rank), device=str(device), model=problem.model.name,
            parameters=sum(p.numel() for p in self.worker.parameters().values()), time_s=time.time(),
            torch=torch.__version__, options=options.shared(),
        )  # fmt: skip

    def _make_optimizer(self, name: str) -> torch.optim.Optimizer:
        parameters = self.worker.parameters().values()
        decay = self.options.weight_decay
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if name == "sgd":
            return torch.optim.SGD(groups, lr=self.options.learning_rate, momentum=0.9)
        return torch.optim.AdamW(groups, lr=self.options.learning_rate, betas=(0.9, 0.95))

    def _scalars(self) -> tuple[float, float]:
        """Mean loss and gradient norm of the whole model, from all ranks."""
        worker = self.worker
        squares = torch.zeros((), dtype=torch.float64)
        for bucket in worker.reducer.buckets:
            # Of equal copies one counts: a stage's first worker; of a tied weight, the embedding's.
            if worker.worker == 0 and (bucket.name != "tied" or worker.is_first):
                squares += torch.linalg.vector_norm(bucket.vector, dtype=torch.float64).cpu() ** 2
        pair = torch.stack([worker.loss_sum.cpu(), squares])
        if self.wires.device.type == "cuda":
            pair = pair.to(self.wires.device)
        self._all.sum_(pair, "scalars")
        loss, squares = pair.tolist()
        return loss * worker.loss_scale, squares**0.5

    def step(self, step: int) -> dict[str, Any]:
        """One optimizer step; returns what was measured."""
        start_s, worker, options = time.time(), self.worker, self.options
        self.log.step = step
        worker.run_schedule(step)
        scalars = worker.reducer.submit(self._scalars)
        with self.log.interval("exposed", "wait for reduction"):
            worker.reducer.wait()
            loss, norm = scalars.result()
        with self.log.interval("update", "update"):
            if options.clip_norm is not None and norm > options.clip_norm:
                for bucket in worker.reducer.buckets:
                    bucket.vector.mul_(options.clip_norm / norm)
            factor = min(1.0, (step + 1) / options.warmup_steps) if options.warmup_steps else 1.0
            for group in self.optimizer.param_groups:
                group["lr"] = options.learning_rate * factor
            self.optimizer.step()
            worker.reducer.zero()
        worker.finish_sends(step)
        seconds = time.time() - start_s
        self.log.write("order", step=step, actions=" ".join(map(str, worker.executed)))
        result = {
            "step": step, "loss": loss, "gradient_norm": norm, "seconds": seconds, "tokens": self.tokens,
            "tokens_per_s": self.tokens / seconds, "seconds_by_kind": self.log.take_seconds(),
            "sent_bytes": {str(peer): n for peer, n in sorted(self.wires.sent_bytes.items())},
        }  # fmt: skip
        self.wires.sent_bytes.clear()
        self.log.write("step", **result)
        return result

    def close(self) -> None:
        """Wait for the last messages and end the threads."""
        self.worker.finish_sends(self.options.steps)
        self.worker.reducer.close()
        self.log.write("end", time_s=time.time())
        self.log.close()


def train(
    problem: Problem,
    plan: Plan,
    rank: int,
    host: str,
    port: int,
    options: Options,
    report: Callable[[dict[str, Any]], None] = lambda result: None,
    listen_fd: int | None = None,
) -> None:
    """Run a plan's rank to the end.

    Raises
    ------
    InputError
        What is asked cannot be run, or the ranks do not run the same thing.
    RunFailedError
        A peer was lost; the message names it, its region and this rank's last action.
    """
    check_runnable(problem, plan)
    store = open_store(host, port, rank, options.timeout_s, listen_fd)
    agree(store, rank, plan.world_size, run_digest(problem, plan, options))
    layout = Layout(problem, plan)
    training: Training | None = None
    try:
        training = Training(problem, plan, rank, store, local_address(host, port), options)
        for step in range(options.steps):
            report(training.step(step))
        training.close()
        _leave_together(store, rank, plan.world_size)
    except PeerLostError as error:
        executed = training.worker.executed if training else []
        last = f"last action {executed[-1]}" if executed else "before the first action"
        raise RunFailedError(
            f"{layout.describe(rank)}: lost {layout.describe(error.peer)}: {error} ({last})"
        ) from error


def _leave_together(store: Store, rank: int, world_size: int) -> None:
    """Rank 0 keeps the meeting point, so it leaves last."""
    store.set(f"done/{rank}", "1")
    if rank == 0:
        for other in range(world_size):
            store.get(f"done/{other}")
