"""What do collectives and parallel configurations cost in communication and memory?

    python -m polygon.overhead collective --topology hierarchical --N 8 --gpus-per-node 4 --M 140e9 --verbose
    python -m polygon.overhead analysis --topology ring --num-gpus 8 --dp 4 --tp 2 --params 70e9 --seq-length 1024 \\
        --hidden-size 4096
    python -m polygon.overhead list-cmds
    python -m polygon.overhead run-all -o overhead/
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from polygon.commands import cli
from polygon.cost.network import fabric_of
from polygon.domain.cluster import Device, Link
from polygon.domain.divisors import divisors
from polygon.domain.errors import InputError, located, require
from polygon.domain.model import Batch, Model
from polygon.domain.plan import RECOMPUTE
from polygon.formats import catalogue
from polygon.overhead import communication_tables as report
from polygon.overhead import predefined
from polygon.overhead.collective_table import Cell, collective_cell
from polygon.overhead.communication import Configuration, TrafficAnalysis, analyse, model_of_sizes, shape_of
from polygon.overhead.dimensions import CP_MODES, Degrees, Shape
from polygon.overhead.quantities import BYTES, BYTES_PER_S, COUNT, SECONDS, quantity
from polygon.overhead.topologies import KINDS, OPERATIONS, Topology, most_square

FLAT = ("ring", "tree", "switch")
"""Topologies that `--tree-algo` applies to."""
TREES = ("binomial-tree", "double-tree")
INTRA, INTER = "nvlink3", "infiniband-hdr"
"""Links of the catalogue where none are given: A100's NVLink; one HDR card for every GPU."""


def _wiring_options(*, every: bool = False) -> cli.CommandParser:
    parent = cli.CommandParser(add_help=False)
    group = parent.add_argument_group("wiring")
    kinds = (*KINDS, "all") if every else KINDS
    group.add_argument("--topology", choices=kinds, default="ring", help="how ranks are joined (default %(default)s)")
    group.add_argument("--gpus-per-node", type=cli.whole(1), metavar="G", help="hierarchical: ranks of a node")
    group.add_argument("--mesh-nx", type=cli.whole(1), metavar="X", help="mesh, torus: ranks of a row")
    group.add_argument("--mesh-ny", type=cli.whole(1), metavar="Y", help="mesh, torus: rows")
    rate, delay = quantity(BYTES_PER_S, above=True), quantity(SECONDS)
    either = "bytes/s of one direction, or 300GB/s, 200Gbit/s"
    for prefix, what in (
        ("", "a link (flat)"),
        ("intra-", "a link inside a node"),
        ("inter-", "one rank between nodes"),
    ):
        group.add_argument(f"--{prefix}bandwidth", type=rate, metavar="B", help=f"of {what}: {either}")
        group.add_argument(f"--{prefix}latency", type=delay, metavar="T", help=f"of {what}: seconds, or 5us, 2ms")
    group.add_argument("--root-bandwidth", type=rate, metavar="B", help="tree: one direction of the root's cut")
    group.add_argument("--hop-latency", type=delay, default=0.0, metavar="T", help="of each further hop (default 0)")
    group.add_argument("--in-network", action="store_true", help="switch: it reduces and copies (NVLS, SHARP)")
    group.add_argument("--tree-algo", action="store_true", help="all-reduce by a tree (flat topologies only)")
    return parent


def _output_options(*, verbose: bool = True) -> cli.CommandParser:
    parent = cli.CommandParser(add_help=False)
    if verbose:
        parent.add_argument("--verbose", action="store_true", help="formulas, the numbers put in, sources")
    parent.add_argument("--csv", action="store_true", help="rows with a header in place of text")
    return parent


