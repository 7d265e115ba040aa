"""Steps and log of a run whose ranks hold replicas."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import distributed
from torch.profiler import record_function

from polygon.domain.errors import InputError, require
from polygon.domain.model import Batch, Model
from runners.engine.data import Samples, count_targets
from runners.engine.device import choose_device, memory_bytes
from runners.engine.log import RunLog
from runners.engine.meeting import open_store
from runners.engine.options import Options
from runners.engine.trackers import open_trackers
from runners.recipes.backends import Job, Place
from runners.recipes.data import make_samples
from runners.recipes.models import batch_of, beside, model_of
from runners.recipes.replicas.figures import mfu
from runners.recipes.replicas.state import StateBytes
from runners.recipes.replicas.whole import WholeModel, adapter, add_lora
from runners.recipes.schema import Recipe
from runners.traces.record import FOLDER as PROFILE_FOLDER
from runners.traces.record import Recorder

ADAPTER_FILE = "adapter.safetensors"
"""What a run with LoRA leaves: the low-rank additions and the head's projection."""
TRACKED = ("loss", "gradient_norm", "samples_per_s", "tokens_per_s", "mfu", "memory_bytes")


class Replica(Protocol):
    """What computes on a rank."""

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor, *, last: bool) -> torch.Tensor:
        """Summed loss of a micro-batch; `last`: of the step."""

    def backward(self, loss: torch.Tensor, share: float) -> None:
        """Add a micro-batch's gradients: those of loss times share, averaged over micro-batches and ranks."""

    def update(self, rate: float) -> tuple[float, StateBytes]:
        """Update; the gradient's norm and what memory held."""


Maker = Callable[[WholeModel, Batch, Recipe, torch.device], Replica]


def check_replicated(recipe: Recipe, model: Model) -> None:
    """Refuse what whole replicas do not have."""
    parallel = recipe.parallel
    for name in ("tp", "pp", "cp", "ep"):
        require(getattr(parallel, name) == 1, f"parallel.{name}", getattr(parallel, name), "1 (else backend engine)")
    each = parallel.dp * recipe.batch.micro_batch
    found = recipe.batch.global_batch
    require(found % each == 0, "batch.global_batch", found, f"a multiple of dp x micro_batch = {each}")
    require(not model.experts, "model", f"{model.experts} experts", "a dense one (else backend engine)")
    if recipe.checkpoint is not None:
        raise InputError("checkpoint: found with replicas, expected backend engine")


@contextmanager
def _together(place: Place, device: torch.device) -> Iterator[None]:
    """The ranks' process group."""
    store = open_store(place.host, place.port, place.rank, 300.0, place.listen_fd)
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size)
    try:
        yield
        distributed.barrier()
    finally:
        # What holds the group must be gone before the group is: gloo may else wait for ever in its destructor.
        gc.collect()
        distributed.destroy_process_group()


def _whole_model(job: Job, model: Model, device: torch.device, *, reentrant: bool) -> WholeModel:
    recipe = job.recipe
    whole = WholeModel(model, recipe.seed, recipe.memory.recompute, reentrant=reentrant, device=device)
    if recipe.model.weights is not None:
        from runners.recipes.weights import load_weights

        load_weights(whole.layers, model, beside(job.folder, recipe.model.weights))
    if recipe.lora is not None:
        add_lora(whole, recipe.lora, recipe.seed)
    return whole


