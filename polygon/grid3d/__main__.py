"""Every (data, tensor, pipeline) split of a cluster's devices, priced, memory-checked and ranked.

    python -m polygon.grid3d cluster.yaml llama2-7b --global-batch 256 --zero all --recompute all -o output.json
    python -m polygon.grid3d cluster.json model.json --base-eff 0.4      (metadata files of an earlier searcher)
    python -m polygon.grid3d cluster.yaml gpt3-175b --global-batch 1536 --all --backend dask --scheduler tcp://host:8786

Every configuration is written with its cost terms or the reason why it is rejected, the best first. Options that take
several values take a list (`1,2,4`) or `all`. A cluster of several pools is taken as equal devices: its slowest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from polygon.commands import cli
from polygon.domain.clock import Clock
from polygon.domain.errors import InputError
from polygon.domain.message import Message
from polygon.domain.plan import RECOMPUTE
from polygon.domain.runtime import DP_OVERLAP
from polygon.domain.uniform import SCHEDULES, ParallelConfig
from polygon.grid3d.grid import evaluate_all, parallel_config
from polygon.grid3d.grid_rows import FIELDS, Case, case_of
from polygon.grid3d.searcher import Constants, SearcherCase, is_metadata, metadata_of, read_metadata
from polygon.grid3d.splits import EVERYTHING, GridOptions, all_splits
from polygon.grid3d.spread import BACKENDS

COST_MODELS = ("polygon", "seed003")
TRIED = ("cp", "ep", "micro_batch_size", "zero", "recompute", "schedule", "interleave", "sequence_parallel")
CONSTANTS = {
    "--base-eff": "base_efficiency",
    "--dp-penalty": "dp_penalty",
    "--tp-penalty": "tp_penalty",
    "--imbalance-penalty": "imbalance_penalty",
    "--pp-overlap": "pp_overlap",
    "--mb-per-gb": "mb_per_gb",
}
"""Options, and the fields of `Constants` that they set."""
SWITCH = {"on": (True,), "off": (False,), "all": (False, True)}


def _several(kind: Callable[[str], Any], everything: tuple[Any, ...] | None) -> Callable[[str], tuple[Any, ...] | None]:
    """An argparse type: values between commas, or `all`."""

    def convert(text: str) -> tuple[Any, ...] | None:
        if text == "all":
            return everything
        return tuple(dict.fromkeys(kind(part) for part in text.split(",")))

    return convert


def _one_of(*names: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"found {text!r}, expected {', '.join(names)} or all")
        return text

    return convert


def parser() -> cli.CommandParser:
    """All options."""
    top = cli.CommandParser(
        prog="polygon grid3d",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[
            cli.output_options(out="every configuration as JSON (default output.json)"),
            cli.problem_options(),
            cli.bench_options(),
            cli.time_limit_option(),
        ],
    )
    top.add_argument("cluster", metavar="CLUSTER", help="cluster or problem file, or the searcher's cluster metadata")
    top.add_argument("model_file", metavar="MODEL", nargs="?", help="as --model, or the searcher's model metadata")
    top.add_argument("--top", type=cli.whole(1), default=10, metavar="K", help="rows shown (default %(default)s)")
    what = top.add_argument_group("what is tried beside every (dp, tp, pp)", argument_default=argparse.SUPPRESS)
    whole = cli.whole(1)
    what.add_argument("--all", action="store_true", default=False, help="everything below")
    what.add_argument("--cp", type=_several(whole, None), help="context-parallel degrees (default 1)")
    what.add_argument("--ep", type=_several(whole, None), help="expert-parallel degrees (default 1)")
    what.add_argument("--micro-batch-size", type=_several(whole, None), help="sequences (default 1)")
    what.add_argument("--zero", type=_several(cli.whole(0, 3), (0, 1, 2, 3)), help="ZeRO stages (default 0)")
    what.add_argument("--recompute", type=_several(_one_of(*RECOMPUTE), RECOMPUTE), help="(default none)")
    what.add_argument("--schedule", type=_several(_one_of(*SCHEDULES), SCHEDULES), help="(default 1f1b)")
    what.add_argument("--interleave", type=_several(whole, EVERYTHING.interleave), help="chunks a stage (default 1)")
    what.add_argument("--sequence-parallel", choices=SWITCH, help="(default off)")
    what.add_argument("--overlap", choices=DP_OVERLAP, help="of DP traffic (default: the runtime's)")
    how = top.add_argument_group("how")
    how.add_argument("--jobs", type=cli.whole(1), default=-1, help="processes (default: one a core)")
    how.add_argument("--backend", choices=BACKENDS, default="processes", help="where they run (default %(default)s)")
    how.add_argument("--scheduler", metavar="ADDRESS", help="dask: of the scheduler (default: on this machine)")
    price = top.add_argument_group("cost model")
    price.add_argument("--cost-model", choices=COST_MODELS, help="(default: polygon; seed003 for metadata files)")
    for option, field in CONSTANTS.items():
        told = f"seed003 (default {getattr(Constants(), field):g})"
        price.add_argument(option, type=cli.number(at_least=0), dest=field, help=told)
    return top


def _options(args: argparse.Namespace) -> GridOptions:
    chosen = EVERYTHING if args.all else GridOptions()
    # An option that was not given is not there: None would mean `all`.
    values = {name: getattr(args, name, getattr(chosen, name)) for name in TRIED}
    if isinstance(values["sequence_parallel"], str):
        values["sequence_parallel"] = SWITCH[values["sequence_parallel"]]
    return GridOptions(**values, overlap=getattr(args, "overlap", None))


def _constants(args: argparse.Namespace) -> Constants:
    given = {field: getattr(args, field) for field in CONSTANTS.values()}
    return Constants(**{field: value for field, value in given.items() if value is not None})


def _check_asked(args: argparse.Namespace, *, searchers: bool) -> None:
    """Refuse options that the cost model would pass over in silence."""
    if searchers:
        tried = ["all"] * args.all + [name for name in (*TRIED, "overlap") if hasattr(args, name)]
        if tried:
            option = "--" + tried[0].replace("_", "-")
            raise InputError(f"{option}: found with cost model seed003, which knows dp, tp and pp alone, expected none")
        return
    for option, field in CONSTANTS.items():
        value = getattr(args, field)
        if value is not None:
            raise InputError(f"{option}: found {value:g}, expected it with --cost-model seed003 (or metadata) alone")


def _case(args: argparse.Namespace, talk: cli.Talk) -> tuple[Any, int, dict[str, Any]]:
    """What prices a split, the number of devices, and what the file says of the inputs."""
    from polygon.formats import files
    from polygon.formats.convert import runtime_data

    data = files.read_yaml(args.cluster)
    _check_asked(args, searchers=is_metadata(data) or args.cost_model == "seed003")
    if is_metadata(data):
        if args.model_file is None:
            raise InputError("MODEL: found nothing, expected the model metadata beside the cluster metadata")
        if args.cost_model == "polygon":
            raise InputError(
                f"{args.cluster}: found metadata, expected a cluster file for --cost-model polygon (or seed003)"
            )
        if args.bench:
            raise InputError(f"--bench: found metadata in {args.cluster}, expected a cluster file")
        case = read_metadata(data, files.read_json(args.model_file), _constants(args))
        return case, case.devices, {"cluster": args.cluster, "model": args.model_file, "cost_model": "seed003"}
    args.model = args.model or args.model_file
    problem = cli.read_problem(args.cluster, args)
    priced, note = case_of(problem, _options(args))
    if note:
        talk.say(note)
    says = {"cluster": problem.cluster.name, "model": problem.model.name, "cost_model": args.cost_model or "polygon"}
    says["runtime"] = runtime_data(problem.runtime)
    says["batch"] = {"global_batch": problem.batch.global_batch, "seq_len": problem.batch.seq_len}
    if args.cost_model == "seed003":
        old = metadata_of(problem.model, problem.batch, priced.pool, _constants(args))
        return old, problem.cluster.devices, says
    return priced, problem.cluster.devices, says


def _table(rows: list[dict[str, Any]]) -> str:
    """The best configurations with their terms."""
    from polygon.messages.report import ROUNDED, written_out
    from polygon.overhead.communication_tables import table

    names = [key for key in rows[0] if key not in ("step_s", "terms_s", "memory_bytes", "rejected")]
    usual = {field.name: field.default for field in fields(ParallelConfig)}
    names = [
        name
        for name in names
        if name in ("dp", "tp", "pp") or any(row[name] != usual[FIELDS.get(name, name)] for row in rows)
    ]
    terms = list(rows[0]["terms_s"])
    header = ["rank", *names, "step ms", *(f"{term} ms" for term in terms)]
    header += ["memory GB"] * ("memory_bytes" in rows[0])
    body = []
    for rank, row in enumerate(rows, start=1):
        line = [str(rank), *(str(row[name]) for name in names), written_out(row["step_s"] * 1e3, 5)]
        least_s = ROUNDED * row["step_s"]
        line += [written_out(value * 1e3 if abs(value) > least_s else 0) for value in map(row["terms_s"].get, terms)]
        body.append([*line, written_out(row["memory_bytes"] / 1e9)] if "memory_bytes" in row else line)
    return table(header, body)


def main(argv: list[str] | None = None) -> int:
    """Price every split, write all, show the best."""
    from polygon.messages.report import describe_runtime

    args = parser().parse_args(argv)
    clock = Clock(args.time_limit)
    talk = cli.Talk(quiet=args.quiet)
    case, devices, says = _case(args, talk)
    options = GridOptions() if isinstance(case, SearcherCase) else case.options
    splits = list(all_splits(devices, options.cp))
    read_s = clock.spent_s
    with talk.progress("splits", total=len(splits)) as show, cli.interrupted_by_signals() as asked:
        result = evaluate_all(
            case,
            splits,
            jobs=args.jobs,
            backend=args.backend,
            scheduler=args.scheduler,
            progress=lambda done: show(done, f"{done} of {len(splits)}"),
            seconds_left=clock.left_s,
        )
    if result.interrupted and not result.rows:
        return cli.interrupted(asked)
    took_s = clock.spent_s - read_s
    path = args.out or "output.json"
    result.write(path, {**says, "devices": devices})
    count = len(result.rows)
    talk.say(
        f"{count} configurations ({result.accepted} fit) in {took_s:.1f} s: {count / took_s:,.0f} a second; {path}"
    )
    not_run = result.reasons().get("runtime", 0)
    if not_run:
        talk.say(str(Message("grid.not_run", runtime=case.runtime.name, count=not_run)))
    if result.interrupted:
        talk.say("interrupted: these are the configurations so far")
    elif not result.complete:
        talk.say(str(result.part()))
    best = result.top(args.top)
    if not best and result.interrupted:
        return asked.exit_code
    if not best:
        return cli.infeasible(result.why_none(devices))
    if path != "-":
        text = _table(best)
        if isinstance(case, Case):
            best = [{**values, **case.details(parallel_config(values))} for values in best]
        text = f"{describe_runtime(says['runtime'])}\n{text}" if "runtime" in says else text
        found = {"configurations": count, "accepted": result.accepted, "not_run": not_run, "best": best}
        if not result.complete:
            found |= {"splits": result.splits, "splits_looked_at": result.looked_at}
        cli.emit({**{key: says[key] for key in ("runtime",) if key in says}, **found}, text, as_json=args.json)
    return asked.exit_code if result.interrupted else cli.EXIT_OK


if __name__ == "__main__":
    sys.exit(cli.run(main))
