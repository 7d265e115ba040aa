"""Steps and log of a run whose ranks hold replicas."""

from __future__ import annotations

import gc
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch
from torch import distributed
from torch.distributed import Store
from torch.profiler import record_function

from polygon.commands.cli import handled_signals, stop_signals
from polygon.domain.errors import require
from polygon.domain.model import Batch, Model
from runners.data.samples import Samples, Shuffled, count_targets
from runners.engine.additions import add_lora, lora_layers
from runners.engine.checkpoint import DivergedError, SavedProgress
from runners.engine.device import choose_device, memory_bytes
from runners.engine.layers import check_weights
from runners.engine.log import RunLog
from runners.engine.metrics import VALIDATION, validation_figures
from runners.engine.options import Options
from runners.engine.pretrained import Pretrained
from runners.engine.rendezvous import open_store
from runners.engine.summary import format_validation
from runners.engine.trackers import open_trackers
from runners.recipes.backends import Job, Place
from runners.recipes.data import training_and_validation
from runners.recipes.models import batch_of, beside, model_of
from runners.recipes.recipe_schema import Recipe
from runners.recipes.replicas.adapter import FOLDER as ADAPTER_FOLDER
from runners.recipes.replicas.adapter import load_adapter, read_adapter, save_adapter, trained
from runners.recipes.replicas.saving import Home, Saved
from runners.recipes.replicas.state import StateBytes
from runners.recipes.replicas.throughput import mfu
from runners.recipes.replicas.whole import WholeModel
from runners.recipes.weights import load_weights, weight_files
from runners.traces.kineto import FOLDER as PROFILE_FOLDER
from runners.traces.record import Recorder

TRACKED = ("loss", "gradient_norm", "samples_per_s", "tokens_per_s", "mfu", "memory_bytes")


class Replica(Protocol):
    """What computes on a rank."""

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor, *, last: bool) -> torch.Tensor:
        """Summed loss of a micro-batch; `last`: of the step."""

    def backward(self, loss: torch.Tensor, share: float) -> None:
        """Add a micro-batch's gradients: those of loss times share, averaged over micro-batches and ranks."""

    def update(self, rate: float) -> tuple[float, StateBytes]:
        """Update; the gradient's norm and what memory held."""

    def validating(self) -> AbstractContextManager[object]:
        """Inside, `forward` is that of the model as it will be used, and leaves nothing for a backward."""

    def gathered(self) -> AbstractContextManager[object]:
        """Inside, every rank has all that is trained."""

    def saved(self, home: Home) -> Saved:
        """Its checkpoints."""


Maker = Callable[[WholeModel, Batch, Recipe, torch.device], Replica]


def check_replicated(job: Job) -> None:
    """Refuse what whole replicas do not have, and weights that are not there."""
    recipe, model = job.recipe, model_of(job.recipe.model, job.folder)
    parallel = recipe.parallel
    for name in ("tp", "pp", "cp", "ep"):
        require(getattr(parallel, name) == 1, f"parallel.{name}", getattr(parallel, name), "1 (else backend engine)")
    require(not parallel.sequence, "parallel.sequence", True, "false (else backend engine)")
    each = parallel.dp * recipe.batch.micro_batch
    found = recipe.batch.global_batch
    require(found % each == 0, "batch.global_batch", found, f"a multiple of dp x micro_batch = {each}")
    precision = job.recipe.memory.precision
    require(precision != "fp8", "memory.precision", precision, "fp32, bf16 or fp16 (else backend engine)")
    require(not model.experts, "model", f"{model.experts} experts", "a dense one (else backend engine)")
    if recipe.lora is not None:
        lora_layers(model, recipe.lora)
        if recipe.lora.adapter is not None:
            read_adapter(model, recipe.lora, beside(job.folder, recipe.lora.adapter))
    if recipe.model.weights is not None:
        folder = beside(job.folder, recipe.model.weights)
        weight_files(folder) if model.family == "vit" else check_weights(folder, model)


