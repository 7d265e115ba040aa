"""The checker of plans: a plan that is sound but for one thing breaks the one rule against it, and says where."""

import ast
import inspect
from dataclasses import replace

import numpy as np
import pytest

from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Cluster
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Constraints, LinkUse, Plan, Problem, Stage, StageRule, SumTree, Worker
from polygon.planning import checker
from polygon.planning.checker import PRICEABLE, broken_limits, violations
from tests.linked_regions import cluster_of, small_gpt
from tests.routed_plans import ranked, ranked_as_spans

MODEL = small_gpt()
LAYERS, HEADS = MODEL.layers, MODEL.heads
MICRO_BATCHES = 8

NODES = [[("a100-40gb", 2, 4)], [("a100-40gb", 2, 4)]]
"""Regions r0 and r1, each of two nodes with four devices; those of r1 are numbered from 8."""


def problem_of(
    *, cluster: Cluster | None = None, model: Model = MODEL, precision: str = "bf16", seq_len: int = 512, **limits
) -> Problem:
    batch = Batch(global_batch=MICRO_BATCHES, seq_len=seq_len, precision=precision)
    return Problem(
        cluster=cluster or cluster_of(NODES, bytes_per_s=1e9),
        model=model,
        batch=batch,
        constraints=Constraints(**limits),
    )


def parts(cp: int = 2) -> tuple[Worker, ...]:
    """Two workers of two devices of a node, which cut every sequence in so many parts."""
    return tuple(Worker(pool=0, devices=devices, cp=cp) for devices in ((0, 1), (4, 5)))


def workers(*devices: int, pool: int = 0) -> tuple[Worker, ...]:
    return tuple(Worker(pool=pool, devices=(d,)) for d in devices)


def plan_of(*stages: Stage, **changed) -> Plan:
    """Micro-batches dealt in turn, plain 1F1B."""
    routes = np.stack([np.arange(MICRO_BATCHES) % max(stage.width, 1) for stage in stages], axis=1)
    spans = tuple((stage.width,) * stage.width for stage in stages)
    return replace(Plan(stages=stages, routes=routes, micro_batch_size=1, spans=spans), **changed)


FRONT = Stage(first_layer=0, last_layer=2, workers=workers(0, 1))
BACK = Stage(first_layer=2, last_layer=LAYERS, workers=workers(2, 3))
FAR = replace(BACK, workers=workers(8, 9, pool=1))
WHOLE = Stage(first_layer=0, last_layer=LAYERS, workers=(*workers(0), *workers(8, pool=1)))
"""All layers in each of two regions: what local steps need."""
SOUND = plan_of(FRONT, BACK)
LOCAL = plan_of(WHOLE, local_steps=10)
THREE = {"cluster": cluster_of([*NODES, NODES[0]], bytes_per_s=1e9)}
STAR = SumTree(part=1.0, root=0)


def summed(*trees: SumTree) -> Plan:
    """All layers in each of three regions, which sum over trees."""
    return plan_of(replace(WHOLE, workers=(*WHOLE.workers, *workers(16, pool=2)), trees=trees))


FREE = {"parity": "any"}
EXPERTS = {"model": replace(MODEL, experts=4, experts_per_token=2, expert_ffn_size=64)}
APART = replace(cluster_of(NODES), bytes_per_s=np.zeros((2, 2)))


def front(**changed) -> Plan:
    return plan_of(replace(FRONT, **changed), BACK)


def first(*devices: int, pool: int = 0, cp: int = 1) -> Plan:
    """The sound plan with other devices for the first worker."""
    return front(workers=(Worker(pool=pool, devices=devices, cp=cp), *workers(1)))


def chunked(last: tuple[Worker, ...] = BACK.workers, chunks: int = 2) -> Plan:
    """Four stages, two and two on the same workers, `last` on those that are given."""
    held = (FRONT.workers, BACK.workers, FRONT.workers, last)
    stages = [Stage(first_layer=s, last_layer=s + 1, workers=w) for s, w in enumerate(held)]
    stages[-1] = replace(stages[-1], last_layer=LAYERS)
    return plan_of(*stages, chunks=chunks)