def parser() -> cli.CommandParser:
    """All options of all modes."""
    top = cli.CommandParser(
        prog="polygon overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    modes: Any = top.add_subparsers(dest="mode", required=True, metavar="collective | analysis | list-cmds | run-all")
    common = [_output_options(), cli.output_options()]
    one = modes.add_parser(
        "collective",
        parents=[_wiring_options(every=True), *common],
        help="one operation (or all) on one topology (or all): all algorithms",
    )
    one.add_argument("--op", choices=(*OPERATIONS, "all"), default="all_reduce", help="(default %(default)s)")
    one.add_argument("--N", type=cli.whole(1), required=True, metavar="N", dest="ranks", help="ranks")
    size = quantity(BYTES)
    one.add_argument("--M", type=size, required=True, metavar="M", dest="size", help="bytes (140e9, 140GB, 64MiB)")
    one.add_argument("--algorithm", metavar="NAME", help="only this one (the list without it shows the names)")
    one.add_argument("--hops", type=cli.whole(1), default=1, help="p2p on ring, mesh, torus: distance (default 1)")
    one.add_argument("--shards", type=cli.whole(1), default=1, help="p2p between nodes: ranks that share the work")
    _analysis_options(
        modes.add_parser("analysis", parents=[_wiring_options(), *common], help="one parallel configuration")
    )
    modes.add_parser("list-cmds", help="commands to copy")
    every = modes.add_parser(
        "run-all",
        parents=[_output_options(verbose=False), cli.output_options()],
        help="all predefined combinations as CSV, with plots where -o names a folder",
    )
    every.add_argument("-o", "--out", metavar="DIR", help="folder for CSV files and plots; made if missing")
    every.set_defaults(topology="ring")
    return top


def _analysis_options(mode: argparse.ArgumentParser) -> None:
    whole = cli.whole(1)
    degrees = mode.add_argument_group("degrees")
    degrees.add_argument("--num-gpus", type=whole, required=True, metavar="N", help="dp x tp x pp x cp")
    degrees.add_argument("--dp", type=whole, metavar="D", help="data parallel (default: what the others leave)")
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"), ("ep", "expert")):
        degrees.add_argument(f"--{name}", type=whole, default=1, metavar="D", help=f"{what} parallel (default 1)")
    degrees.add_argument("--zero", type=cli.whole(0, 3), default=0, help="ZeRO stage over dp x cp (default 0)")
    degrees.add_argument("--recompute", choices=RECOMPUTE, default="none", help="(default %(default)s)")
    degrees.add_argument("--sequence-parallel", "--sp", action="store_true", help="TP by all-gather, reduce-scatter")
    degrees.add_argument("--interleave", type=whole, default=1, help="chunks of layers per stage (default 1)")
    degrees.add_argument("--cp-mode", choices=CP_MODES, default=CP_MODES[0], help="(default %(default)s)")
    degrees.add_argument("--schedule", choices=("1f1b", "gpipe"), default="1f1b", help="(default %(default)s)")
    degrees.add_argument("--overlap", choices=("none", "backward", "full"), default="backward", help="of DP traffic")
    degrees.add_argument("--p2p-overlap", action="store_true", help="stages send while they compute")
    model = mode.add_argument_group("model and batch")
    model.add_argument("--model", help="name in the catalogue, config.json or polygon's model file")
    model.add_argument("--params", type=quantity(COUNT, above=True), metavar="P", help="parameters (70e9, 70B)")
    model.add_argument("--seq-length", type=whole, metavar="S", help="tokens (default with --model: its most)")
    model.add_argument("--hidden-size", type=whole, metavar="H")
    model.add_argument("--num-layers", type=whole, metavar="L", help="transformer blocks")
    model.add_argument("--batch-size", type=whole, default=1, metavar="B", help="sequences of a micro-batch (1)")
    batches = model.add_mutually_exclusive_group()
    batches.add_argument("--micro-batches", type=whole, metavar="N", help="per step and replica (default 1)")
    batches.add_argument("--global-batch", type=whole, metavar="N", help="sequences per step of all replicas")
    model.add_argument("--precision", default="bf16", help="of weights and activations (default %(default)s)")
    model.add_argument("--gradient-precision", default="bf16", help="of gradients (default %(default)s)")
    model.add_argument("--gpu", metavar="NAME", help="device of the catalogue: compute, its link, does it fit")


def _link(latency_s: float | None, bytes_per_s: float | None, usual: Link) -> Link:
    rate = usual.bytes_per_s if bytes_per_s is None else bytes_per_s
    return replace(usual, bytes_per_s=rate) if latency_s is None else Link(latency_s=latency_s, bytes_per_s=rate)


def _grid(args: argparse.Namespace, ranks: int) -> tuple[int, int]:
    """Sides of the grid: those given, what one given side leaves, or the squarest."""
    nx, ny = args.mesh_nx, args.mesh_ny
    legal = ", ".join(map(str, divisors(ranks)))
    for option, side, other in (("--mesh-nx", nx, ny), ("--mesh-ny", ny, nx)):
        if side is not None and other is None:
            require(ranks % side == 0, option, side, f"a divisor of {ranks}: {legal}")
    if nx is None and ny is None:
        return most_square(ranks)
    return nx or ranks // ny, ny or ranks // nx


def topology_of(args: argparse.Namespace, ranks: int, device: Device | None = None) -> Topology:
    """The wiring that the options describe."""
    kind = args.topology
    levels = kind == "hierarchical"
    usual = catalogue.usual_link(device.name) if device else catalogue.link(INTRA)
    rate, delay = args.bandwidth, args.latency
    if levels:
        rate = args.intra_bandwidth if args.intra_bandwidth is not None else rate
        delay = args.intra_latency if args.intra_latency is not None else delay
    for name in ("intra_bandwidth", "intra_latency", "inter_bandwidth", "inter_latency", "gpus_per_node"):
        if getattr(args, name) is not None and not levels:
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option}: found it with --topology {kind}, expected --topology hierarchical")
    if levels and args.gpus_per_node is None:
        raise InputError(f"--gpus-per-node: found nothing, expected a divisor of {ranks}: {divisors(ranks)}")
    if args.tree_algo and kind not in FLAT:
        raise InputError(f"--tree-algo: found it with --topology {kind}, expected --topology {' or '.join(FLAT)}")
    for name in ("mesh_nx", "mesh_ny"):
        if getattr(args, name) is not None and kind not in ("mesh", "torus"):
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option}: found it with --topology {kind}, expected --topology mesh or torus")
    nx, ny = _grid(args, ranks)
    link = _link(delay, rate, usual)
    known = device is not None and kind in ("switch", "hierarchical") and not args.tree_algo
    return Topology(
        kind=kind,
        ranks=ranks,
        link=link,
        per_node=args.gpus_per_node or 1,
        fabric=fabric_of(device, args.gpus_per_node or ranks, link) if known and device else None,
        inter=_link(args.inter_latency, args.inter_bandwidth, catalogue.link(INTER)),
        nx=nx,
        ny=ny,
        in_network=args.in_network,
        hop_latency_s=args.hop_latency,
        **({} if args.root_bandwidth is None else {"root_bytes_per_s": args.root_bandwidth}),
    )


