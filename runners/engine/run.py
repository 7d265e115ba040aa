"""A run of one rank from beginning to end: meet the others, train, leave together."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from polygon_comm.accelerator import Accelerator
from polygon_comm.transport import PeerLostError
from torch.distributed import Store
from torch.profiler import record_function

from polygon.domain.errors import InputError, require
from polygon.domain.plan import Plan, Problem
from runners.data.samples import Samples, Shuffled, digest_of
from runners.data.sources import training_and_held_out
from runners.engine.additions import check_lora
from runners.engine.checkpoint import prepare_folder
from runners.engine.compilation import check_compiler, compiler_of
from runners.engine.failure_detector import Watch
from runners.engine.options import Options
from runners.engine.pretrained import weights_digest
from runners.engine.rank_layout import Layout
from runners.engine.rendezvous import (
    RunFailedError,
    agree,
    code_digest,
    leave_together,
    open_store,
    own_address,
    run_digest,
)
from runners.engine.runnable import check_runnable
from runners.engine.trackers import open_trackers
from runners.engine.training import Training
from runners.engine.user_model import OwnModel, content_digest, own_problem
from runners.traces.kineto import FOLDER as PROFILE_FOLDER
from runners.traces.record import Recorder


def train(
    problem: Problem,
    plan: Plan,
    rank: int,
    host: str,
    port: int,
    options: Options,
    *,
    on_loss: Callable[[str], None],
    report: Callable[[dict[str, Any]], None] = lambda result: None,
    on_start: Callable[[Training], None] = lambda training: None,
    listen_fd: int | None = None,
    samples: Samples | None = None,
    validation: Shuffled | None = None,
    accelerator: Accelerator | None = None,
) -> bool:
    """Run a plan's rank to the end.

    Parameters
    ----------
    problem, plan, rank
        What to run, and which part of it.
    host, port
        Where rank 0 listens.
    options : Options
    on_loss : callable
        Called from another thread when some rank was lost, with what is told on all ranks; must end the process.
    report : callable
        Called after every step with what was measured.
    on_start : callable
        Called before the first step (to set `stop_requested` from a signal, say).
    listen_fd : int, optional
        Socket that listens on the port already (rank 0).
    samples : Samples, optional
        What to train on; without it what `options.data` says.
    validation : Shuffled, optional
        What the model is held against every `options.validate_every` steps.
    accelerator : Accelerator, optional
        What to compute on; without it what `options.device` says.

    Returns
    -------
    bool
        Whether all steps were done; False if somebody asked to stop before.

    Raises
    ------
    InputError
        What is asked cannot be run, or the ranks do not run the same thing.
    RunFailedError
        A peer was lost; the message names it, its region and this rank's last action.
    DivergedError
        The loss or the gradient is no number any more.
    UnsavedError
        All was trained, but the last checkpoint could not be written; the message names the last whole one.
    """
    problem, own, samples, validation, code = _material(problem, plan, options, samples, validation)
    check_options(problem, plan, options)
    layout = Layout(problem, plan, keeps_whole=options.lora is not None)
    if options.checkpoint_dir is not None:
        prepare_folder(
            options.checkpoint_dir,
            resume=options.resume,
            model=problem.model,
            seed=options.seed,
            lora=options.additions,
        )
    training: Training | None = None
    with contextlib.ExitStack() as opened:
        run = "run" if options.log_dir is None else options.log_dir.name
        trackers = opened.enter_context(
            open_trackers(options.track if rank == 0 else (), options.log_dir or Path(), run, options.shared())
        )
        store = open_store(host, port, rank, options.timeout_s, listen_fd)
        address = own_address(host, port)
        agree(store, rank, plan.world_size, run_digest(problem, plan, options), code, digest_of(samples), address)
        options = _with_common_log_dir(options, store, rank)
        watch = Watch(
            rank,
            layout.watched(rank),
            store,
            address=address,
            dead_after_s=options.dead_after_s,
            describe=layout.describe,
            on_loss=on_loss,
        )
        opened.enter_context(contextlib.closing(watch))
        try:
            training = Training(
                layout, rank, store, address, options, watch, samples, trackers, own, validation, accelerator
            )
            on_start(training)
            _run_steps(training, report)
            training.close()
            leave_together(store, rank, plan.world_size)
            for ended in (training.diverged, training.unsaved):
                if ended is not None:
                    raise ended
        except (PeerLostError, RuntimeError) as error:
            failure = _loss(error, layout, rank, watch, options.dead_after_s)
            if failure is None:
                raise
            raise failure from error
    return training.progress.step >= options.steps


def _with_common_log_dir(options: Options, store: Store, rank: int) -> Options:
    """The options with rank 0's name of the log directory, where the user gave none."""
    if options.log_dir is None:
        return options
    if rank == 0:
        store.set("log_dir", options.log_dir.name)
    if options.log_dir_named:
        return options
    return replace(options, log_dir=options.log_dir.with_name(store.get("log_dir").decode()))


