"""Lower bounds: below every plan, equal to it where the optimum is known, and each relaxation binds where it should."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.bounds import hold
from polygon.bounds import stage_bound
from polygon.bounds.least_traffic import LeastTraffic
from polygon.bounds.lower_bound import lower_bound
from polygon.bounds.pipeline_bound import PipelineBound
from polygon.bounds.size_work import SizeWork
from polygon.bounds.stage_bound import least_capacity
from polygon.bounds.stage_tiers import Kinds
from polygon.cost.convergence import allowed
from polygon.cost.profiles import LAYER_FORMAT, kind_profile
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Link
from polygon.domain.model import Batch
from polygon.domain.plan import COMPRESSIONS, Constraints, Plan, Problem, Stage, Worker
from polygon.domain.schedule import stage_spans
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.formats import catalogue
from polygon.formats.files import read_problem
from polygon.planning.candidates import Candidates
from polygon.planning.checker import violations
from polygon.planning.decode import Allocation, Decoder, Infeasible
from polygon.planning.initial_solutions import simple_starts
from polygon.planning.polish import changes
from tests.drawn_problems import packed_at_random
from tests.linked_regions import TYPES, cluster_of, small_gpt
from tests.nightly import cases

NATIVE = Path(__file__).parents[2] / "instances" / "native"

LAN = Link(latency_s=5e-5, bytes_per_s=1e9)
BUS = Link(latency_s=1e-6, bytes_per_s=1e12)


@st.composite
def problems(draw):
    """Few or many regions, near or far, some pairs unlinked; small and large models; every set of packings."""
    members = st.tuples(st.sampled_from(TYPES), st.integers(1, 3), st.sampled_from([1, 2, 4]))
    groups = draw(st.lists(st.lists(members, min_size=1, max_size=2), min_size=1, max_size=5))
    n = len(groups)
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    latency_s = draw(st.sampled_from([1e-4, 0.01, 0.3])) * rng.uniform(0.2, 2, (n, n))
    bytes_per_s = draw(st.sampled_from([1e7, 1e8, 1e10])) * rng.uniform(0.2, 2, (n, n))
    if draw(st.booleans()):
        latency_s, bytes_per_s = np.maximum(latency_s, latency_s.T), np.maximum(bytes_per_s, bytes_per_s.T)
    if n > 2 and draw(st.booleans()):
        bytes_per_s[0, 1] = bytes_per_s[1, 0] = 0.0
    between = Link(latency_s=5e-5, bytes_per_s=draw(st.sampled_from([1e8, 1e9, 2e10])))
    cluster = cluster_of(
        groups,
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        node_bytes_per_s=draw(st.sampled_from([1e10, 3e11])),
        between=between,
        capacity=draw(st.sampled_from([np.inf, 1e8])),
    )
    model = draw(
        st.sampled_from(
            [
                small_gpt(),
                small_gpt(blocks=2),
                small_gpt(tied_embeddings=False, blocks=9),
                small_gpt(blocks=40, hidden_size=2048, head_dim=128, ffn_size=8192),
            ]
        )
    )
    packings = draw(st.sampled_from([("none",), ("none", "bf16", "int8"), COMPRESSIONS]))
    return Problem(
        cluster=cluster,
        model=model,
        batch=Batch(global_batch=draw(st.sampled_from([8, 12, 64])), seq_len=512),
        constraints=Constraints(compressions=packings, local_steps=draw(st.sampled_from([(1,), (1, 8)]))),
    )


def random_plans(problem, rng, count=6):
    """Plans of random allocations and of what a careful person would try, small changes of them (borders, options,
    chunks), and random spans, packings and steps."""
    decoder = Decoder(problem)
    candidates = Candidates(decoder, min(6, problem.model.layers))
    sizes = candidates.sizes
    starts = list(simple_starts(decoder, 4, sizes[0]))
    allocations = [candidates.random(rng) for _ in range(count)]
    allocations += [
        Allocation(workers=starts[rng.integers(len(starts))], micro_batch_size=int(rng.choice(sizes)))
        for _ in range(count)
    ]
    for allocation in allocations:
        plan = decoder.decode(allocation)
        if isinstance(plan, Infeasible):
            continue
        yield plan
        for changed in islice(changes(plan, decoder.tables), 6):
            if not violations(problem, changed, decoder.tables):
                yield changed
        spans = tuple(tuple(int(span) for span in rng.integers(1, 9, len(row))) for row in plan.spans)
        most_steps = max(allowed(problem).local_steps)
        links = packed_at_random(problem, plan.links, rng)
        yield replace(plan, spans=spans, links=links, local_steps=int(rng.integers(1, most_steps + 1)))


@settings(max_examples=cases(25), deadline=None)
@given(problem=problems(), seed=st.integers(0, 99))
def test_no_plan_beats_the_bound(problem, seed):
    """Whatever the cluster, model, packing and local steps: the exact step is no shorter than the bound."""
    tables = CostTables(problem)
    bound = lower_bound(tables)
    for plan in random_plans(problem, np.random.default_rng(seed)):
        assert step_times(plan, tables).step_s >= bound.seconds * (1 - 1e-9)


def test_parts_of_short_sequences_count_where_a_profile_of_whole_ones_says_more_than_the_model():
    """A device that was measured to take ten times what the model says has parts priced by the model."""
    cluster = cluster_of([[("a100-40gb", 1, 4)]], node_bytes_per_s=3e11)
    problem = Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=4, seq_len=512))
    plain = CostTables(problem).times(0, 1, 4, "none").layers
    layers = [
        {"kind": problem.model.layer_kind(layer), "tp": tp, "micro_batch_size": 4}
        | {"forward_s": 10 * float(plain.forward_s[layer]), "backward_s": 10 * float(plain.backward_s[layer])}
        for tp in (1, 2, 4)
        for layer in (0, 1, 7)
    ]
    profile = kind_profile({"format": LAYER_FORMAT, "device": "a100-40gb", "seq_len": 512, "layers": layers})
    tables = CostTables(problem, [profile])
    plan = uniform_plan(problem, ParallelConfig(cp=4, micro_batch_size=4, zero=3))
    assert step_times(plan, tables).step_s >= lower_bound(tables).seconds


@pytest.mark.parametrize(("tokens", "degree"), [(1000, 2), (1000, 4), (1020, 3)])
def test_sequences_that_do_not_divide_among_devices_may_be_cut_short(tokens, degree):
    """Seven on two devices: four on one of them take longer than all on both, however short the pieces are."""
    cluster = cluster_of([[("h100-sxm", 1, degree)]], node_bytes_per_s=4.5e11)
    problem = problem_of(cluster, catalogue.model("gpt3-125m"), global_batch=7, seq_len=tokens)
    problem = replace(problem, runtime=catalogue.runtime("megatron-core"))
    tables = CostTables(problem)
    plan = uniform_plan(problem, ParallelConfig(cp=degree, micro_batch_size=7, zero=1))
    assert violations(problem, plan, tables) == []
    assert step_times(plan, tables).step_s >= lower_bound(tables).seconds


@settings(max_examples=cases(12), deadline=None)
@given(problem=problems(), factor=st.floats(1.0, 20.0))
def test_better_links_and_more_freedom_never_raise_the_bound(problem, factor):
    """What can be bought or allowed does not make the bound worse, and each relaxation adds to those before."""
    bound = lower_bound(CostTables(problem))
    values = list(bound.parts.values())
    assert values == sorted(values)
    assert bound.seconds == values[-1]
    assert bound.binding in bound.parts
    faster = replace(problem, cluster=replace(problem.cluster, bytes_per_s=problem.cluster.bytes_per_s * factor))
    slack = 1 + 2e-3
    assert lower_bound(CostTables(faster)).seconds <= bound.seconds * slack
    assert lower_bound(CostTables(problem), local_steps=16).seconds <= bound.seconds * slack
    free = replace(problem, constraints=Constraints(compressions=COMPRESSIONS, local_steps=(1, 8)))
    assert lower_bound(CostTables(free)).seconds <= bound.seconds * slack


def problem_of(cluster, model=None, **batch):
    return Problem(
        cluster=cluster, model=model or small_gpt(), batch=Batch(**({"global_batch": 64, "seq_len": 512} | batch))
    )


def test_the_bound_holds_for_plans_that_the_program_does_not_run():
    """They can be priced all the same: local steps and packings over slow links, under a program without either."""
    limits = Constraints(compressions=("int8",), local_steps=(1, 30))
    cluster = cluster_of([[("t4", 2, 1)]] * 2, bytes_per_s=1e5)
    ours = Problem(
        cluster=cluster, model=small_gpt(), batch=Batch(global_batch=64, seq_len=256, precision="fp32"),
        constraints=limits,
    )  # fmt: skip
    other = replace(ours, runtime=catalogue.runtime("megatron-core"))
    anything = replace(other, runtime=replace(other.runtime, plans="any"))
    assert lower_bound(CostTables(other)).seconds == lower_bound(CostTables(anything)).seconds
    assert lower_bound(CostTables(other), local_steps=1).seconds > 1.2 * lower_bound(CostTables(other)).seconds


def test_regions_that_cannot_hold_the_model_take_for_ever():
    """No time is enough for two small devices that lack 10 GiB of the model: the bound says so, and ends."""
    cluster = cluster_of([[("t4", 1, 1)], [("t4", 1, 1)]], inside=LAN, between=LAN)
    wide = small_gpt(blocks=40, hidden_size=2048, head_dim=128, ffn_size=8192)
    bound = lower_bound(CostTables(problem_of(cluster, wide, global_batch=8)))
    assert bound.seconds == bound.parts["stages"] == np.inf > bound.parts["path"]


def test_one_device_is_solved():
    """A single device has one plan up to the micro-batch size: the bound is its compute."""
    problem = problem_of(cluster_of([[("a100-40gb", 1, 1)]], inside=LAN, between=LAN))
    tables = CostTables(problem)
    best_s = np.inf
    for size in tables.micro_batch_sizes:
        plan = Decoder(problem).decode(Allocation(workers=np.array([[1]]), micro_batch_size=size))
        times = step_times(plan, tables)
        best_s = min(best_s, times.ends_s.max())
    assert lower_bound(tables).seconds == pytest.approx(best_s, rel=1e-6)


def test_far_regions_are_worth_less_than_one():
    """Two equal regions ten seconds apart: joining them cannot pay, the bound is that of one alone."""
    one = problem_of(cluster_of([[("a100-40gb", 1, 2)]], inside=BUS, between=BUS))
    two = problem_of(cluster_of([[("a100-40gb", 1, 2)]] * 2, latency_s=10.0, bytes_per_s=1e9, inside=BUS, between=BUS))
    bound = lower_bound(CostTables(two))
    assert bound.binding == "regions"
    assert bound.seconds == pytest.approx(lower_bound(CostTables(one)).seconds, rel=2e-3)
    assert bound.parts["compute"] < 0.6 * bound.seconds


def test_a_slow_network_binds_by_reduction_and_pipeline():
    """Eight nodes in a region over 100 Mbit/s: neither replicas nor stages let compute alone decide."""
    slow = Link(latency_s=1e-3, bytes_per_s=1.25e7)
    bound = lower_bound(CostTables(problem_of(cluster_of([[("a100-40gb", 8, 1)]], inside=LAN, between=slow))))
    assert bound.binding == "stages"
    assert bound.seconds > 3 * bound.parts["compute"]


def test_memory_forces_stages():
    """A model that no device holds whole, on nodes too far apart to share layers, is bound by filling the pipeline."""
    large = small_gpt(blocks=48, hidden_size=2048, head_dim=128, ffn_size=8192, tied_embeddings=False)
    cluster = cluster_of([[("t4", 8, 1)]], inside=BUS, between=LAN)
    bound = lower_bound(CostTables(problem_of(cluster, large, global_batch=16)))
    assert bound.binding == "stages"
    assert bound.seconds > 1.25 * bound.parts["compute"]


def test_nothing_allowed_has_no_bound():
    """Without devices no step ends."""
    cluster = cluster_of([[("t4", 1, 1)]], inside=LAN, between=LAN)
    problem = Problem(
        cluster=cluster,
        model=small_gpt(),
        batch=Batch(global_batch=8, seq_len=512),
        constraints=Constraints(forbidden_regions=("r0",)),
    )
    assert lower_bound(CostTables(problem)).seconds == np.inf


@settings(max_examples=cases(10), deadline=None)
@given(problem=problems(), slack=st.floats(1.0, 3.0))
def test_kernel_is_its_python(problem, slack):
    """Compiled and interpreted dynamic programs agree."""
    tables = CostTables(problem)
    kinds = Kinds.of(tables)
    size = SizeWork(tables, kinds, tables.micro_batch_sizes[-1])
    pipeline = PipelineBound(size, LeastTraffic(tables, kinds, 1)).pipeline
    bound = lower_bound(tables).seconds
    for most_stages, further, weight in ((3, True, 0.0), (3, False, 0.5), (1, False, 0.0)):
        arguments = pipeline, slack * bound, most_stages, 10 * size.capacity, further, weight
        assert least_capacity(*arguments) == pytest.approx(least_capacity.py_func(*arguments))


@settings(max_examples=cases(10), deadline=None)
@given(problem=problems(), slack=st.floats(0.7, 1.5))
def test_ways_left_early_are_none_that_end(problem, slack):
    """What layers behind a stage need at least changes no answer, of stages and of interleaved groups."""
    tables = CostTables(problem)
    kinds = Kinds.of(tables)
    size = SizeWork(tables, kinds, tables.micro_batch_sizes[0])
    bound = PipelineBound(size, LeastTraffic(tables, kinds, 1))
    grouped = [bound._groups(2, 0)[0]] if len(size.layer_work[size.run]) > 1 else []
    for pipeline in (bound.pipeline, *grouped):
        for most_stages, further in ((3, True), (3, False)):
            arguments = pipeline, slack * lower_bound(tables).seconds, most_stages
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(stage_bound, "rest_capacity", lambda *_: 0.0)
                least = least_capacity.py_func(*arguments, 10 * size.capacity, further, 0.0)
            # With no more than that, and not with less.
            assert least_capacity(*arguments, 10 * size.capacity, further, 0.0) == pytest.approx(least)
            if least < np.inf:
                assert least_capacity(*arguments, least * (1 + 1e-7), further, 0.0) <= least * (1 + 1e-6)


@pytest.mark.parametrize("blocks", [36, 46])
def test_states_split_among_workers_are_known(blocks):
    """Models that four T4 hold as one stage only under ZeRO-2 or 3: such a plan does not beat the bound."""
    large = small_gpt(blocks=blocks, hidden_size=2048, head_dim=128, ffn_size=8192, tied_embeddings=False)
    problem = problem_of(cluster_of([[("t4", 1, 4)]], inside=BUS, between=BUS), large)
    decoder = Decoder(problem)
    workers = np.array([[4 if tp == 1 else 0 for _, tp in decoder.classes]])
    plan = decoder.decode(Allocation(workers=workers, micro_batch_size=1))
    assert plan.stages[0].zero >= 2
    assert step_times(plan, decoder.tables).step_s >= lower_bound(decoder.tables).seconds


@pytest.mark.parametrize(("kind", "blocks"), [("stages", 56), ("interleaved", 6)])
def test_a_shared_embedding_is_summed_where_its_stages_are(kind, blocks):
    """From region to region where each is one device (of 56 blocks none holds all); else by two nodes of a region."""
    model = small_gpt(blocks=blocks, hidden_size=2048, head_dim=128, ffn_size=8192)
    sums_s, least_s = [], []
    for nodes, tied in ((1, True), (1, False), (2, True)):
        cluster = cluster_of([[("a100-40gb", nodes, 1)], [("a100-40gb", 1, 1)]], bytes_per_s=1e7)
        tables = CostTables(problem_of(cluster, replace(model, tied_embeddings=tied)))
        kinds = Kinds.of(tables)
        traffic = LeastTraffic(tables, kinds, 1)
        sums_s.append(traffic.tied_s)
        least_s.append(PipelineBound(SizeWork(tables, kinds, 1), traffic).kinds_of_plan(1, finely=True)[kind](1e3))
    across_s, no_s, near_s = sums_s
    assert 0.9 * model.tied_values / 1e7 < across_s and near_s < 0.1 * across_s and no_s == 0
    assert 1e3 > least_s[0] > least_s[1] + 0.7 * across_s


def test_a_worker_sees_what_its_own_last_backward_does_not_hide():
    """Of sums over A100 no more is hidden because there are T4, whose last backward is long; and no kind of plan gets a
    lower bound by it."""
    tables = CostTables(read_problem(NATIVE / "medium-96-campus.yaml"))
    kinds = Kinds.of(tables)
    bound = PipelineBound(SizeWork(tables, kinds, 4), LeastTraffic(tables, kinds, 1))
    own_s = {kind: least_s(1e3) for kind, least_s in bound.kinds_of_plan(1, finely=True).items()}
    bound.whole_s[:] = bound.rest_s[:] = 0.0
    alike_s = {kind: least_s(1e3) for kind, least_s in bound.kinds_of_plan(1, finely=True).items()}
    assert all(own_s[kind] >= alike_s[kind] for kind in own_s)
    assert own_s["interleaved"] > 1.005 * alike_s["interleaved"]


@pytest.mark.parametrize("seed", [11, 116, 122, 137])
def test_no_plan_beats_the_bound_of_its_own_kind(seed, capsys):
    """Nor the least of all kinds: searched plans, changes of them, random and random interleaved ones."""
    assert hold(seed, 1) == 0, capsys.readouterr().out


def test_a_budget_leaves_what_can_be_paid():
    """Half of what equal devices cost an hour: twice the time, less what larger micro-batches save; no plan in budget
    is quicker."""
    cluster = cluster_of([[("a100-40gb", 4, 2)]], inside=BUS, between=BUS)
    free = problem_of(cluster)
    usd = sum(pool.devices * pool.price_usd_per_hour for pool in cluster.pools)
    half = replace(free, constraints=Constraints(most_usd_per_hour=usd / 2))
    bound, tables = lower_bound(CostTables(free)), CostTables(half)
    assert lower_bound(tables).parts["compute"] == pytest.approx(2 * bound.parts["compute"], rel=0.03)
    known = CostTables(free)
    assert lower_bound(known) == bound
    assert lower_bound(known.with_other_links(half)) == lower_bound(tables)
    decoder = Decoder(half)
    workers = np.array([[4 if tp == 1 else 0 for _, tp in decoder.classes]])
    plan = decoder.decode(Allocation(workers=workers, micro_batch_size=1))
    assert step_times(plan, tables).step_s >= lower_bound(tables).seconds


def test_sums_inside_a_region_count_for_stages_in_several():
    """Two regions of eight nodes with fast links between them: whoever uses all nodes sums inside its region."""
    slow = Link(latency_s=5e-5, bytes_per_s=5e7)

    def seconds(between):
        cluster = cluster_of([[("a100-40gb", 8, 1)]] * 2, latency_s=1e-5, bytes_per_s=1e11, inside=BUS, between=between)
        only = Constraints(compressions=("none",), local_steps=(1,), most_stages=1)
        return lower_bound(CostTables(replace(problem_of(cluster), constraints=only))).seconds

    assert seconds(slow) > 1.3 * seconds(Link(latency_s=5e-5, bytes_per_s=5e10))


@pytest.mark.parametrize("once", [True, False])
def test_no_stage_has_more_to_sum_than_the_bound_of_it_says(once):
    """Of two stages in two regions, the shared weight in a sum of its own or in both stages': gradients, what comes
    last of them, and the sum of the weight."""
    cluster = cluster_of([[("t4", 1, 2)]] * 2, bytes_per_s=1e8)
    problem = Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=8, seq_len=256, precision="fp32"))
    problem = replace(problem, runtime=replace(problem.runtime, tied_once=once))
    tables, layers = CostTables(problem), problem.model.layers
    traffic = LeastTraffic(tables, Kinds.of(tables), 1)
    stages = tuple(
        Stage(first_layer=a, last_layer=b, workers=tuple(Worker(pool=r, devices=(2 * r + s,)) for r in range(2)))
        for s, (a, b) in enumerate(((0, 4), (4, layers)))
    )
    plan = Plan(
        stages=stages,
        routes=np.arange(8)[:, None] % np.array([2, 2]),
        micro_batch_size=1,
        spans=stage_spans(stages, (2, 2)),
    )
    times = step_times(plan, tables)
    for stage, cost in zip(stages, times.reductions, strict=True):
        place = stage.first_layer, stage.last_layer
        assert traffic.gradient_bytes[place] == pytest.approx(cost.wire_bytes)
        assert traffic.part_at_end[place] <= cost.last * (1 + 1e-9)
        for tier in traffic.across(np.ones(1), np.zeros((layers, layers + 1)), traffic.part_at_end)[0]:
            assert tier.near_s[place] <= (cost.streamed_s - cost.latency_s) * (1 + 1e-9)
            assert tier.exposed_s[place] <= max(cost.last_s, cost.streamed_s) * (1 + 1e-9)
    assert 0 < traffic.tied_s <= times.tied_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "least_s"), [("tiny-8-a10-two-zones", 4.18), ("tiny-6-three-labs", 0.47), ("small-32-budget", 3.4)]
)
def test_interleaved_plans_hold_the_ends_of_the_model(name, least_s):
    """In the groups that have them, as all lanes do: less by 2, 12 and 4 % was what others may do alike."""
    assert lower_bound(CostTables(read_problem(NATIVE / f"{name}.yaml"))).seconds > least_s


@settings(max_examples=cases(8))
@given(problem=problems(), looks=st.integers(0, 12))
def test_a_bound_cut_short_is_true_and_is_not_taken_for_the_whole_one(problem, looks):
    """Wherever time ends, what is said is no more than the whole bound, says that it is weaker, and is not kept."""
    tables, left = CostTables(problem), iter([1.0] * looks)
    short = lower_bound(tables, seconds_left=lambda: next(left, 0.0))
    whole = lower_bound(tables)
    assert not whole.cut_short and short.seconds <= whole.seconds * (1 + 1e-9)
    assert short.cut_short == (set(short.parts) != set(whole.parts)) and (looks > 0 or short.cut_short)
    assert lower_bound(tables, seconds_left=lambda: 0.0) is whole
