"""A plan's shape at a size that one machine can run: same stages, order and routes, a small model, fewer workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from polygon.domain.errors import require
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Plan, Problem, Stage, Worker
from polygon.domain.runtime import POLYGON
from polygon.domain.schedule import BACKWARD, FORWARD, topological_order, worker_order

HIDDEN_SIZE = 64
HEADS = 4
SEQ_LEN = 64
VOCABULARY = 256
MAX_LAYERS = 16
MAX_MICRO_BATCHES = 32
MAX_MICRO_BATCH_SIZE = 4


def rehearsal_problem(
    problem: Problem,
    plan: Plan,
    *,
    max_ranks: int | None = None,
    max_layers: int = MAX_LAYERS,
    max_micro_batches: int = MAX_MICRO_BATCHES,
) -> tuple[Problem, Plan]:
    """Scale a problem and its plan down to a rehearsal.

    Kept: the cluster, the stages, their order, chunks and ZeRO, the packing of links, and, within the limits, widths,
    shares and routes. Scaled: layers (each stage keeps its part, at least one), every layer's size, the sequence, the
    number of micro-batches (an even selection of the routes in which each worker still has work), spans (so that each
    worker holds about as many micro-batches as before) or an order of the plan's own (that of the micro-batches which
    are left; workers that are one now take turns), the degrees inside a worker and of experts (to what divides the
    small model's heads and experts; to 1 where the ranks would not suffice for all stages).

    Parameters
    ----------
    problem, plan
        What is to be rehearsed.
    max_ranks : int, optional
        Most ranks; stages are merged only if there are more of them, widths shrink in proportion.
    max_layers, max_micro_batches : int
        Limits of the small model and of a step.

    Returns
    -------
    problem, plan
        Runnable as they are.
    """
    require(max_ranks is None or max_ranks >= 1, "max_ranks", max_ranks, "a whole number >= 1")
    require(max_layers >= 3, "max_layers", max_layers, "a whole number >= 3")
    tp, cp = _degrees(problem.model, plan, max_ranks)
    max_workers = None if max_ranks is None else max_ranks // (tp * cp)
    stages, routes, chunks = list(plan.stages), np.asarray(plan.routes), plan.chunks
    slack = [np.array(plan.spans[s]) * plan.shares(s) / plan.micro_batches for s in range(len(stages))]
    firsts = list(range(len(stages)))
    if max_workers is not None and plan.groups > max_workers:
        stages, firsts, chunks = _merge_stages(stages, max_workers, chunks)
        routes, slack = routes[:, firsts], [slack[s] for s in firsts]
    groups = len(stages) // chunks
    widths = _shrink([stage.width for stage in stages[:groups]], max_workers)
    kept_workers, kept_slack, places = [], [], []
    for s, stage in enumerate(stages):
        if s < groups:
            shares = np.bincount(routes[:, s], minlength=stage.width)
            workers, place = _merge_workers(stage.workers, shares, widths[s], tp, cp)
            kept_workers.append(workers)
            places.append(place)
        place = places[s % groups]
        kept_slack.append(np.array([slack[s][place == w].max() for w in range(widths[s % groups])]))
        routes = np.concatenate([routes[:, :s], place[routes[:, s]][:, None], routes[:, s + 1 :]], axis=1)
    kept_workers, widths = kept_workers * chunks, widths * chunks
    chosen = _select(routes, widths, max_micro_batches)
    routes = routes[chosen]
    counts = _layer_counts([stage.last_layer - stage.first_layer for stage in stages], max_layers)
    borders = [0, *np.cumsum(counts).tolist()]
    small_stages = tuple(
        Stage(
            first_layer=borders[s],
            last_layer=borders[s + 1],
            workers=workers,
            recompute=stages[s].recompute,
            zero=stages[s].zero if len(workers) * cp > 1 else 0,
            shards=stages[s].shards if stages[s].shards and len(workers) * cp % stages[s].shards == 0 else 0,
            sequence_parallel=stages[s].sequence_parallel and tp > 1,
        )
        for s, workers in enumerate(kept_workers)
    )
    micro_batch_size = min(plan.micro_batch_size, MAX_MICRO_BATCH_SIZE)
    model = _small_model(problem.model, borders[-1] - 2)
    batch = Batch(
        global_batch=len(routes) * micro_batch_size,
        seq_len=model.tokens_per_image if model.family == "vit" else min(SEQ_LEN, problem.batch.seq_len),
        precision="fp32",
        optimizer=problem.batch.optimizer,
    )
    small_plan = replace(
        plan,
        stages=small_stages,
        routes=routes,
        micro_batch_size=micro_batch_size,
        spans=_spans(kept_slack, routes),
        chunks=chunks,
        order=None if plan.order is None else _order(plan, chosen, firsts, routes),
    )
    sharing = tuple(
        replace(stage, ep=_expert_degree(model, small_plan, s, stages[s].ep))
        for s, stage in enumerate(small_plan.stages)
    )
    # To compile so small a model takes longer than to train it.
    runtime = POLYGON if problem.runtime.name == "polygon-compiled" else problem.runtime
    return replace(problem, model=model, batch=batch, runtime=runtime), replace(small_plan, stages=sharing)


def _degrees(model: Model, plan: Plan, max_ranks: int | None) -> tuple[int, int]:
    """Largest tp and cp of the rehearsal: all stages find room, and the small model's heads divide."""
    workers = [worker for stage in plan.stages for worker in stage.workers]
    tp = math.gcd(_small_kv_heads(model), max(worker.tp for worker in workers))
    cp = math.gcd(HEADS // tp, *(worker.cp for worker in workers))
    while max_ranks is not None and tp * cp > 1 and max_ranks // (tp * cp) < plan.groups:
        tp, cp = (tp, cp // 2) if cp > 1 else (tp // 2, cp)
    return tp, cp


def _expert_degree(model: Model, plan: Plan, s: int, wanted: int) -> int:
    """Of a stage: what divides the small model's experts, where all workers do the same at the same time; else 1."""
    stage = plan.stages[s]
    orders = {
        tuple(action._replace(micro_batch=0) for action in worker_order(plan, s % plan.groups, w))
        for w in range(stage.width)
    }
    alike = len(orders) == 1 and len({worker.tp for worker in stage.workers}) == 1
    return math.gcd(wanted, model.experts, stage.members) if alike and wanted > 1 else 1


def _merge_stages(stages: list[Stage], count: int, chunks: int) -> tuple[list[Stage], list[int], int]:
    """Join the stages of neighbouring groups to `count` groups of about equally many, chunk by chunk: these, the first
    stage of each, and the chunks.

    The first one's workers hold the layers of all; one group has no use for chunks.
    """
    groups = len(stages) // chunks
    joined = [chunk * groups + part for chunk in range(chunks) for part in np.array_split(np.arange(groups), count)]
    if count == 1:
        joined, chunks = [np.arange(len(stages))], 1
    merged = [replace(stages[part[0]], last_layer=stages[part[-1]].last_layer) for part in joined]
    return merged, [int(part[0]) for part in joined], chunks


def _order(plan: Plan, chosen: np.ndarray, firsts: Sequence[int], routes: np.ndarray) -> np.ndarray:
    """The plan's own order, of the chosen micro-batches and of the first of stages that are joined.

    By when actions end if all take as long: every dependency goes to a later one, so workers that are merged take turns
    and none waits for ever.
    """
    ends = np.zeros((2, *plan.routes.shape), dtype=np.int64)
    free: dict[tuple[int, int], int] = {}
    last = len(plan.stages) - 1
    for kind, m, s in topological_order(plan).tolist():
        worker = s, int(plan.routes[m, s])
        if kind == FORWARD:
            before = ends[FORWARD, m, s - 1] if s > 0 else 0
        else:
            before = ends[BACKWARD, m, s + 1] if s < last else ends[FORWARD, m, s]
        ends[kind, m, s] = free[worker] = 1 + max(int(before), free.get(worker, 0))
    kept = ends[:, chosen][:, :, firsts]
    order = np.empty_like(kept)
    for s, column in enumerate(routes.T):
        for worker in set(column.tolist()):
            mine = column == worker
            places = np.argsort(np.argsort(kept[:, mine, s], axis=None, kind="stable"), kind="stable")
            order[:, mine, s] = places.reshape(2, -1)
    return order


def _shrink(widths: Sequence[int], max_ranks: int | None) -> list[int]:
    """Widths of at most `max_ranks` in all, in proportion, each at least 1 (largest remainders first)."""
    total = sum(widths)
    if max_ranks is None or total <= max_ranks:
        return list(widths)
    spare = max_ranks - len(widths)
    wanted = [(width - 1) * spare / (total - len(widths)) for width in widths]
    given = [int(want) for want in wanted]
    by_remainder = sorted(range(len(widths)), key=lambda s: (given[s] - wanted[s], s))
    for s in by_remainder[: spare - sum(given)]:
        given[s] += 1
    return [1 + more for more in given]


def _merge_workers(
    workers: Sequence[Worker], shares: np.ndarray, width: int, tp: int, cp: int
) -> tuple[tuple[Worker, ...], np.ndarray]:
    """Let neighbours share one worker, the busiest among them, of at most those degrees; every worker's new place."""
    place = np.zeros(len(workers), dtype=np.int64)
    kept = []
    for new, group in enumerate(np.array_split(np.arange(len(workers)), width)):
        place[group] = new
        busiest = workers[int(group[np.argmax(shares[group])])]
        kept.append(replace(busiest, devices=busiest.devices[: math.gcd(busiest.tp, tp) * cp], cp=cp))
    return tuple(kept), place


def _select(routes: np.ndarray, widths: Sequence[int], limit: int) -> np.ndarray:
    """Rows of the routes: `limit` at even distances, and more where a worker with work would have none."""
    if len(routes) <= limit:
        return np.arange(len(routes))
    chosen = set(((np.arange(limit) + 0.5) * len(routes) / limit).astype(int).tolist())
    for s, width in enumerate(widths):
        for worker in range(width):
            mine = np.flatnonzero(routes[:, s] == worker)
            if len(mine) and not chosen.intersection(mine.tolist()):
                chosen.add(int(mine[len(mine) // 2]))
    return np.array(sorted(chosen))


def _layer_counts(counts: Sequence[int], max_layers: int) -> list[int]:
    """Layers of every stage: in proportion, at least one each, and an embedding, a block and a head in all."""
    factor = min(1.0, max(max_layers, len(counts)) / sum(counts))
    small = [max(1, round(count * factor)) for count in counts]
    while sum(small) < 3:
        small[int(np.argmax(counts))] += 1
    return small


def _spans(slack: Sequence[np.ndarray], routes: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Spans that are as much longer than what a worker's own share asks for as they were in the full plan."""
    micro_batches = len(routes)
    spans = []
    for s, more in enumerate(slack):
        shares = np.maximum(1, np.bincount(routes[:, s], minlength=len(more)))
        wanted = np.ceil(more * micro_batches / shares - 1e-9)
        spans.append(tuple(int(span) for span in np.clip(wanted, 1, micro_batches)))
    return tuple(spans)


def _small_kv_heads(model: Model) -> int:
    return HEADS if model.kv_heads == model.heads else HEADS // 2


def _small_model(model: Model, blocks: int) -> Model:
    """The same architecture with thin layers, plain ones where the model's are not (the engine has no others); a vision
    transformer for images of 8 x 8."""
    small = {
        "name": f"{model.name}-rehearsal",
        "blocks": blocks,
        "hidden_size": HIDDEN_SIZE,
        "heads": HEADS,
        "kv_heads": _small_kv_heads(model),
        "head_dim": HIDDEN_SIZE // HEADS,
        "ffn_size": _rounded(model.ffn_size / model.hidden_size),
        "source": f"{model.name} scaled down for a rehearsal",
    }
    if model.family == "vit":
        small |= {"image_size": 8, "patch_size": 2, "channels": 1, "vocab_size": min(10, model.vocab_size)}
        small |= {"max_seq_len": 17}
    else:
        small |= {"vocab_size": VOCABULARY, "max_seq_len": min(SEQ_LEN, model.max_seq_len)}
    if model.experts:
        small |= {
            "experts": min(4, model.experts),
            "experts_per_token": min(2, model.experts_per_token),
            "expert_ffn_size": _rounded(model.expert_ffn_size / model.hidden_size),
            "shared_experts": min(1, model.shared_experts),
            "dense_blocks": min(model.dense_blocks, blocks),
        }
    return replace(model.plain(), **small)  # type: ignore[arg-type]


def _rounded(ratio: float) -> int:
    return max(8, 8 * round(ratio * HIDDEN_SIZE / 8))