class _Material(NamedTuple):
    """What a rank trains, and on what."""

    problem: Problem
    own: OwnModel | None
    """Where layers are those of the user's file; the problem then has their sizes."""
    samples: Samples
    validation: Shuffled | None
    code: str
    """Digest of the program and of what files add to it: ranks of one run have the same."""


def _material(
    problem: Problem, plan: Plan, options: Options, samples: Samples | None, validation: Shuffled | None
) -> _Material:
    """The model and the samples that options name; samples that are handed in go before those of files."""
    code, own = code_digest(), None
    if options.model_file is not None:
        expected = "stream: layers of one's own get one tensor, and not where documents begin"
        require(options.data.packing == "stream", "--packing", options.data.packing, expected)
        problem, code = own_problem(problem, plan, options.model_file), code + content_digest(options.model_file)
        own = OwnModel(options.model_file, options.seed, problem.model.layers)
        for option, asked in (("--data", options.data.paths), ("--validate-every", options.validate_every)):
            if own.samples is not None and asked:
                raise InputError(f"{option}: found with {options.model_file}, which has samples, expected one of them")
        samples = samples or own.samples
    if options.weights is not None:
        code += weights_digest(options.weights)
    if samples is None:
        samples, validation = training_and_held_out(problem.model, problem.batch.seq_len, options.seed, options.data)
    if own is not None:
        own.measure(samples, plan.micro_batch_size)
    return _Material(problem, own, samples, validation, code)


def _loss(error: Exception, layout: Layout, rank: int, watch: Watch, dead_after_s: float) -> RunFailedError | None:
    """Who was lost, if an error in a rank's step comes of that; None for an error of its own."""
    # The neighbour's end is noticed first by whoever talks to it; the watch knows it a moment later.
    verdict = watch.verdict(dead_after_s + 1)
    if verdict:
        return RunFailedError(verdict)
    if isinstance(error, PeerLostError):
        peer = layout.describe(error.peer)
        return RunFailedError(f"{layout.describe(rank)}: lost {peer}: {error} ({watch.doing})")
    return None


def check_options(problem: Problem, plan: Plan, options: Options) -> None:
    """Raise `InputError` for a plan that cannot be run, or options that do not go with it."""
    check_runnable(problem, plan, own_model=options.model_file is not None)
    if problem.batch.optimizer == "adafactor":
        require(not options.offload_optimizer, "--offload-optimizer", True, "none (Adafactor keeps next to nothing)")
    check_compiler(compiler_of(problem.runtime, options))
    if options.lora is not None:
        check_lora(problem.model, options.lora)


def _run_steps(training: Training, report: Callable[[dict[str, Any]], None]) -> None:
    options = training.options
    go_on, due, validated = training.progress.step < options.steps, False, True
    recorder = None
    if options.profiled_steps and options.log_dir is not None:
        directory = options.log_dir / PROFILE_FOLDER
        ranks, steps, after = training.layout.plan.world_size, options.profiled_steps, options.profiled_after
        recorder = Recorder(directory, training.rank, ranks, steps=steps, warmup=after)
        training.log.annotate = record_function
    while go_on:
        # Between outer steps the regions' weights differ: checkpoint and validation wait until they meet.
        step = training.progress.step
        due = due or bool(options.checkpoint_every and (step + 1) % options.checkpoint_every == 0)
        validated = validated and not training.validates(step)
        result, go_on = training.step(meet=due or not validated, validate=not validated)
        validated = validated or result["together"]
        report(result)
        if recorder is not None:
            recorder.step()
        # Weights under which the loss is no number, as it may be while scales are halved, take no good ones' place.
        saves = due and result["together"] and math.isfinite(result["loss"])
        if training.diverged is None and (saves or not go_on):
            training.save()
            due = False
    if recorder is not None:
        recorder.close()
