"""Plans at random, for the laws of schedules: any widths, routes and spans, on one region."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from polygon.domain.plan import Plan, Stage, Worker
from polygon.domain.schedule import stage_spans, worker_order


def plan_of(widths, routes, spans):
    """A plan with one layer a stage and devices numbered through."""
    first = np.cumsum([0, *widths])
    stages = tuple(
        Stage(
            first_layer=s,
            last_layer=s + 1,
            workers=tuple(Worker(pool=0, devices=(int(first[s]) + w,)) for w in range(width)),
        )
        for s, width in enumerate(widths)
    )
    spans = spans if isinstance(spans[0], tuple) else stage_spans(stages, spans)
    return Plan(stages=stages, routes=np.asarray(routes, dtype=np.int64), micro_batch_size=1, spans=spans)


def plain_plan(stages, width, micro_batches, span):
    """Equal widths, micro-batches dealt in turn, the same span everywhere."""
    routes = [[m % width] * stages for m in range(micro_batches)]
    return plan_of([width] * stages, routes, (span,) * stages)


@st.composite
def routed_plans(draw, max_stages=5, max_width=4, max_micro_batches=14):
    """Any routes and spans."""
    widths = draw(st.lists(st.integers(1, max_width), min_size=1, max_size=max_stages))
    micro_batches = draw(st.integers(1, max_micro_batches))
    routes = [[draw(st.integers(0, width - 1)) for width in widths] for _ in range(micro_batches)]
    spans = tuple(tuple(draw(st.integers(1, 6)) for _ in range(width)) for width in widths)
    return plan_of(widths, routes, spans)


def ranked(plan, rng):
    """The plan in a drawn order of its own: of all actions that can begin, any is next."""
    micro_batches, stages = plan.routes.shape
    can, ranks = [(0, m, 0) for m in range(micro_batches)], np.zeros((2, micro_batches, stages), dtype=np.int64)
    done = {(s, w): 0 for s, stage in enumerate(plan.stages) for w in range(stage.width)}
    while can:
        k, m, s = can.pop(int(rng.integers(len(can))))
        worker = s, int(plan.routes[m, s])
        ranks[k, m, s], done[worker] = done[worker], done[worker] + 1
        if k == 0:
            can.append((0, m, s + 1) if s + 1 < stages else (1, m, s))
        elif s > 0:
            can.append((1, m, s - 1))
    return replace(plan, order=ranks)


def ranked_as_spans(plan):
    """The plan with the order that its spans give said outright."""
    ranks = np.zeros((2, *plan.routes.shape), dtype=np.int64)
    for s, stage in enumerate(plan.stages):
        for w in range(stage.width):
            for rank, action in enumerate(worker_order(plan, s, w)):
                ranks["FB".index(action.kind), action.micro_batch, s] = rank
    return replace(plan, order=ranks)