@dataclass
class _Run:
    """A rank in the middle of a run."""

    recipe: Recipe
    model: Model
    batch: Batch
    place: Place
    device: torch.device
    replica: Replica
    samples: Samples
    targets_per_sample: int
    log: RunLog

    def step(self, step: int) -> dict[str, Any]:
        """One optimizer step, and what was measured."""
        recipe, batch, log = self.recipe, self.batch, self.log
        size, dp = recipe.batch.micro_batch, recipe.parallel.dp
        accumulation = batch.global_batch // (size * dp)
        start_s, start_cpu_s, log.step = time.time(), time.process_time(), step
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        numbers = range(step * batch.global_batch, (step + 1) * batch.global_batch)
        targets = count_targets(self.samples, numbers, self.targets_per_sample)
        for m in range(accumulation):
            first = (m * dp + self.place.rank) * size
            inputs, wanted = (part.to(self.device) for part in self.samples.batch(numbers[first : first + size]))
            with log.interval("forward", f"F{m}"):
                part = self.replica.forward(inputs, wanted, last=m == accumulation - 1)
            loss += part.detach()
            with log.interval("backward", f"B{m}"):
                self.replica.backward(part, accumulation * dp / targets)
        rate = recipe.optimizer.learning_rate
        if recipe.optimizer.warmup_steps:
            rate *= min(1.0, (step + 1) / recipe.optimizer.warmup_steps)
        with log.interval("update", "update"):
            norm, held = self.replica.update(rate)
        with log.interval("wait", "sum of the loss"):
            distributed.all_reduce(loss)
        seconds, cpu_s = time.time() - start_s, time.process_time() - start_cpu_s
        result = {
            "step": step, "loss": loss.item() / targets, "gradient_norm": norm, "seconds": seconds,
            "samples": batch.global_batch, "tokens": batch.tokens, "tokens_per_s": batch.tokens / seconds,
            "samples_per_s": batch.global_batch / seconds, "mfu": mfu(recipe, self.model, batch, seconds),
            "cpu_s": cpu_s, "seconds_by_kind": log.take_seconds(),
            "memory_bytes": memory_bytes(self.device), "state_bytes": held.to_dict(),
        }  # fmt: skip
        if self.device.type == "cuda":
            result["allocated_bytes"] = torch.cuda.memory_allocated(self.device)
            result["reserved_bytes"] = torch.cuda.max_memory_reserved(self.device)
        log.write("step", **result)
        return result


def train(job: Job, place: Place, make: Maker, *, reentrant: bool = False) -> int:
    """All that one rank does; its exit code."""
    recipe, metrics = job.recipe, job.recipe.metrics
    model = model_of(recipe.model, job.folder)
    batch = batch_of(recipe, model)
    device = choose_device(Options(device=job.device), place.local_rank)
    samples = make_samples(recipe.data, model, batch.seq_len, recipe.seed, job.folder)
    whole = _whole_model(job, model, device, reentrant=reentrant)
    log = RunLog(job.out / f"rank-{place.rank}.jsonl")
    log.write(
        "run", rank=place.rank, world_size=place.world_size, device=str(device), model=model.name, time_s=time.time(),
        parameters=sum(p.numel() for p in whole.parameters()), recipe=recipe.model_dump(),
        trained=sum(p.numel() for p in whole.parameters() if p.requires_grad),
    )  # fmt: skip
    trackers = [name for name, on in (("tensorboard", metrics.tensorboard), ("wandb", metrics.wandb != "off")) if on]
    with ExitStack() as stack:
        stack.callback(log.close)
        stack.enter_context(_together(place, device))
        per_sample = 1 if model.family == "vit" else batch.seq_len
        run = _Run(recipe, model, batch, place, device, make(whole, batch, recipe, device), samples, per_sample, log)
        tracker = stack.enter_context(
            open_trackers(trackers if place.rank == 0 else [], job.out, recipe.name, recipe.model_dump())
        )
        recorder = None
        if metrics.profile_steps:
            folder = job.out / PROFILE_FOLDER
            recorder = Recorder(folder, place.rank, place.world_size, steps=metrics.profile_steps)
            stack.callback(recorder.close)
            log.annotate = record_function
        for step in range(recipe.steps):
            result = run.step(step)
            tracker.scalars(step, {name: result[name] for name in TRACKED})
            if recorder is not None:
                recorder.step()
            if place.rank == 0:
                text = f"step {step:5d}  loss {result['loss']:.4f}  norm {result['gradient_norm']:.3f}"
                print(f"{text}  {result['samples_per_s']:,.1f} samples/s", file=sys.stderr, flush=True)  # noqa: T201
        if recipe.lora is not None and recipe.parallel.zero < 3 and place.rank == 0:
            from safetensors.torch import save_file

            save_file(adapter(whole), job.out / ADAPTER_FILE)
        del run
    return 0
