"""The commands that `list-cmds` suggests and the combinations that `run-all` tabulates."""

from __future__ import annotations

from collections.abc import Iterator

from polygon.domain.cluster import Link
from polygon.domain.model import Batch
from polygon.overhead.collective_table import Cell, collective_cell
from polygon.overhead.communication import Configuration, TrafficAnalysis, analyse
from polygon.overhead.dimensions import Degrees, Shape
from polygon.overhead.topologies import KINDS, OPERATIONS, Topology, most_square

PROGRAM = "python -m polygon.overhead"
RANKS = (2, 3, 4, 7, 8, 16, 64)
SIZES = (1e3, 1e6, 1e9, 140e9)
PARAMETERS, BLOCKS, HIDDEN, SEQ_LEN = 70e9, 32, 4096, 1024
CONFIGURATIONS = (
    Degrees(),
    Degrees(dp=8),
    Degrees(dp=8, zero=1),
    Degrees(dp=8, zero=3),
    Degrees(dp=4, tp=2),
    Degrees(dp=4, tp=2, sequence_parallel=True),
    Degrees(dp=2, cp=4),
    Degrees(dp=2, cp=4, cp_mode="ring"),
    Degrees(dp=2, tp=2, cp=2),
    Degrees(dp=2, tp=2, pp=2),
    Degrees(tp=8),
    Degrees(pp=8),
)


def commands() -> list[str]:
    """Commands to copy: every mode, topology and dimension."""
    size, wide = "--M 140e9", "--params 70e9"
    shape = "--seq-length 1024 --hidden-size 4096"
    collective = [
        f"collective --topology {kind} --N 8{' --gpus-per-node 4' if kind == 'hierarchical' else ''} {size}"
        for kind in KINDS
    ]
    collective[-2:] = [f"collective --topology {k} --N 8 --mesh-nx 4 --mesh-ny 2 {size}" for k in ("mesh", "torus")]
    analysis = [
        f"--topology ring --num-gpus 8 --dp 8 {wide}",
        f"--topology hierarchical --num-gpus 8 --dp 8 --gpus-per-node 4 {wide}",
        *(f"--topology {kind} --num-gpus 8 --dp 8 {wide}" for kind in ("tree", "switch", "mesh", "torus")),
        f"--topology ring --num-gpus 1 --dp 1 --tp 1 --cp 1 {wide}",
        f"--topology ring --num-gpus 8 --dp 4 --tp 2 {wide} {shape}",
        f"--topology ring --num-gpus 8 --dp 2 --cp 4 {wide} {shape}",
        f"--topology ring --num-gpus 8 --dp 2 --tp 2 --cp 2 {wide} {shape} --num-layers 32",
        f"--topology ring --num-gpus 8 --dp 2 --tp 2 --pp 2 {wide} {shape} --num-layers 32 --micro-batches 8",
        "--topology hierarchical --num-gpus 64 --gpus-per-node 8 --dp 2 --tp 8 --pp 4 --model llama3-70b"
        " --seq-length 8192 --global-batch 64 --zero 1 --recompute full --sequence-parallel --gpu h100-sxm",
        "--topology switch --num-gpus 8 --dp 8 --ep 8 --model mixtral-8x7b --seq-length 4096 --gpu h100-sxm",
    ]
    return [
        f"{PROGRAM} list-cmds",
        *(f"{PROGRAM} {command}" for command in collective),
        f"{PROGRAM} collective --topology ring --N 8 {size} --tree-algo",
        f"{PROGRAM} collective --topology switch --N 8 {size} --op all",
        *(f"{PROGRAM} analysis {command}" for command in analysis),
        f"{PROGRAM} run-all",
        f"{PROGRAM} collective --topology hierarchical --N 8 --gpus-per-node 4 {size} --verbose",
        f"{PROGRAM} analysis --topology hierarchical --num-gpus 8 --dp 8 --gpus-per-node 4 {wide} --verbose",
    ]


def wiring(kind: str, ranks: int, link: Link, inter: Link) -> Topology:
    """A topology of this kind with usual proportions: nodes of up to 8, the squarest grid."""
    nx, ny = most_square(ranks)
    per_node = max(d for d in range(1, min(8, ranks) + 1) if ranks % d == 0 and (d < ranks or ranks <= 2))
    return Topology(kind=kind, ranks=ranks, link=link, inter=inter, per_node=per_node, nx=nx, ny=ny)


def all_cells(link: Link, inter: Link) -> Iterator[Cell]:
    """Every operation on every topology, for several numbers of ranks and sizes."""
    for kind in KINDS:
        for ranks in RANKS:
            topology = wiring(kind, ranks, link, inter)
            for op in OPERATIONS:
                for size in SIZES:
                    yield collective_cell(op, topology, size)


def all_analyses(link: Link, inter: Link) -> Iterator[TrafficAnalysis]:
    """The predefined configurations of 8 GPUs (one for the first) on every topology."""
    shape = Shape(parameters=PARAMETERS, blocks=BLOCKS, hidden_size=HIDDEN, seq_len=SEQ_LEN, micro_batches=4)
    for kind in KINDS:
        for degrees in CONFIGURATIONS:
            batch = Batch(global_batch=4 * degrees.dp, seq_len=SEQ_LEN, gradient_precision="bf16")
            whole = wiring(kind, degrees.devices, link, inter)
            yield analyse(Configuration(shape=shape, degrees=degrees, whole=whole, batch=batch))