def _cells(args: argparse.Namespace, topology: Topology) -> list[Cell]:
    """The operations asked for on one topology."""
    cells = []
    for op in OPERATIONS if args.op == "all" else (args.op,):
        shards = args.shards if op == "p2p" else 1
        if topology.kind == "hierarchical":
            require(shards <= topology.per_node, "--shards", shards, f"at most the {topology.per_node} GPUs of a node")
        cell = collective_cell(op, topology, args.size, hops=args.hops, shards=shards)
        if args.tree_algo and op == "all_reduce" and topology.ranks > 1:
            cell = cell.only(TREES)
        cells.append(cell.only((args.algorithm,)) if args.algorithm else cell)
    return cells


def collective(args: argparse.Namespace) -> int:
    """One operation, or all six, on one topology, or all six (nodes of up to eight, the squarest grid)."""
    every = args.topology == "all"
    if every:
        for name in ("algorithm", "tree_algo", "gpus_per_node", "mesh_nx", "mesh_ny", "root_bandwidth"):
            if getattr(args, name):
                raise InputError(f"--{name.replace('_', '-')}: found it with --topology all, expected one topology")
        fast = _link(args.latency, args.bandwidth, catalogue.link(INTRA))
        fast = _link(args.intra_latency, args.intra_bandwidth, fast)
        slow = _link(args.inter_latency, args.inter_bandwidth, catalogue.link(INTER))
        cells = [cell for kind in KINDS for cell in _cells(args, predefined.wiring(kind, args.ranks, fast, slow))]
    else:
        cells = _cells(args, topology_of(args, args.ranks))
    if args.csv:
        cli.write(report.as_csv([row for cell in cells for row in report.cell_rows(cell)]))
        return cli.EXIT_OK
    data: Any = [report.cell_data(cell) for cell in cells]
    text = "\n\n".join(report.cell_text(cell, verbose=args.verbose) for cell in cells)
    if every and not args.verbose:
        text = report.grid_text(cells)
    cli.emit(data[0] if len(data) == 1 else data, text, as_json=args.json)
    return cli.EXIT_OK