@contextmanager
def _together(place: Place, device: torch.device) -> Iterator[Store]:
    """The ranks' process group, and the store where they met."""
    store = open_store(place.host, place.port, place.rank, 300.0, place.listen_fd)
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size)
    try:
        yield store
        distributed.barrier()
    finally:
        # What holds the group must be gone before the group is: gloo may else wait for ever in its destructor.
        gc.collect()
        distributed.destroy_process_group()


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """SIGTERM and SIGINT (where it is not ignored) are noted, and end the run after the step."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    with handled_signals(stop_signals(), note):
        yield received


def _whole_model(job: Job, model: Model, device: torch.device, *, reentrant: bool) -> WholeModel:
    recipe = job.recipe
    weights = None if recipe.model.weights is None else beside(job.folder, recipe.model.weights)
    pretrained = None
    if weights is not None and model.family != "vit":
        pretrained = Pretrained(weights, model)
    way = recipe.memory.recompute
    whole = WholeModel(model, recipe.seed, way, reentrant=reentrant, device=device, pretrained=pretrained)
    if weights is not None and model.family == "vit":
        load_weights(whole.layers, model, weights)
    if recipe.lora is not None:
        add_lora(whole.layers, model, recipe.lora, recipe.seed)
        if recipe.lora.adapter is not None:
            load_adapter(whole, recipe.lora, beside(job.folder, recipe.lora.adapter))
    return whole


@dataclass
class _Run:
    """A rank in the middle of a run."""

    recipe: Recipe
    model: Model
    batch: Batch
    place: Place
    device: torch.device
    whole: WholeModel
    replica: Replica
    samples: Samples
    held_out: Shuffled | None
    log: RunLog
    stops: list[int]
    """Signals that ask to end."""

    def _targets(self, samples: Samples, numbers: range) -> int:
        return count_targets(samples, numbers, 1 if self.model.family == "vit" else self.batch.seq_len)

    def step(self, step: int) -> dict[str, Any]:
        """One optimizer step, and what was measured; `stop`: whether any rank was asked to end."""
        recipe, batch, log = self.recipe, self.batch, self.log
        size, dp = recipe.batch.micro_batch, recipe.parallel.dp
        accumulation = batch.global_batch // (size * dp)
        start_s, start_cpu_s, log.step = time.time(), time.process_time(), step
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        sums[1] = float(bool(self.stops))
        numbers = range(step * batch.global_batch, (step + 1) * batch.global_batch)
        targets = self._targets(self.samples, numbers)
        for m in range(accumulation):
            first = (m * dp + self.place.rank) * size
            inputs, wanted = (part.to(self.device) for part in self.samples.batch(numbers[first : first + size]))
            with log.interval("forward", f"F{m}"):
                part = self.replica.forward(inputs, wanted, last=m == accumulation - 1)
            sums[0] += part.detach()
            with log.interval("backward", f"B{m}"):
                self.replica.backward(part, accumulation * dp / max(1, targets))
        rate = recipe.rate.at(step)
        with log.interval("update", "update"):
            norm, held = self.replica.update(rate)
        with log.interval("wait", "sum of the loss"):
            distributed.all_reduce(sums)
        seconds, cpu_s = time.time() - start_s, time.process_time() - start_cpu_s
        loss, stop = sums.tolist()
        result = {
            "step": step, "loss": loss / max(1, targets), "gradient_norm": norm, "seconds": seconds,
            "samples": batch.global_batch, "tokens": batch.tokens, "tokens_per_s": batch.tokens / seconds,
            "samples_per_s": batch.global_batch / seconds, "mfu": mfu(recipe, self.model, batch, seconds),
            "cpu_s": cpu_s, "seconds_by_kind": log.take_seconds(),
            "memory_bytes": memory_bytes(self.device), "state_bytes": held.to_dict(), "stop": stop > 0,
        }  # fmt: skip
        if self.device.type == "cuda":
            result["allocated_bytes"] = torch.cuda.memory_allocated(self.device)
            result["reserved_bytes"] = torch.cuda.max_memory_reserved(self.device)
        wanted_every = recipe.validation.every if recipe.validation is not None else 0
        if self.held_out is not None and ((step + 1) % wanted_every == 0 or step + 1 == recipe.steps):
            result |= self._validate(self.held_out)
        log.write("step", **result)
        return result

    @torch.no_grad()
    def _validate(self, samples: Shuffled) -> dict[str, float]:
        """Mean loss of the samples for validation and, of images, the part that is classified rightly."""
        start_s, size, dp = time.time(), self.recipe.batch.micro_batch, self.recipe.parallel.dp
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        head, correct = self.whole.head, torch.zeros((), dtype=torch.int64, device=self.device)
        head.correct = correct
        with self.replica.validating():
            # Equally many forwards on all ranks: those that split weights gather them together.
            for first in range(0, len(samples), size * dp):
                drawn = samples.batch_or_fill(first + self.place.rank * size, size)
                inputs, wanted = (part.to(self.device) for part in drawn)
                sums[0] += self.replica.forward(inputs, wanted, last=False)
        head.correct = None
        sums[1] = correct
        distributed.all_reduce(sums)
        loss, right = sums.tolist()
        targets = self._targets(samples, range(len(samples)))
        seconds, kind = time.time() - start_s, samples.classified
        return validation_figures(loss, right, targets, seconds, classified=kind, tokens=not kind)


def train(job: Job, place: Place, make: Maker, *, reentrant: bool = False) -> int:
    """All that one rank does; its exit code: 0, or 128 + signal where the run was asked to end."""
    recipe = job.recipe
    model = model_of(recipe.model, job.folder)
    batch = batch_of(recipe, model)
    device = choose_device(Options(device=job.device), place.local_rank)
    say = _say if place.rank == 0 else None
    samples, held_out = training_and_validation(recipe, model, batch.seq_len, job.folder, say)
    whole = _whole_model(job, model, device, reentrant=reentrant)
    log = RunLog(job.out / f"rank-{place.rank}.jsonl")
    log.write(
        "run", rank=place.rank, world_size=place.world_size, device=str(device), model=model.name, time_s=time.time(),
        parameters=sum(p.numel() for p in whole.parameters()), recipe=recipe.model_dump(),
        trained=sum(p.numel() for p in whole.parameters() if p.requires_grad),
    )  # fmt: skip
    with ExitStack() as stack:
        stack.callback(log.close)
        stops = stack.enter_context(_stop_signals())
        store = stack.enter_context(_together(place, device))
        replica = make(whole, batch, recipe, device)
        run = _Run(recipe, model, batch, place, device, whole, replica, samples, held_out, log, stops)
        saved, first = None, 0
        if recipe.checkpoint is not None:
            folder = beside(job.folder, recipe.checkpoint.folder)
            home = Home(folder, recipe.checkpoint, model, recipe.seed, place.rank, place.world_size, store, recipe.lora)
            saved = replica.saved(home)
            first = _resume(saved, home)
        stopped = _run_steps(run, job, first, saved)
        if saved is not None:
            saved.close()
        if recipe.lora is not None:
            base = None if recipe.model.weights is None else beside(job.folder, recipe.model.weights).resolve()
            with replica.gathered():
                if place.rank == 0:
                    save_adapter(model, recipe.lora, trained(whole), job.out / ADAPTER_FOLDER, base)
        del run, replica, saved
    return 128 + (stops or [signal.SIGTERM])[0] if stopped else 0


def _resume(saved: Saved, home: Home) -> int:
    """The step to begin with."""
    if not home.part.resume:
        return 0
    progress = saved.resume()
    if home.rank == 0:
        _say(f"resumed from step {progress.step}" if progress else f"no whole checkpoint in {home.folder}: step 0")
    return progress.step if progress else 0


def _run_steps(run: _Run, job: Job, first: int, saved: Saved | None) -> bool:
    """All steps, told and saved; whether the run was asked to end before the last."""
    recipe, metrics, place, log = run.recipe, run.recipe.metrics, run.place, run.log
    trackers = metrics.trackers if place.rank == 0 else ()
    with ExitStack() as stack:
        tracker = stack.enter_context(open_trackers(trackers, job.out, recipe.name, recipe.model_dump()))
        recorder = None
        if metrics.profile_steps:
            folder = job.out / PROFILE_FOLDER
            recorder = Recorder(folder, place.rank, place.world_size, steps=metrics.profile_steps)
            stack.callback(recorder.close)
            log.annotate = record_function
        for step in range(first, recipe.steps):
            result = run.step(step)
            tracker.scalars(step, {name: result[name] for name in (*TRACKED, *VALIDATION) if name in result})
            if recorder is not None:
                recorder.step()
            if place.rank == 0:
                text = f"step {step:5d}  loss {result['loss']:.4f}  norm {result['gradient_norm']:.3f}"
                _say(f"{text}  {result['samples_per_s']:,.1f} samples/s{format_validation(result)}")
            if not math.isfinite(result["loss"]):
                raise DivergedError(f"step {step}: found loss {result['loss']:g}, expected a finite number")
            last = result["stop"] or step + 1 == recipe.steps
            every = recipe.checkpoint.every if recipe.checkpoint is not None else 0
            if saved is not None and (last or (every and (step + 1) % every == 0)):
                saved.save(SavedProgress(step + 1, (step + 1) * run.batch.global_batch, recipe.seed))
            if last:
                return step + 1 < recipe.steps
    return False


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201
