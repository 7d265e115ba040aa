"""Room in which the relaxation (`polygon.planning.fluid`) works, and what its parts tell one another there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polygon.cost.reduction import LevelsRoom, levels_room
from polygon.jit.by_pointer import gives_pointed
from polygon.planning.flow import Places, places_for
from polygon.planning.node_sharing import Hosts, hosts_for
from polygon.planning.problem_arrays import Bank
from polygon.planning.stage_lists import Stages, stages_for


class Reductions(NamedTuple):
    """What every stage has to do when its backward ends: arrays of shape (rows,)."""

    whole: np.ndarray
    last: np.ndarray
    inside: np.ndarray
    inside_last: np.ndarray
    """Seconds to reduce without waiting for other stages and of what comes last of it, and those inside regions."""
    update: np.ndarray
    tied: np.ndarray
    tied_inside: np.ndarray
    """Seconds of the update, and before it of the sum of tied embeddings; of that inside regions."""
    n_bytes: np.ndarray
    spread_bytes: np.ndarray
    card_bytes: np.ndarray
    wire_bytes: np.ndarray
    """Gradient bytes of a worker, of these the experts' where workers spread them; of all experts what nodes of a
    region sum at the end of a step, and what goes from place to place."""
    tree_s: np.ndarray
    """Seconds in which a sum over trees keeps links between regions busy (`LevelsRoom`), 0 of one in equal parts."""
    begin: np.ndarray
    tail: np.ndarray
    zeros: np.ndarray
    """When it begins, seconds from its end to that of the step, and zeros for the one or the other."""
    late: np.ndarray
    """Seconds from the end of the pipeline to that of the reduction and what follows it."""


class PipelineTimes(NamedTuple):
    """Seconds of every stage, up to the sums of its gradients: arrays of shape (rows,)."""

    passing: np.ndarray
    quickest: np.ndarray
    waits: np.ndarray
    message: np.ndarray
    before: np.ndarray
    """Of a micro-batch: on a stage's slowest worker, on its quickest, what of them that waits for messages, on the
    slowest way to the next stage, and in all stages before, there and back."""
    fill: np.ndarray
    span: np.ndarray
    rest: np.ndarray
    """Until a stage's first forward; its makespan; for which links behind it carry messages before the last."""
    flight: np.ndarray
    waited: np.ndarray
    """Backwards of all that a worker holds, of whose are least; a worker that memory has wait for its first backward,
    all in all."""
    trips: np.ndarray
    ends: np.ndarray
    """From a stage's last forward to its last backward; until that ends."""


class FluidWork(NamedTuple):
    """Room in which `fluid_step_s` works; of what it leaves there, only the lists by class of `stages` are of use."""

    stages: Stages
    places: Places
    hosts: Hosts
    trial: np.ndarray
    """(rows + 1,)."""
    old_bounds: np.ndarray
    old_options: np.ndarray
    old_out: np.ndarray
    """(rows + 1,), (3, rows), (3,) what the best cut of the layers so far has led to."""
    lateness: np.ndarray
    """(2, rows) seconds from the end of the pipeline to that of a stage's sums: without them, and for each byte summed;
    for the best cut so far."""
    no_cap: np.ndarray
    most_bytes: np.ndarray
    """(rows,) inf, and gradient bytes that stages may have when layers are cut a third time."""
    pipeline: PipelineTimes
    away_s: np.ndarray
    limits_s: np.ndarray
    """Without and with shares kept along the stages: (2, rows) seconds that a micro-batch is under way behind each
    stage, there and back; (2, 2) those that all take at least, for stages and links, and for what memory holds."""
    reduction: Reductions
    pools: np.ndarray
    degrees: np.ndarray
    near: np.ndarray
    ring_nodes: np.ndarray
    """(classes,) of one stage, as `pools`, `degrees`, `members` and `nodes` of `levels_s`."""
    pair_share: np.ndarray
    alone: np.ndarray
    """(regions, regions), as in `levels_s`, and zeros for what shares no pair."""
    packs: np.ndarray
    apart: np.ndarray
    """(regions,) whether nodes of a region send one another packed gradients, and none that does: as in `levels_s`."""
    packed: np.ndarray
    plain: np.ndarray
    """(rows, regions) whether those of a stage do, and none that does."""
    levels: LevelsRoom


@gives_pointed
def reductions_for(rows: int) -> Reductions:
    """Room for allocations of so many rows."""
    whole, last, inside, inside_last, update, tied, tied_inside, *sizes = np.zeros((11, rows))
    n_bytes, spread, card_bytes, wire_bytes = sizes
    begin, tail, zeros, late, tree_s = np.zeros((5, rows))
    return Reductions(
        whole=whole,
        last=last,
        inside=inside,
        inside_last=inside_last,
        update=update,
        tied=tied,
        tied_inside=tied_inside,
        n_bytes=n_bytes,
        spread_bytes=spread,
        card_bytes=card_bytes,
        wire_bytes=wire_bytes,
        tree_s=tree_s,
        begin=begin,
        tail=tail,
        zeros=zeros,
        late=late,
    )


@gives_pointed
def work_for(bank: Bank, rows: int) -> FluidWork:
    """Room for allocations of so many rows."""
    classes, regions = len(bank.pool), len(bank.stands)
    return FluidWork(
        stages=stages_for(rows, classes),
        places=places_for(rows, regions),
        hosts=hosts_for(bank, rows),
        trial=np.zeros(rows + 1, dtype=np.int64),
        old_bounds=np.zeros(rows + 1, dtype=np.int64),
        old_options=np.zeros((3, rows), dtype=np.int64),
        old_out=np.zeros(3, dtype=np.int64),
        lateness=np.zeros((2, rows)),
        no_cap=np.full(rows, np.inf),
        most_bytes=np.zeros(rows),
        pipeline=PipelineTimes(*np.zeros((len(PipelineTimes._fields), rows))),
        away_s=np.zeros((2, rows)),
        limits_s=np.zeros((2, 2)),
        reduction=reductions_for(rows),
        pools=np.zeros(classes, dtype=np.int64),
        degrees=np.zeros(classes, dtype=np.int64),
        near=np.zeros(classes, dtype=np.int64),
        ring_nodes=np.zeros(classes, dtype=np.int64),
        pair_share=np.zeros((regions, regions)),
        alone=np.zeros((regions, regions)),
        packs=np.zeros(regions, dtype=np.bool_),
        apart=np.zeros(regions, dtype=np.bool_),
        packed=np.zeros((rows, regions), dtype=np.bool_),
        plain=np.zeros((rows, regions), dtype=np.bool_),
        levels=levels_room(classes, regions),
    )