def _degrees(args: argparse.Namespace) -> Degrees:
    """Degrees whose product is the number of GPUs."""
    n, rest = args.num_gpus, args.tp * args.pp * args.cp
    dp = args.dp
    if dp is None:
        dp = n // rest
    product = dp * rest
    found = f"{dp} x {args.tp} x {args.pp} x {args.cp} = {product}"
    hint = f"with the others, --dp {n // rest}" if n % rest == 0 else f"each a divisor: {divisors(n)}"
    legal = f"--num-gpus = {n}: {hint}"
    if product != n or dp == 0:
        raise InputError(f"dp x tp x pp x cp: found {found}, expected {legal}")
    members = dp * args.cp
    require(members % args.ep == 0, "--ep", args.ep, f"a divisor of dp x cp = {members}: {divisors(members)}")
    return Degrees(
        dp=dp,
        tp=args.tp,
        pp=args.pp,
        cp=args.cp,
        ep=args.ep,
        zero=args.zero,
        recompute=args.recompute,
        sequence_parallel=args.sequence_parallel,
        interleave=args.interleave,
        cp_mode=args.cp_mode,
    )


def _micro_batches(args: argparse.Namespace, dp: int) -> int:
    if args.global_batch is None:
        return int(args.micro_batches or 1)
    unit = dp * args.batch_size
    require(
        args.global_batch % unit == 0, "--global-batch", args.global_batch, f"a multiple of dp x batch size = {unit}"
    )
    return int(args.global_batch // unit)


def _sizes(args: argparse.Namespace, dp: int) -> tuple[Shape, Batch, Model | None]:
    """Model and batch from --model, or from single sizes as far as they are given."""
    from polygon.formats import files

    count = _micro_batches(args, dp)
    known: Model | None = files.read_model(args.model) if args.model else None
    seq_len: int | None = args.seq_length
    if known is not None:
        seq_len = seq_len or known.tokens_per_image or known.max_seq_len
    batch = Batch(
        global_batch=count * dp * args.batch_size,
        seq_len=seq_len or 1,
        precision=args.precision,
        gradient_precision=args.gradient_precision,
    )
    if known is not None:
        for option, value in (("--params", args.params), ("--hidden-size", args.hidden_size)):
            require(value is None, option, value, "nothing beside --model")
        require(args.num_layers is None, "--num-layers", args.num_layers, "nothing beside --model")
        require(known.heads % args.tp == 0, "--tp", args.tp, f"a divisor of the model's {known.heads} heads")
        return shape_of(known, batch, args.batch_size, count), batch, known
    require(args.params is not None, "--params", None, "a number of parameters, or --model")
    shape = Shape(
        parameters=args.params,
        blocks=args.num_layers,
        hidden_size=args.hidden_size,
        seq_len=seq_len,
        micro_batch_size=args.batch_size,
        micro_batches=count,
        element_bytes=batch.element_bytes,
        gradient_bytes=batch.gradient_bytes,
    )
    if args.num_layers and args.hidden_size and seq_len:
        known = model_of_sizes(args.params, args.num_layers, args.hidden_size, seq_len)
    return shape, batch, known


def analysis_of(args: argparse.Namespace) -> TrafficAnalysis:
    """The analysis that the options ask for."""
    degrees = _degrees(args)
    with located("--gpu: "):
        device = catalogue.device(args.gpu) if args.gpu else None
    shape, batch, model = _sizes(args, degrees.dp)
    return analyse(
        Configuration(
            shape=shape,
            degrees=degrees,
            whole=topology_of(args, args.num_gpus, device),
            batch=batch,
            model=model,
            device=device,
            schedule=args.schedule,
            overlap=args.overlap,
            p2p_overlap=args.p2p_overlap,
            tree_algorithm=args.tree_algo,
        )
    )


def analysis(args: argparse.Namespace) -> int:
    """One configuration; exit 3 if it does not fit the device."""
    result = analysis_of(args)
    if args.csv:
        cli.write(report.as_csv(report.traffic_rows(result)))
    else:
        cli.emit(report.analysis_data(result), report.analysis_text(result, verbose=args.verbose), as_json=args.json)
    return cli.infeasible(report.verdict(result)) if result.fits is False else cli.EXIT_OK


def _flat(result: TrafficAnalysis) -> dict[str, Any]:
    """One row for a whole configuration."""
    data = report.analysis_data(result)
    keys = ("topology", "devices", "dp", "tp", "pp", "cp", "zero", "sequence_parallel", "cp_mode")
    row = {key: data[key] for key in keys}
    for name in ("DP", "TP", "PP", "CP"):
        row[f"{name.lower()}_s"] = sum(t.time_s for t in result.traffic if t.dimension == name)
    row["communication_upper_bound_s"] = result.upper_bound_s
    return row | {"memory_bytes": result.chosen_memory.total_bytes}


def run_all(args: argparse.Namespace) -> int:
    """All predefined combinations: CSV on standard output, or CSV files and plots in a folder."""
    from polygon.formats import files

    link, inter = catalogue.link(INTRA), catalogue.link(INTER)
    cells = [row for cell in predefined.all_cells(link, inter) for row in report.cell_rows(cell)]
    configurations = [_flat(result) for result in predefined.all_analyses(link, inter)]
    if args.out in (None, "-"):
        if args.json:
            cli.emit({"collectives": cells, "configurations": configurations}, "", as_json=True)
        else:
            cli.write(report.as_csv(cells) + "\n" + report.as_csv(configurations))
        return cli.EXIT_OK
    from polygon.messages.figures import new_figure
    from polygon.overhead import communication_plots as plots

    folder = Path(args.out)
    files.make_folder(folder)
    files.write_text(folder / "collectives.csv", report.as_csv(cells))
    files.write_text(folder / "configurations.csv", report.as_csv(configurations))
    names = ["collectives.csv", "configurations.csv"]
    talk = cli.Talk(quiet=args.quiet)
    with talk.progress("plots", total=len(KINDS) + 1) as show:
        for done, kind in enumerate(KINDS):
            show(done, kind)
            figure = new_figure(6.4, 4.4, "-o")
            plots.time_by_size(figure, folder / f"time-{kind}.png", predefined.wiring(kind, 16, link, inter))
            names.append(f"time-{kind}.png")
        show(len(KINDS), "memory")
        first = next(a for a in predefined.all_analyses(link, inter) if a.configuration.degrees.dp == 8)
        figure, title = new_figure(5.4, 4.0, "-o"), "70e9 parameters over 8 GPUs, dp 8"
        plots.memory_by_zero(figure, folder / "memory-zero.png", first.memory, title)
        names.append("memory-zero.png")
    cli.emit({"written": names}, "\n".join(str(folder / name) for name in names), as_json=args.json)
    return cli.EXIT_OK


def list_commands(args: argparse.Namespace) -> int:
    """Commands to copy."""
    cli.write("\n".join(predefined.commands()) + "\n")
    return cli.EXIT_OK


MODES = {"collective": collective, "analysis": analysis, "list-cmds": list_commands, "run-all": run_all}


def main(argv: list[str] | None = None) -> int:
    """Run a mode."""
    args = parser().parse_args(argv)
    return MODES[args.mode](args)


if __name__ == "__main__":
    sys.exit(cli.run(main))
