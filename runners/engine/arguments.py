"""Command-line options that every program that trains has in common. Imports no torch."""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path

from polygon.domain.errors import InputError
from polygon.domain.plan import Plan, Problem
from polygon.formats.files import read_plan
from polygon.planning.rehearsal import rehearsal_problem
from runners.data.choice import PACKINGS, TOKEN_TYPES, DataChoice, tokenizer_of
from runners.data.prepared import CACHE
from runners.engine.learning_rate import SCHEDULES
from runners.engine.options import Lora, Options
from runners.engine.trackers import TRACKERS

NEEDED_BY = {
    "weights": ("lora",),
    "lora": ("lora_alpha", "lora_targets"),
    "data": ("token_type", "tokenizer", "data_column"),
    "validate_every": ("validation_data", "validation_samples"),
}
"""Options without which others would do nothing, or what nobody means: additions to weights drawn from the seed."""


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Options of the plan's preparation and of training."""
    _add_rehearsal(parser.add_argument_group("rehearsal"))
    training = parser.add_argument_group("training")
    _add_optimization(training)
    _add_local_updates(training)
    _add_run(training)
    _add_data_options(parser)
    _add_failures(parser.add_argument_group("checkpoints and failures"))
    training.add_argument(
        "--track", nargs="+", default=(), metavar="TRACKER", help="show figures of all ranks in: " + ", ".join(TRACKERS)
    )
    training.add_argument("--log-dir", type=Path, help="default: out/<plan>-<time>")


def _add_rehearsal(rehearsal: argparse._ArgumentGroup) -> None:
    default = Options()
    rehearsal.add_argument(
        "--rehearse", action="store_true", help="run the plan's shape with a model that fits one machine"
    )
    rehearsal.add_argument("--max-ranks", type=int, help="most ranks of a rehearsal (default: as many as the plan has)")
    rehearsal.add_argument(
        "--emulate-links",
        action="store_true",
        help="messages between regions take as long as the cluster's links need (all ranks on one machine)",
    )
    rehearsal.add_argument(
        "--emulate-devices",
        type=float,
        default=default.emulate_devices,
        metavar="FACTOR",
        help="computations take at least FACTOR times as long as predicted for the plan's devices",
    )


def _add_optimization(training: argparse._ArgumentGroup) -> None:
    """Steps, learning rate, optimizer and what saves memory."""
    default = Options()
    training.add_argument("--steps", type=int, default=default.steps, help="optimizer steps (default %(default)s)")
    training.add_argument("--learning-rate", type=float, help="default: 3e-4, of a rehearsal 1e-3")
    training.add_argument(
        "--warmup-steps", type=int, default=default.warmup_steps, help="linear warm-up (default none)"
    )
    training.add_argument(
        "--schedule", choices=SCHEDULES, default=default.schedule, help="of the learning rate (default %(default)s)"
    )
    training.add_argument("--schedule-steps", type=int, metavar="STEPS", help="until the final rate (default: --steps)")
    training.add_argument("--decay-steps", type=int, metavar="STEPS", help="of wsd (default: a tenth of all)")
    training.add_argument(
        "--final-rate", type=float, default=default.final_rate, metavar="PART",
        help="of the largest rate, at the schedule's end (default %(default)s)",
    )  # fmt: skip
    training.add_argument(
        "--weight-decay", type=float, default=default.weight_decay, help="of matrices (default %(default)s)"
    )
    training.add_argument(
        "--decay", choices=("matrices", "all"), default=default.decay, help="what decays (default %(default)s)"
    )
    training.add_argument(
        "--average", type=float, default=default.average, metavar="PART",
        help="a step leaves so much of the moving average of the weights, as 0.999; 0 (default): none is kept",
    )  # fmt: skip
    training.add_argument(
        "--compile",
        nargs="?",
        const="inductor",
        metavar="BACKEND",
        help="torch.compile for every block (inductor), or none (default: inductor under the runtime polygon-compiled)",
    )
    training.add_argument(
        "--loss-chunk", type=int, default=default.loss_chunk, metavar="TOKENS",
        help="tokens whose logits are there at a time; 0 (default): those of the whole micro-batch",
    )  # fmt: skip
    training.add_argument(
        "--clip-norm", type=float, default=default.clip_norm, help="of the whole model's gradient; 0: none"
    )
    training.add_argument(
        "--offload-optimizer", action="store_true", help="keep optimizer state in host memory and update there"
    )


def _add_local_updates(training: argparse._ArgumentGroup) -> None:
    default = Options()
    training.add_argument("--outer-rate", type=float, default=default.outer_rate, help="of local updates (%(default)s)")
    training.add_argument(
        "--outer-momentum", type=float, default=default.outer_momentum, help="of local updates (default %(default)s)"
    )
    training.add_argument(
        "--outer-fragments", type=int, default=default.outer_fragments, help="exchanged in turn (default %(default)s)"
    )
    training.add_argument(
        "--outer-overlap", type=int, default=default.outer_overlap, metavar="STEPS",
        help="that an exchange may take while training goes on (default %(default)s)",
    )  # fmt: skip
    training.add_argument(
        "--synchronous-steps", type=int, default=default.synchronous_steps, metavar="STEPS",
        help="in which all regions sum their gradients before local steps begin (default: a fifth of all)",
    )  # fmt: skip