def chunked_far() -> Plan:
    """Two chunks on each of two groups of workers in three regions."""
    held = ([(0, 0), (8, 1), (16, 2)], [(1, 0), (9, 1), (17, 2)])
    groups = [tuple(Worker(pool=pool, devices=(d,)) for d, pool in of) for of in held]
    stages = [Stage(first_layer=s, last_layer=s + 1, workers=groups[s % 2]) for s in range(4)]
    stages[-1] = replace(stages[-1], last_layer=LAYERS)
    return plan_of(*stages, chunks=2)


def linked(**changed) -> Plan:
    return replace(SOUND, links=(LinkUse(source=0, target=1, **changed),))


def routed(worker: int) -> Plan:
    routes = SOUND.routes.copy()
    routes[3, 1] = worker
    return replace(SOUND, routes=routes)


BROKEN = {
    "plan.layers": (plan_of(FRONT, replace(BACK, first_layer=3)), {}, {"stage": 1, "follows": 2}),
    "plan.zero": (front(zero=4), {}, {"stage": 0, "zero": 4}),
    "plan.zero_degrees": (
        front(zero=1, workers=(Worker(pool=0, devices=(4, 5)), *workers(1))), {}, {"zero": 1, "degrees": [1, 2]}
    ),
    "plan.recompute": (front(recompute="some"), {}, {"stage": 0, "recompute": "some"}),
    "plan.recompute_blocks": (front(recompute_blocks=2), {}, {"stage": 0, "blocks": 2, "recompute": "none"}),
    "plan.pool": (first(0, pool=2), {}, {"stage": 0, "worker": 0, "pool": 2}),
    "plan.no_devices": (first(), {}, {"stage": 0, "worker": 0}),
    "plan.other_pool": (first(8), {}, {"stage": 0, "worker": 0, "pool": 0}),
    "plan.several_nodes": (first(4, 0), {}, {"stage": 0, "worker": 0, "devices": (4, 0)}),
    "plan.heads": (first(4, 5, 6), {}, {"stage": 0, "worker": 0, "heads": HEADS, "tp": 3}),
    "plan.cp_devices": (first(0, 4, cp=3), {}, {"stage": 0, "worker": 0, "devices": 2, "cp": 3}),
    "plan.cp_tokens": (front(workers=parts()), {"seq_len": 511}, {"stage": 0, "worker": 1, "tokens": 511, "cp": 2}),
    "plan.ep": (front(ep=3), {"model": replace(EXPERTS["model"], experts=6)}, {"stage": 0, "ep": 3, "members": 2}),
    "plan.ep_shares": (
        replace(front(ep=2), routes=np.where(np.arange(MICRO_BATCHES)[:, None] < 1, 1, 0).repeat(2, axis=1)),
        EXPERTS,
        {"stage": 0, "least": 1, "most": MICRO_BATCHES - 1},
    ),
    "plan.ep_apart": (plan_of(replace(WHOLE, ep=2)), EXPERTS, {"stage": 0, "ep": 2}),
    "plan.no_experts": (front(ep=2), {}, {"stage": 0, "ep": 2}),
    "plan.shards": (front(shards=3), {}, {"stage": 0, "shards": 3, "members": 2}),
    "plan.chunks": (replace(SOUND, chunks=3), {}, {"chunks": 3, "stages": 2}),
    "plan.chunks_of_one_group": (
        plan_of(FRONT, replace(BACK, workers=FRONT.workers), chunks=2), {}, {"chunks": 2}
    ),
    "plan.chunk_routes": (
        replace(chunked(), routes=np.array([[0, 0, 1, 0], [1, 1, 1, 1]] * (MICRO_BATCHES // 2))), {}, {"chunks": 2}
    ),
    "plan.chunk_widths": (
        replace(
            plan_of(*(replace(s, workers=s.workers[: 2 - i % 2]) for i, s in enumerate(chunked().stages)), chunks=2),
            routes=np.zeros((MICRO_BATCHES, 4), dtype=int),
        ),
        {},
        {"chunks": 2},
    ),
    "plan.chunk_trees": (
        replace(chunked_far(), stages=(*chunked_far().stages[:3], replace(chunked_far().stages[3], trees=(STAR,)))),
        THREE,
        {"stage": 3, "first": 1},
    ),
    "plan.chunk_workers": (chunked(workers(4, 5)), {}, {"stage": 3, "first": 1, "chunks": 2}),
    "plan.last_layer": (plan_of(FRONT, replace(BACK, last_layer=LAYERS - 1)), {}, {"last": LAYERS - 1}),
    "plan.device_twice": (front(workers=workers(0, 2)), {}, {"device": 2, "times": 2}),
    "plan.routes_shape": (replace(SOUND, routes=SOUND.routes[:, :1]), {}, {"shape": (MICRO_BATCHES, 1), "stages": 2}),
    "plan.global_batch": (replace(SOUND, micro_batch_size=2), {}, {"micro_batch_size": 2}),
    "plan.route": (routed(2), {}, {"stage": 1, "most": 2, "width": 2}),
    "plan.spans_shape": (replace(SOUND, spans=((2, 2), (2,))), {}, {}),
    "plan.order": (replace(SOUND, order=np.zeros((2, MICRO_BATCHES, 2), dtype=int)), {}, {}),
    "plan.spans": (replace(SOUND, spans=((2, 2), (0, 2))), {}, {}),
    "plan.reduction": (replace(SOUND, reduction="gossip"), {}, {"reduction": "gossip"}),
    "plan.local_steps_least": (replace(SOUND, local_steps=0), {}, {"local_steps": 0}),
    "plan.no_link": (plan_of(FRONT, FAR), {"cluster": APART}, {"stage": 0, "source": "r0", "target": "r1"}),
    "plan.no_gradient_link": (plan_of(WHOLE), {"cluster": APART}, {"stage": 0, "a": "r0", "b": "r1"}),
    "plan.link_twice": (replace(linked(), links=2 * linked().links), {}, {"source": "r0", "target": "r1", "times": 2}),
    "plan.compression": (linked(activations="zip"), {}, {"source": "r0", "target": "r1", "mode": "zip"}),
    "plan.compression_not_allowed": (linked(weight_gradients="int4"), {}, {"traffic": "weight_gradients"}),
    "plan.streams": (linked(streams=0), {}, {"streams": 0}),
    "plan.local_steps_not_allowed": (LOCAL, {}, {"local_steps": 10}),
    "plan.packed_inside": (
        replace(SOUND, links=(LinkUse(source=0, target=0, weight_gradients="int8"),), reduction="central-server"),
        {},
        {"region": "r0"},
    ),
    "plan.local_steps_reduction": (replace(LOCAL, reduction="sharded-server"), FREE, {"reduction": "sharded-server"}),
    "plan.local_steps_fp16": (LOCAL, {**FREE, "precision": "fp16"}, {}),
    "plan.local_steps_tp": (
        plan_of(replace(WHOLE, workers=(Worker(pool=0, devices=(0, 1)), *workers(8, pool=1))), local_steps=10), FREE, {}
    ),
    "plan.local_steps_tied": (
        plan_of(
            replace(FRONT, workers=(Worker(pool=0, devices=(4, 5)), Worker(pool=1, devices=(12, 13)))),
            replace(BACK, workers=(*workers(0), *workers(8, pool=1))),
            local_steps=10,
        ),
        FREE,
        {},
    ),
    "plan.local_steps_zero": (plan_of(replace(WHOLE, zero=3), local_steps=10), FREE, {}),
    "plan.local_steps_regions": (plan_of(FRONT, FAR, local_steps=10), FREE, {}),
    "plan.forbidden_region": (SOUND, {"forbidden_regions": ("r0",)}, {"region": "r0"}),
    "plan.forbidden_device": (SOUND, {"forbidden_devices": ("a100-40gb",)}, {"device": "a100-40gb"}),
    "plan.most_stages": (SOUND, {"most_stages": 1}, {"stages": 2, "most": 1}),
    "plan.only_regions": (SOUND, {"last_stage_regions": ("r1",)}, {"stage": 1, "region": "r0", "regions": ("r1",)}),
    "plan.never_regions": (
        SOUND, {"stage_rules": (StageRule(stage=-1, never_regions=("r0",)),)}, {"stage": 1, "region": "r0"}
    ),
    "plan.no_trees": (plan_of(replace(WHOLE, trees=(STAR,))), {}, {"stage": 0, "regions": 2}),
    "plan.tree_parts": (summed(replace(STAR, part=0.6), replace(STAR, part=0.3)), THREE, {"stage": 0, "parts": 0.9}),
    "plan.tree": (
        summed(replace(STAR, part=0.5), replace(STAR, part=0.5, relays=((1, 2), (2, 1)))), THREE, {"tree": 1}
    ),
    "plan.memory": (SOUND, {"memory_headroom": 0.97}, {"device": "a100-40gb"}),
}  # fmt: skip
"""By rule: a plan that breaks it and no other, what its problem has beside, and arguments that the violation must have.

Several places may break the one rule; those that are told must hold for one of them.
"""


@pytest.mark.parametrize("kind", BROKEN)
def test_a_plan_broken_in_one_way_breaks_one_rule(kind):
    """Only that rule, with the numbers that are wrong; the sound plan of the same problem keeps it."""
    plan, asked, told = BROKEN[kind]
    found = violations(problem_of(**asked), plan)
    assert {violation.kind for violation in found} == {kind}
    assert any(told.items() <= dict(violation.arguments).items() for violation in found), found


@pytest.mark.parametrize(
    ("kind", "plan", "asked"),
    [
        ("plan.cp_devices", first(0, cp=0), {}),
        ("plan.ep", front(ep=0), {}),
        ("plan.ep", front(workers=parts(), ep=4), {"model": replace(EXPERTS["model"], experts=6)}),
        ("plan.shards", front(shards=-1), {}),
        ("plan.chunks", replace(SOUND, chunks=0), {}),
    ],
)
def test_what_shares_something_out_divides_it(kind, plan, asked):
    """Degrees below the least; experts that their devices do not divide."""
    assert {violation.kind for violation in violations(problem_of(**asked), plan)} == {kind}


@pytest.mark.parametrize(
    ("kind", "plan", "asked"),
    [
        ("plan.tree", summed(replace(STAR, root=3)), THREE),
        ("plan.tree", summed(replace(STAR, relays=((0, 1),))), THREE),
        ("plan.tree", summed(replace(STAR, relays=((1, 0),))), THREE),
        ("plan.tree", summed(replace(STAR, relays=((1, 3),))), THREE),
        ("plan.tree_parts", summed(replace(STAR, part=1.5), replace(STAR, part=-0.5)), THREE),
        ("plan.no_trees", replace(summed(STAR), reduction="central-server"), THREE),
        (
            "plan.no_trees",
            replace(summed(STAR), links=(LinkUse(source=0, target=2, weight_gradients="powersgd"),)),
            {**THREE, **FREE},
        ),
        (
            "plan.no_trees",
            replace(summed(STAR), links=(LinkUse(source=1, target=1, weight_gradients="int8"),)),
            {**THREE, **FREE},
        ),
    ],
)
def test_trees_are_trees_of_the_stages_regions(kind, plan, asked):
    """One root, and nobody more than two links from it; only where regions send one another parts of plain sums."""
    assert {violation.kind for violation in violations(problem_of(**asked), plan)} == {kind}


@pytest.mark.parametrize("relays", [(), ((1, 2),), ((2, 1),)])
def test_sound_trees_break_no_rule(relays):
    """Over a relay or straight."""
    plan = summed(replace(STAR, part=0.25, relays=relays), replace(STAR, part=0.75, root=2))
    assert violations(problem_of(**THREE), plan) == []


def test_a_plan_that_is_not_interleaved_uses_no_device_twice():
    """The chunks of one that is do."""
    found = violations(problem_of(), chunked(chunks=1))
    assert {(v.kind, v["device"], v["times"]) for v in found} == {("plan.device_twice", d, 2) for d in range(4)}


def test_a_stage_without_workers_has_no_routes_either():
    """It cannot be broken alone: the routes name workers that are not there."""
    found = violations(problem_of(), front(workers=()))
    assert [(v.kind, v.stage) for v in found] == [("plan.no_workers", 0), ("plan.route", 0)]


def test_routes_name_no_worker_before_the_first():
    """-1 would be the last worker to numpy."""
    (found,) = violations(problem_of(), routed(-1))
    assert (found.kind, found["least"]) == ("plan.route", -1)


@pytest.mark.parametrize(("stage", "found"), [(0, {0}), (1, {1}), (-1, {1}), (-2, {0}), (2, set()), (-3, set())])
def test_a_rule_is_of_its_stage_alone(stage, found):
    """From the front or from the back; one for a stage that is not there binds nobody."""
    rules = (StageRule(stage=stage, never_regions=("r0",)),)
    assert {violation.stage for violation in violations(problem_of(stage_rules=rules), SOUND)} == found


@pytest.mark.parametrize("limit", ["step_s", "usd_per_step", "usd_per_hour"])
def test_limits_of_time_and_money(limit):
    """Half of what the plan takes: exceeded by all of that again; twice as much: kept."""
    (over,) = violations(problem_of(**{f"most_{limit}": 1e-9}), SOUND)
    assert over.kind == "plan.limit" and over["excess"].kind == f"limit.{limit}"
    value = over["excess"]["value"]
    (half,) = violations(problem_of(**{f"most_{limit}": value / 2}), SOUND)
    assert half["excess"]["value"] == value and half["excess"]["limit"] == value / 2
    assert violations(problem_of(**{f"most_{limit}": 2 * value}), SOUND) == []


def test_a_cap_on_what_leaves_a_region():
    """Activations leave r0 and their gradients r1: caps of nothing name both regions with their bytes."""
    found = violations(problem_of(egress_bytes_per_step={"*": 0.0}), plan_of(FRONT, FAR))
    assert [(v.kind, v["excess"]["region"]) for v in found] == [("plan.limit", "r0"), ("plan.limit", "r1")]
    assert all(v["excess"]["value"] > 0 == v["excess"]["limit"] for v in found)


def test_memory_is_over_by_what_is_needed_and_not_there():
    """The bytes missing are the need less what the headroom leaves, for every worker that lacks some."""
    problem = problem_of(memory_headroom=0.97)
    limit = problem.cluster.pools[0].device.memory_bytes * (1 - 0.97)
    found = violations(problem, SOUND)
    assert found
    for over in found:
        assert over["over_bytes"] == pytest.approx(over["need_bytes"] - limit)
        assert over.stage is not None and over.worker is not None and over["over_bytes"] > 0


@pytest.mark.parametrize(
    ("plan", "asked"),
    [
        (SOUND, {}),
        (LOCAL, FREE),
        (plan_of(FRONT, FAR), {}),
        (linked(), {}),
        (chunked(), {}),
        (front(workers=parts()), {}),
        (first(0, 4, cp=2), {}),
        (front(workers=parts(), shards=2), {}),
        (front(workers=parts(), ep=2), EXPERTS),
        (front(shards=1), {}),
    ],
)
def test_the_plans_that_are_broken_here_are_sound_to_begin_with(plan, asked):
    """So that what the rows above find is what they broke."""
    assert violations(problem_of(**asked), plan) == []


def test_workers_that_share_experts_have_one_order():
    """Any order that ends is sound where workers are by themselves; those that share experts go forward and backward
    together."""
    plan, rng = front(ep=2), np.random.default_rng(1)
    alone = ranked(replace(plan, stages=(replace(plan.stages[0], ep=1), plan.stages[1])), rng)
    assert violations(problem_of(**EXPERTS), alone) == []
    (found,) = violations(problem_of(**EXPERTS), replace(plan, order=alone.order))
    assert found.kind == "plan.order"
    outright = ranked_as_spans(plan)
    assert violations(problem_of(**EXPERTS), outright) == []


def test_every_rule_has_a_row():
    """A rule without one is found: its kind stands in the checker and not here."""
    calls = (node for node in ast.walk(ast.parse(inspect.getsource(checker))) if isinstance(node, ast.Call))
    rules = {call.args[0].value for call in calls if getattr(call.func, "id", "") == "Violation"}
    assert rules == {*BROKEN, "plan.no_workers", "plan.limit", "plan.packing_not_allowed"}
    assert rules > PRICEABLE


def test_packing_obeys_one_rule_inside_a_region_and_between():
    """What parity does not allow is refused on every link; what it allows, or does not know, is not."""
    inside = replace(SOUND, links=(LinkUse(source=0, target=0, activations="int4"),))
    (found,) = violations(problem_of(), inside)
    assert found.kind == "plan.compression_not_allowed"
    assert violations(problem_of(parity="any"), inside) == []
    gentle = replace(SOUND, links=(LinkUse(source=0, target=0, activations="int8"),))
    assert violations(problem_of(), gentle) == []
    assert [wrong.kind for wrong in violations(problem_of(parity="exact"), gentle)] == ["plan.compression_not_allowed"]


def test_a_list_of_packings_asks_for_none_inside_a_region():
    """Between regions all is packed as listed; inside one it may be left as it is."""
    asked = problem_of(compressions=("int8",))
    plain = LinkUse(source=0, target=0, activations="int8")
    assert violations(asked, replace(SOUND, links=(plain,))) == []
    found = violations(asked, replace(SOUND, links=(replace(plain, activations="int4"),)))
    assert [wrong.kind for wrong in found] == ["plan.compression_not_allowed"]


OF_LIMITS = {
    "packings": (linked(weight_gradients="int4"), {}),
    "packings both ways": (
        replace(SOUND, links=tuple(LinkUse(source=a, target=1 - a, activations="int4") for a in (0, 1))),
        {},
    ),
    "inside a region": (replace(SOUND, links=(LinkUse(source=0, target=0, activations="int4"),)), {}),
    "none inside, as a list need not say": (
        replace(SOUND, links=(LinkUse(source=0, target=0),)),
        {"compressions": ("int8",)},
    ),
    "local steps": (LOCAL, {}),
    "regions": (SOUND, {"forbidden_regions": ("r0",)}),
    "stages": (SOUND, {"most_stages": 1}),
    "time": (SOUND, {"most_step_s": 1e-9}),
    "nothing": (SOUND, {}),
}


@pytest.mark.parametrize("case", OF_LIMITS)
def test_what_a_plan_breaks_of_its_limits_is_what_the_whole_check_finds(case):
    """The same rules as the check of a whole plan, under which it can be priced, each packing told once."""
    plan, limits = OF_LIMITS[case]
    problem = problem_of(**limits)
    found = broken_limits(problem, plan, step_times(plan, CostTables(problem)))
    whole = violations(problem, plan)
    assert {fault.kind for fault in whole} <= PRICEABLE
    each = "plan.compression_not_allowed"
    packed = {(fault["traffic"], fault["mode"], str(fault["why"])) for fault in whole if fault.kind == each}
    once = [fault for fault in found if fault.kind == "plan.packing_not_allowed"]
    assert {
        (fault["what"].kind.removeprefix("loss."), fault["what"]["mode"], str(fault["why"])) for fault in once
    } == packed
    assert len(once) == len(packed)
    assert [fault for fault in found if fault not in once] == [fault for fault in whole if fault.kind != each]
