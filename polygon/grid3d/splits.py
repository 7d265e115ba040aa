"""The configurations of a grid: every split of the devices, times the options asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from polygon.domain.divisors import divisors
from polygon.domain.model import Batch, Model
from polygon.domain.uniform import ParallelConfig


class GridSplit(NamedTuple):
    """dp x tp x pp x cp devices."""

    dp: int
    tp: int
    pp: int
    cp: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GridOptions:
    """What is tried beside every (dp, tp, pp); None: every value that can be."""

    cp: tuple[int, ...] | None = (1,)
    ep: tuple[int, ...] | None = (1,)
    micro_batch_size: tuple[int, ...] | None = (1,)
    zero: tuple[int, ...] = (0,)
    recompute: tuple[str, ...] = ("none",)
    schedule: tuple[str, ...] = ("1f1b",)
    interleave: tuple[int, ...] = (1,)
    sequence_parallel: tuple[bool, ...] = (False,)
    overlap: str | None = None
    """Of data-parallel traffic; None: the runtime's."""


EVERYTHING = GridOptions(
    cp=None,
    ep=None,
    micro_batch_size=None,
    zero=(0, 1, 2, 3),
    recompute=("none", "selective", "full"),
    schedule=("1f1b", "gpipe"),
    interleave=(1, 2, 4),
    sequence_parallel=(False, True),
)


def all_splits(devices: int, cp: tuple[int, ...] | None = (1,)) -> Iterator[GridSplit]:
    """Every (dp, tp, pp, cp) with this product, tensor degree by tensor degree."""
    for tp in divisors(devices):
        for context in divisors(devices // tp):
            if cp is not None and context not in cp:
                continue
            rest = devices // tp // context
            for pp in divisors(rest):
                yield GridSplit(dp=rest // pp, tp=tp, pp=pp, cp=context)


def split_fault(split: GridSplit, model: Model, batch: Batch, devices_per_node: int) -> str | None:
    """Why a split cannot be, whatever the options; None if it can."""
    dp, tp, pp, cp = split
    if devices_per_node % tp:
        return f"tp {tp} does not divide the {devices_per_node} devices of a node"
    if model.heads % tp:
        return f"tp {tp} does not divide the {model.heads} heads"
    if model.ffn_size % tp:
        return f"tp {tp} does not divide the MLP's width {model.ffn_size}"
    if pp > model.blocks and (pp > model.layers or model.layers % pp):  # embedding and head as stages of their own
        return f"pp {pp} is more than the {model.blocks} blocks"
    if batch.seq_len % cp:
        return f"cp {cp} does not divide the {batch.seq_len} tokens of a sequence"
    if batch.global_batch % dp:
        return f"dp {dp} does not divide the global batch {batch.global_batch}"
    return None


def micro_batch_sizes(split: GridSplit, batch: Batch, options: GridOptions) -> Iterator[tuple[int, str | None]]:
    """Micro-batch sizes to try, each with why it cannot be (None if it can)."""
    per_replica = batch.global_batch // split.dp
    for size in options.micro_batch_size or divisors(per_replica):
        fits = per_replica % size == 0
        yield size, None if fits else f"micro-batch {size} does not divide the {per_replica} sequences of a replica"


def interleave_fits(pp: int, model: Model, chunks: int, micro_batches: int) -> bool:
    """One chunk always fits; more need a pipeline, blocks (or layers, embedding and head among them) for all chunks,
    and micro-batches in rounds of pp."""
    if chunks == 1:
        return True
    return pp > 1 and 0 in (model.blocks % (pp * chunks), model.layers % (pp * chunks)) and micro_batches % pp == 0


def chunk_counts(pp: int, model: Model) -> list[int]:
    """Numbers of chunks into which the blocks, or the layers, of a pipeline can be dealt evenly; one first."""
    return sorted({1, *(n for of in (model.blocks, model.layers) if of % pp == 0 for n in divisors(of // pp))})


def _spreads(model: Model, ep: int) -> bool:
    return model.experts > 0 and model.experts % ep == 0


def _listed(values: tuple[int, ...] | None) -> str:
    return " or ".join(map(str, values or ()))


def configurations(
    split: GridSplit, model: Model, batch: Batch, options: GridOptions
) -> Iterator[tuple[ParallelConfig | int, str | None]]:
    """The configurations of a split that can be, and micro-batch sizes that cannot or of which none can be, with why.

    A configuration that another one equals is left out: ZeRO over one rank, GPipe or chunks without a pipeline,
    sequence parallelism without tensor parallelism, GPipe with chunks.
    """
    shards = split.dp * split.cp
    for size, fault in micro_batch_sizes(split, batch, options):
        if fault:
            yield size, fault
            continue
        count = batch.global_batch // split.dp // size
        eps = [ep for ep in options.ep or divisors(shards) if shards % ep == 0 and (ep == 1 or _spreads(model, ep))]
        chunked = [chunks for chunks in options.interleave if interleave_fits(split.pp, model, chunks, count)]
        if not eps:
            ranks = f"does not divide the {shards} ranks of dp x cp and the {model.experts} experts"
            yield size, f"ep {_listed(options.ep)} {ranks if model.experts else 'of a model without experts'}"
        elif not chunked:
            where = f"pp {split.pp}, {model.blocks} blocks and {count} micro-batches"
            yield size, f"interleave {_listed(options.interleave)} does not fit {where}"
        for ep in eps:
            for schedule in options.schedule:
                for chunks in chunked:
                    if schedule != options.schedule[0] and split.pp == 1:
                        continue
                    if chunks > 1 and schedule != "1f1b":
                        continue
                    for zero in options.zero if shards > 1 else options.zero[:1]:
                        for recompute in options.recompute:
                            for sequence in options.sequence_parallel if split.tp > 1 else (False,):
                                yield (
                                    ParallelConfig(
                                        dp=split.dp,
                                        tp=split.tp,
                                        pp=split.pp,
                                        cp=split.cp,
                                        ep=ep,
                                        micro_batch_size=size,
                                        zero=zero,
                                        recompute=recompute,
                                        schedule=schedule,
                                        chunks=chunks,
                                        sequence_parallel=sequence,
                                    ),
                                    None,
                                )