def _add_run(training: argparse._ArgumentGroup) -> None:
    """What a run starts from, and where it runs."""
    default = Options()
    training.add_argument("--seed", type=int, default=default.seed, help="of first weights and data order")
    training.add_argument(
        "--weights", type=Path, metavar="DIR",
        help="folder of Hugging Face to start from: config.json and safetensors (default: drawn from the seed)",
    )  # fmt: skip
    training.add_argument(
        "--lora", type=int, metavar="RANK", help="train low-rank additions in place of the weights (with --weights)"
    )
    training.add_argument(
        "--lora-alpha", type=float, metavar="A", help="over the rank: their factor (default: 2 x rank)"
    )
    training.add_argument("--lora-targets", nargs="+", metavar="NAME", help="linear layers (default: query value)")
    training.add_argument(
        "--model-file", type=Path, help="Python file with the model as a list of layers (docs/runtime.md)"
    )
    training.add_argument("--device", default=default.device, help="auto, cpu or cuda (default auto)")
    training.add_argument(
        "--timeout",
        type=float,
        default=default.timeout_s,
        metavar="SECONDS",
        help="of one message (default %(default)g)",
    )
    training.add_argument(
        "--lookahead", type=int, default=default.lookahead, metavar="N",
        help="receives posted ahead (default %(default)s); 0: no communication while computing",
    )  # fmt: skip
    training.add_argument(
        "--traced-steps", type=int, default=default.traced_steps, help="steps in the trace (default %(default)s)"
    )
    training.add_argument(
        "--profiled-steps",
        type=int,
        default=default.profiled_steps,
        metavar="N",
        help="steps that the PyTorch Profiler records, into LOG_DIR/profile (default none)",
    )
    training.add_argument(
        "--profiled-after", type=int, default=default.profiled_after, metavar="N",
        help="steps before those (default %(default)s)",
    )  # fmt: skip


def _add_failures(failure: argparse._ArgumentGroup) -> None:
    default = Options()
    failure.add_argument("--checkpoint-dir", type=Path, help="where checkpoints are written and looked for")
    failure.add_argument("--checkpoint-every", type=int, default=0, metavar="STEPS", help="default: only at the end")
    failure.add_argument("--keep", type=int, default=default.checkpoints_kept, help="newest kept (default %(default)s)")
    failure.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint, of any plan")
    failure.add_argument(
        "--dead-after",
        type=float,
        default=default.dead_after_s,
        metavar="SECONDS",
        help="silence after which a rank counts as lost (default %(default)g)",
    )


def _add_data_options(parser: argparse.ArgumentParser) -> None:
    default = DataChoice()
    data = parser.add_argument_group("data (docs/runtime.md)")
    data.add_argument(
        "--data", type=Path, action="append", metavar="PATH",
        help="tokens (Megatron's .bin and .idx, raw .bin, .npy), a data set (.jsonl, .parquet, .arrow, a folder), "
        "text, or .npz of images and classes; may be repeated (default: English prose)",
    )  # fmt: skip
    data.add_argument("--data-weights", type=float, nargs="+", metavar="W", help="of the samples of each --data")
    data.add_argument("--token-type", choices=TOKEN_TYPES, help="of raw files of tokens that do not say it")
    data.add_argument(
        "--tokenizer", type=Path, metavar="PATH",
        help="tokenizer.json, or a folder with it (default: that of --weights; without these text is read by bytes)",
    )  # fmt: skip
    data.add_argument("--data-column", metavar="NAME", help="of data sets (default: input_ids, tokens, text, ...)")
    data.add_argument(
        "--packing", choices=PACKINGS, default=default.packing,
        help="windows of all tokens in turn, or whole documents, as many as fit (default %(default)s)",
    )  # fmt: skip
    data.add_argument("--data-cache", type=Path, metavar="DIR", help=f"of prepared data (default {CACHE})")
    data.add_argument("--validate-every", type=int, default=0, metavar="STEPS", help="loss of held-out samples")
    data.add_argument("--validation-data", type=Path, metavar="PATH", help="default: a part of --data")
    data.add_argument(
        "--validation-fraction", type=float, default=default.validation_fraction, help="(default %(default)s)"
    )
    data.add_argument("--validation-samples", type=int, metavar="N", help="at most (default: all of the part)")


def _data_choice(arguments: argparse.Namespace) -> DataChoice:
    return DataChoice(
        paths=tuple(arguments.data or ()),
        weights=tuple(arguments.data_weights or ()),
        token_type=arguments.token_type,
        tokenizer=arguments.tokenizer or tokenizer_of(arguments.weights),
        pretrained=arguments.weights is not None,
        column=arguments.data_column,
        packing=arguments.packing,
        cache=arguments.data_cache,
        validate=arguments.validate_every > 0,
        validation=arguments.validation_data,
        validation_fraction=arguments.validation_fraction,
        validation_samples=arguments.validation_samples,
    )


def _lora(arguments: argparse.Namespace) -> Lora | None:
    rank = arguments.lora
    if rank is None:
        return None
    for option, value in (("--model-file", arguments.model_file), ("--rehearse", arguments.rehearse or None)):
        if value is not None:
            raise InputError(f"--lora: found with {option}, expected without it")
    alpha = 2.0 * rank if arguments.lora_alpha is None else arguments.lora_alpha
    return Lora(rank=rank, alpha=alpha, targets=tuple(arguments.lora_targets or Lora().targets))


def _require_what_goes_with(arguments: argparse.Namespace) -> None:
    """Refuse options that would do nothing without another one, which then was forgotten."""
    found = vars(arguments)
    for other, names in NEEDED_BY.items():
        for name in names:
            if found[name] is not None and not found[other]:
                option, missing = (f"--{one.replace('_', '-')}" for one in (name, other))
                raise InputError(f"{option}: found without {missing}, expected with it")


def options_from(arguments: argparse.Namespace) -> Options:
    """The choices of a run; raises `InputError` on one that is not allowed."""
    _require_what_goes_with(arguments)
    rate = arguments.learning_rate
    return Options(
        steps=arguments.steps,
        learning_rate=rate if rate is not None else (1e-3 if arguments.rehearse else 3e-4),
        warmup_steps=arguments.warmup_steps,
        schedule=arguments.schedule,
        schedule_steps=arguments.schedule_steps,
        decay_steps=arguments.decay_steps,
        final_rate=arguments.final_rate,
        weight_decay=arguments.weight_decay,
        decay=arguments.decay,
        average=arguments.average,
        compile=arguments.compile,
        loss_chunk=arguments.loss_chunk,
        offload_optimizer=arguments.offload_optimizer,
        outer_rate=arguments.outer_rate,
        outer_momentum=arguments.outer_momentum,
        outer_fragments=arguments.outer_fragments,
        outer_overlap=arguments.outer_overlap,
        synchronous_steps=arguments.synchronous_steps,
        clip_norm=arguments.clip_norm or None,
        seed=arguments.seed,
        data=_data_choice(arguments),
        validate_every=arguments.validate_every,
        weights=arguments.weights,
        lora=_lora(arguments),
        model_file=arguments.model_file,
        timeout_s=arguments.timeout,
        dead_after_s=arguments.dead_after,
        checkpoint_dir=arguments.checkpoint_dir,
        checkpoint_every=arguments.checkpoint_every,
        checkpoints_kept=arguments.keep,
        resume=arguments.resume,
        lookahead=arguments.lookahead,
        traced_steps=arguments.traced_steps,
        profiled_steps=arguments.profiled_steps,
        profiled_after=arguments.profiled_after,
        device=arguments.device,
        emulate_links=arguments.emulate_links,
        emulate_devices=arguments.emulate_devices,
        track=tuple(arguments.track),
        log_dir=arguments.log_dir or default_log_dir(arguments.plan),
        log_dir_named=arguments.log_dir is not None,
    )


def default_log_dir(plan: Path) -> Path:
    """A directory for this run, below the current one; another one than that of a run of the same second."""
    folder = Path("out") / f"{plan.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    others = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(free for free in chain([folder], others) if not free.exists())


def require_torch() -> None:
    """Raise `InputError` where torch is not installed, which planning does without."""
    if find_spec("torch") is None:
        raise InputError("torch: found none installed, expected it (pip install 'polygon-train[train]')")


def read_run(arguments: argparse.Namespace) -> tuple[Problem, Plan]:
    """Problem and plan to be run: those of the file, or their rehearsal."""
    require_torch()
    problem, plan, _ = read_plan(arguments.plan)
    if arguments.max_ranks is not None and not arguments.rehearse:
        raise InputError("--max-ranks: found without --rehearse, expected with it (a real run needs all its devices)")
    for option, value in (("--model-file", arguments.model_file), ("--weights", arguments.weights)):
        if arguments.rehearse and value is not None:
            raise InputError(f"{option}: found with --rehearse, expected without it (a rehearsal brings its own model)")
    if arguments.model_file is not None and arguments.weights is not None:
        raise InputError("--weights: found with --model-file, expected one of them")
    if arguments.rehearse:
        return rehearsal_problem(problem, plan, max_ranks=arguments.max_ranks)
    if arguments.weights is not None:
        from runners.engine.layers import check_weights

        check_weights(arguments.weights, problem.model)
    return problem, plan
