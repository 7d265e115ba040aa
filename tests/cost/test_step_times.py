"""Ends of steps: what sums between regions and the gradient's norm cost, and who waits for them."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.cost.estimate import estimate
from polygon.cost.network import gather_s, group_of
from polygon.cost.reduction import copies_s
from polygon.cost.simulation import plain_step_s
from polygon.cost.step_times import seen_s, step_times, waiting_s
from polygon.cost.tables import CostTables
from polygon.cost.transfers import codec_s, packed_bytes
from polygon.domain.cluster import Link
from polygon.domain.model import Batch
from polygon.domain.plan import LinkUse, Plan, Problem, Stage, Worker
from polygon.domain.runtime import Runtime
from polygon.domain.schedule import stage_spans
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.formats import catalogue
from tests.linked_regions import cluster_of, small_gpt
from tests.nightly import cases
from tests.uniform_splits import equal_nodes

LATENCY_S = 0.05


def far_problem(regions, bytes_per_s=1e8):
    """So many regions with two T4, one a node whose card is never in the way, and no tied embeddings."""
    groups, card = [[("t4", 2, 1)]] * regions, Link(latency_s=5e-5, bytes_per_s=max(1e9, regions * bytes_per_s))
    cluster = cluster_of(groups, latency_s=LATENCY_S, bytes_per_s=bytes_per_s, between=card)
    batch = Batch(global_batch=12, seq_len=256, precision="fp32")
    return Problem(cluster=cluster, model=small_gpt(tied_embeddings=False), batch=batch)


def replicas(problem, tp=1, **changes):
    """The whole model in every region, on `tp` of its devices."""
    regions, layers = len(problem.cluster.regions), problem.model.layers
    workers = tuple(Worker(pool=r, devices=tuple(range(2 * r, 2 * r + tp))) for r in range(regions))
    stages = (Stage(first_layer=0, last_layer=layers, workers=workers, **changes),)
    routes = np.arange(12)[:, None] % regions
    return Plan(stages=stages, routes=routes, micro_batch_size=1, spans=stage_spans(stages, (regions,)))


def packed(plan, regions, mode):
    links = tuple(
        LinkUse(source=a, target=b, activations="none", activation_gradients="none", weight_gradients=mode)
        for a in range(regions)
        for b in range(regions)
        if a != b
    )
    return replace(plan, links=links)


def in_two(plan, problem):
    """The same workers, one stage each."""
    layers = problem.model.layers
    stages = tuple(
        Stage(first_layer=s * layers // 2, last_layer=(s + 1) * layers // 2, workers=(worker,))
        for s, worker in enumerate(plan.stages[0].workers)
    )
    return replace(plan, stages=stages, routes=np.zeros((12, 2), dtype=np.int64), spans=stage_spans(stages, (2, 1)))


def test_the_norm_is_waited_for_where_nobody_has_the_whole_gradient():
    """Replicas find it in what they hold; stages, slices and split gradients send it over the longest link."""
    problem = far_problem(2)
    tables, plan = CostTables(problem), replicas(problem)
    assert plan.gradient_everywhere
    assert step_times(plan, tables).norm_s == 0
    assert step_times(replicas(problem, zero=1), tables).norm_s == 0
    for other in (replicas(problem, tp=2), replicas(problem, zero=2), in_two(plan, problem)):
        assert not other.gradient_everywhere
        times = step_times(other, tables)
        assert times.norm_s == LATENCY_S
        before_s = times.reduced_s.max() + LATENCY_S
        assert times.step_s == pytest.approx(before_s + times.update_s.max())


def test_waiting_for_another_stages_pipeline_is_no_reduction():
    """Two stages of a worker each: the later one ends its backward first, and updates longest, after the norm. The
    first is what all wait for, and of its sums there are none."""
    problem = far_problem(2)
    layers, plan = problem.model.layers, in_two(replicas(problem), problem)
    first, second = plan.stages
    plan = replace(plan, stages=(replace(first, last_layer=2), replace(second, first_layer=2, last_layer=layers)))
    times, terms = step_times(plan, CostTables(problem)), estimate(problem, plan).terms
    assert times.done_s.argmax() == 1 and times.ends_s[0] > times.ends_s[1] + LATENCY_S
    assert terms["reduction"] == pytest.approx(LATENCY_S)
    assert sum(terms.values()) == pytest.approx(times.step_s)


def test_nodes_that_pack_inside_a_region_divide_by_themselves():
    """Workers of a node of a region that packs, and those of a pool elsewhere, whatever their numbers are."""
    cluster = cluster_of([[("a100-40gb", 2, 2)], [("a100-40gb", 1, 2)]])
    problem = Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=12, seq_len=256))
    held = ((0, (0,)), (0, (1,)), (0, (2, 3)), (1, (4,)), (1, (5,)))
    workers = tuple(Worker(pool=pool, devices=devices) for pool, devices in held)
    stages = (Stage(first_layer=0, last_layer=problem.model.layers, workers=workers),)
    routes = np.arange(12)[:, None] % 5
    plan = Plan(stages=stages, routes=routes, micro_batch_size=1, spans=stage_spans(stages, (5,)))
    inside = replace(plan, links=(LinkUse(source=0, target=0, weight_gradients="int8"),))
    tables = CostTables(problem)
    assert [tables.placement(p).alike[0].tolist() for p in (plan, inside)] == [[2, 2, 1, 2, 2]] * 2
    single = tuple(Worker(pool=0, devices=(d,)) for d in range(4))
    four = replace(inside, stages=(replace(stages[0], workers=single),), routes=np.arange(12)[:, None] % 4)
    assert tables.placement(four).alike[0].tolist() == [2, 2, 2, 2]
    assert tables.placement(replace(four, links=())).alike[0].tolist() == [4, 4, 4, 4]


@pytest.mark.parametrize(("regions", "mode", "rounds"), [(2, "none", 1), (3, "none", 2), (3, "powersgd", 1)])
def test_regions_sum_in_rounds_of_messages(regions, mode, rounds):
    """Two regions send each other all of it, more of them exchange parts and sums, low-rank factors go whole."""
    problem = far_problem(regions)
    cost = step_times(packed(replicas(problem), regions, mode), CostTables(problem)).reductions[0]
    assert cost.latency_s == rounds * LATENCY_S
    sent = {n_bytes for *_, n_bytes in cost.across_bytes}
    assert len(sent) == 1
    assert len(cost.across_bytes) == regions * (regions - 1)
    if mode == "none":
        parameters = sum(problem.model.layer_parameters(layer) for layer in range(problem.model.layers))
        assert sent.pop() == pytest.approx(2 * 4 * parameters / regions)
        # Of equal links both rounds are one after the other on each, and longer than one latency.
        assert cost.across_s == pytest.approx(LATENCY_S + cost.across_bytes[0][2] / 1e8)


@pytest.mark.parametrize(("nodes", "per_node", "passes"), [(2, 2, 1), (2, 4, 2), (1, 2, 1), (1, 4, 6 / 4)])
def test_processors_sum_on_their_node_first_and_then_between_nodes(nodes, per_node, passes):
    """At a node's first one, which passes the gradient once or twice, and then in a ring of nodes; of one node in a
    ring. NCCL has one ring for all accelerators."""
    inside, between = Link(latency_s=1e-4, bytes_per_s=1e9), Link(latency_s=1e-3, bytes_per_s=1e8)
    cluster = cluster_of([[("t4", nodes, per_node)]], inside=inside, between=between)
    processor = replace(cluster.catalogue["t4"], architecture="cpu")
    processors = replace(cluster, catalogue=dict(cluster.catalogue) | {"t4": processor})
    problem, accelerated = (replace(far_problem(2), cluster=found) for found in (processors, cluster))
    width = nodes * per_node
    workers = tuple(Worker(pool=0, devices=(device,)) for device in range(width))
    stages = (Stage(first_layer=0, last_layer=problem.model.layers, workers=workers),)
    routes = np.arange(12)[:, None] % width
    plan = Plan(stages=stages, routes=routes, micro_batch_size=1, spans=stage_spans(stages, (width,)))
    cost, n_bytes = step_times(plan, CostTables(problem)).reductions[0], 4 * problem.model.parameters
    assert cost.node_s == pytest.approx(2 * (per_node - 1) * 1e-4 + passes * n_bytes / 1e9)
    reached = 0.9 * 1e8  # through sockets
    assert cost.region_s == pytest.approx((nodes - 1) * 2 * (1e-3 + n_bytes / 2 / reached))
    assert cost.across_s == 0
    nccl = step_times(plan, CostTables(accelerated)).reductions[0]
    assert nccl.node_s == 0 and (nodes == 1 or nccl.region_s > 2 * (width - 1) / width * n_bytes / 1e8)


@pytest.mark.parametrize("regions", [2, 3, 4])
def test_a_card_sends_to_all_other_regions_at_once(regions):
    """Where links between regions are as wide as cards, an exchange takes what a ring over the same nodes does."""
    rate = 1e8
    card = Link(latency_s=5e-5, bytes_per_s=rate)
    cluster = cluster_of([[("t4", 1, 1)]] * regions, latency_s=0.0, bytes_per_s=rate, between=card)
    problem = replace(far_problem(regions), cluster=cluster)
    workers = tuple(Worker(pool=r, devices=(r,)) for r in range(regions))
    whole = Stage(first_layer=0, last_layer=problem.model.layers, workers=workers)
    routes = np.arange(12)[:, None] % regions
    plan = Plan(stages=(whole,), routes=routes, micro_batch_size=1, spans=((12,) * regions,))
    tables = CostTables(problem)
    n_bytes = 4 * problem.model.parameters
    assert step_times(plan, tables).reductions[0].across_s == pytest.approx(
        2 * (regions - 1) * n_bytes / regions / tables.links.card_bytes_per_s[0], rel=1e-6
    )


@settings(deadline=None, max_examples=cases(15))
@given(regions=st.integers(2, 4), rate=st.sampled_from([1e7, 1e8, 1e9, 1e12]))
def test_the_last_layer_passes_the_latency(regions, rate):
    """However fast the links, the last layer's sum takes its rounds; it never takes longer than all sums after one
    another, and over slow links the step ends when the link has passed everything. Messages cost nothing here."""
    problem = far_problem(regions, rate)
    problem = replace(problem, runtime=replace(problem.runtime, message_s=0.0))
    times = step_times(replicas(problem), CostTables(problem))
    cost, end_s = times.reductions[0], times.ends_s.max()
    begin_s, reduced_s = times.reduction_span_s(0)
    assert reduced_s >= end_s + cost.latency_s
    assert reduced_s <= end_s + cost.total_s * (1 + 1e-9)
    assert reduced_s >= begin_s + cost.total_s * (1 - 1e-9)
    if rate == 1e12:
        assert reduced_s == pytest.approx(end_s + cost.latency_s, rel=2e-3)


def test_split_gradients_are_scattered_and_split_weights_gathered_for_every_micro_batch():
    """ZeRO-2 scatters every layer in backward; ZeRO-3 gathers the weights for either pass as well. Each hides
    behind the compute of a layer; what is longer is seen. Over PCIe one of the two passes of a sum
    takes 3/4 n / (0.53 rate) + n / 2 / (0.457 rate) and half of 10 us a member."""
    cluster = cluster_of([[("t4", 1, 4)]], node_bytes_per_s=1e9)
    batch = Batch(global_batch=12, seq_len=256, precision="fp32")
    problem = Problem(cluster=cluster, model=small_gpt(tied_embeddings=False), batch=batch)
    layers = problem.model.layers
    workers = tuple(Worker(pool=0, devices=(device,)) for device in range(4))
    found = {}
    for zero in range(4):
        stages = (Stage(first_layer=0, last_layer=layers, workers=workers, zero=zero),)
        plan = Plan(
            stages=stages, routes=np.arange(12)[:, None] % 4, micro_batch_size=1, spans=stage_spans(stages, (4,))
        )
        schedule = step_times(plan, CostTables(problem)).schedule
        found[zero] = schedule.forward_s[0], schedule.backward_s[0]
    n_bytes = 4.0 * np.array([problem.model.layer_parameters(layer) for layer in range(layers)])
    latency_s = cluster.pools[0].intra_node.latency_s
    wire = (3 / 4 / 0.53 + 1 / 2 / 0.457) / cluster.pools[0].intra_node.bytes_per_s
    once_s = wire * n_bytes + 4 / 2 * (5e-6 + latency_s)
    times = CostTables(problem).times(0, 1, 1, "none").layers
    whole = CostTables(problem).times(0, 1, 1, "none", accumulates=False).layers

    def seen(sent_s, compute_s):
        return float(np.maximum(sent_s - compute_s, 0).sum())

    forward_s, backward_s = times.forward_s.sum(), times.backward_s.sum()
    assert found[0] == found[1] == (pytest.approx(forward_s), pytest.approx(backward_s))
    assert found[2] == (pytest.approx(forward_s), pytest.approx(backward_s + seen(once_s, times.backward_s)))
    gathered = pytest.approx(forward_s + seen(once_s, whole.forward_s))
    assert found[3] == (gathered, pytest.approx(whole.backward_s.sum() + seen(2 * once_s, whole.backward_s)))


@pytest.mark.parametrize("limit", ["capacity_bytes_per_s", "egress_bytes_per_s"])
def test_a_region_s_capacity_bounds_what_its_links_carry_together(limit):
    """Of a pair or of all that leaves a region: a tenth of the link's rate takes ten times as long, by any plan."""
    problem = far_problem(2)
    cluster = problem.cluster
    if limit == "capacity_bytes_per_s":
        narrow = replace(cluster, capacity_bytes_per_s=np.full((2, 2), 1e7))
    else:
        narrow = replace(cluster, regions=tuple(replace(region, egress_bytes_per_s=1e7) for region in cluster.regions))
    wide_tables, narrow_tables = CostTables(problem), CostTables(replace(problem, cluster=narrow))
    plan = packed(replicas(problem), 2, "none")
    wide, slow = (step_times(plan, tables).reductions[0] for tables in (wide_tables, narrow_tables))
    assert slow.across_s - LATENCY_S == pytest.approx(10 * (wide.across_s - LATENCY_S))
    staged = in_two(replicas(problem), problem)
    wide, slow = (step_times(staged, tables).messages for tables in (wide_tables, narrow_tables))
    assert slow.busy_s == pytest.approx(10 * wide.busy_s)


@pytest.mark.parametrize("regions", [2, 3, 4])
def test_all_that_a_region_sends_passes_its_egress(regions):
    """Its part goes to every other region at once: their number of parts over one uplink."""
    problem = far_problem(regions)
    narrow = tuple(replace(region, egress_bytes_per_s=1e7) for region in problem.cluster.regions)
    problem = replace(problem, cluster=replace(problem.cluster, regions=narrow))
    cost = step_times(packed(replicas(problem), regions, "none"), CostTables(problem)).reductions[0]
    sent = sum(n_bytes for source, _, n_bytes in cost.across_bytes if source == 0)
    assert cost.across_s == pytest.approx(LATENCY_S + sent / 1e7)


def test_a_central_servers_gradients_pass_the_ring_whole():
    """One region of k accelerators: n bytes to the server and as many back; a sum sends (k - 1) / k of them twice."""
    cluster = cluster_of([[("t4", 4, 1)]])
    batch = Batch(global_batch=12, seq_len=256, precision="fp32")
    problem = Problem(cluster=cluster, model=small_gpt(tied_embeddings=False), batch=batch)
    workers = tuple(Worker(pool=0, devices=(device,)) for device in range(4))
    stages = (Stage(first_layer=0, last_layer=problem.model.layers, workers=workers),)
    plan = Plan(stages=stages, routes=np.arange(12)[:, None] % 4, micro_batch_size=1, spans=stage_spans(stages, (4,)))
    found = {
        kind: step_times(replace(plan, reduction=kind), CostTables(problem)).reductions[0].total_s
        for kind in ("all-reduce", "sharded-server", "central-server")
    }
    assert found["sharded-server"] == found["all-reduce"]
    assert found["central-server"] == pytest.approx(4 / 3 * found["all-reduce"])


def test_kept_terms_are_those_of_a_plan_priced_anew():
    """Other spans, links, routes (changed in place, too) and reductions cost with used tables what they do with new."""
    problem = far_problem(2)
    tables, plan = CostTables(problem), in_two(replicas(problem), problem)
    routes = replicas(problem).routes.copy()
    whole = replace(replicas(problem), routes=routes)
    for changed in (plan, replace(plan, spans=((5,), (3,))), packed(plan, 2, "int8"), whole, packed(whole, 2, "int8")):
        for _ in range(2):
            assert step_times(changed, tables).step_s == step_times(changed, CostTables(problem)).step_s
    routes[:] = 0
    assert step_times(whole, tables).step_s == step_times(whole, CostTables(problem)).step_s


@pytest.mark.parametrize("inside", [(), (0,), (1,), (0, 1)])
def test_the_order_of_regions_is_nothing_to_a_sum(inside):
    """One node here and three there, or three here and one there, whichever of them send packed parts inside."""
    card = Link(latency_s=5e-5, bytes_per_s=1e8)
    found = []
    for nodes, packing in (((1, 3), inside), ((3, 1), [1 - region for region in inside])):
        cluster = cluster_of([[("t4", n, 1)] for n in nodes], latency_s=LATENCY_S, bytes_per_s=2e7, between=card)
        problem = Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=12, seq_len=256))
        workers = [Worker(pool=int(d >= nodes[0]), devices=(d,)) for d in range(4)]
        stages = (Stage(first_layer=0, last_layer=problem.model.layers, workers=tuple(workers)),)
        routes = np.arange(12)[:, None] % 4
        plan = Plan(stages=stages, routes=routes, micro_batch_size=1, spans=stage_spans(stages, (4,)))
        plan = packed(plan, 2, "int8")
        more = (replace(plan.links[0], source=region, target=region) for region in packing)
        found.append(step_times(replace(plan, links=(*plan.links, *more)), CostTables(problem)).reductions[0].total_s)
    assert found[0] == pytest.approx(found[1])


@pytest.mark.parametrize("lanes", [2, 4])
def test_senders_on_a_node_share_what_leaves_it(lanes):
    """One pipeline has the link's rate; of so many from one node to another a message takes as many times as long."""
    cluster = cluster_of([[("t4", 1, 4)], [("t4", 1, 4)]], latency_s=LATENCY_S, bytes_per_s=1e8)
    batch = Batch(global_batch=12, seq_len=256)
    problem = Problem(cluster=cluster, model=small_gpt(tied_embeddings=False), batch=batch)

    def busy_s(width):
        cuts = ((0, 0, 4), (1, 4, problem.model.layers))
        stages = tuple(
            Stage(
                first_layer=a, last_layer=b, workers=tuple(Worker(pool=r, devices=(4 * r + d,)) for d in range(width))
            )
            for r, a, b in cuts
        )
        routes = np.repeat(np.arange(12)[:, None] % width, 2, axis=1)
        plan = Plan(stages=stages, routes=routes, micro_batch_size=1, spans=stage_spans(stages, (2 * width, width)))
        messages = step_times(plan, CostTables(problem)).messages
        return messages.busy_s, messages.n_bytes / 1e8

    alone_s, by_rate_s = busy_s(1)
    assert alone_s == pytest.approx(by_rate_s)
    assert busy_s(lanes)[0] == pytest.approx(lanes * alone_s.flat[0])


@given(nodes=st.integers(1, 8), n_bytes=st.floats(1e3, 1e10))
def test_copies_send_their_parts_from_all_nodes_at_once(nodes, n_bytes):
    """Two shard groups on so many nodes each sum as two on one node do with so many times less; one has no copy."""
    cluster = cluster_of([[("a100-40gb", 16, 8), ("a100-40gb", 16, 8)]])
    problem = Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=16, seq_len=512))
    arrays = CostTables(problem).links.arrays(problem.runtime)

    def copies(n, count, nodes):
        ones = np.ones(count, dtype=np.int64)
        return copies_s(n, count, np.arange(count), nodes * ones, ones, np.zeros(1, dtype=np.bool_), arrays)

    assert copies(n_bytes, 2, nodes) == pytest.approx(copies(n_bytes / nodes, 2, 1))
    assert copies(n_bytes, 2, nodes) > copies(n_bytes, 1, nodes) == 0


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_packing_and_unpacking_keep_the_devices_from_computing(mode):
    """Both directions of a pipeline over two regions: each pass is longer by what its worker packs and unpacks."""
    problem = far_problem(2)
    tables, plan = CostTables(problem), in_two(replicas(problem), problem)

    def times(kind):
        packing = {"activations": kind, "activation_gradients": kind, "weight_gradients": "none"}
        links = (LinkUse(source=a, target=1 - a, **packing) for a in (0, 1))
        return step_times(replace(plan, links=tuple(links)), tables)

    plain, found = times("none"), times(mode)
    packing_s = found.messages.codec_s
    assert (plain.messages.codec_s == 0).all() and (packing_s > 0).all()
    assert found.schedule.forward_s == pytest.approx(plain.schedule.forward_s + packing_s[0])
    assert found.schedule.backward_s == pytest.approx(plain.schedule.backward_s + packing_s[1])


@pytest.mark.parametrize(
    ("mode", "more", "n_bytes"),
    [
        ("none", {}, 4 * 2**20),
        ("bf16", {}, 2 * 2**20),
        ("int8", {}, 2**20),
        ("topk", {}, 0.05 * 2**20 * (4 + 2)),
        ("powersgd", {}, 8 * (1024 + 1024) * 4),
        ("powersgd", {"matrix_values": 2**10}, 2**10 * 8 * (32 + 32) * 4),
        ("powersgd", {"width": 2**12}, 8 * (256 + 4096) * 4),
        ("powersgd", {"width": 2**19}, 4 * 2**20),  # two rows: their factors would be longer
    ],
)
def test_bytes_of_packed_numbers_by_hand(mode, more, n_bytes):
    """Of 2^20 numbers of four bytes; scales of int8 take less than two in a hundred."""
    assert packed_bytes(2**20, 4, mode, **more) == pytest.approx(n_bytes, rel=0.02 if mode == "int8" else 1e-12)


def test_what_is_the_tensor_itself_is_not_packed():
    """bf16 of a 2-byte tensor costs no time; of a 4-byte one, and any other packing of either, does both ways."""
    assert codec_s(1e6, 2, "bf16", 1e12) == codec_s(1e6, 2, "none", 1e12) == codec_s(1e6, 4, "none", 1e12) == (0, 0)
    for element_bytes, mode in ((4, "bf16"), (4, "int8"), (2, "int8")):
        pack_s, unpack_s = codec_s(1e6, element_bytes, mode, 1e12)
        assert 1e-6 < unpack_s < pack_s < 1e-3  # from one byte a number to a thousand
        assert codec_s(6e6, element_bytes, mode, 2e12) == pytest.approx((3 * pack_s, 3 * unpack_s))
        fed_back_s, same_s = codec_s(1e6, element_bytes, mode, 1e12, feedback=True)
        assert fed_back_s > pack_s and same_s == unpack_s


WAYS = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=6).map(
    lambda pairs: [list(way) for way in zip(*pairs, strict=True)]
)


@given(sent_s=WAYS)
def test_messages_that_follow_one_another_are_waited_for_one_by_one(sent_s):
    """A stage with one neighbour waits for its one message either way; one with two for the longer, or for both."""
    both, longer = (waiting_s(np.array(sent_s), apart=apart, interleaved=True) for apart in (True, False))
    assert np.isclose(both.sum(), 2 * sum(map(sum, sent_s)))
    for way in range(2):
        assert both[way, 0] == longer[way, 0] == sent_s[way][0] and both[way, -1] == longer[way, -1] == sent_s[way][-1]
        assert longer[way, 1:-1].tolist() == [max(pair) for pair in pairwise(sent_s[way])]
    assert (longer <= both).all() and (both <= 2 * longer).all()


@given(sent_s=WAYS)
def test_in_1f1b_a_stage_exchanges_once_with_each_neighbour(sent_s):
    """Per micro-batch: with the next behind its forward, with the one before behind its backward, both ways at once."""
    found = waiting_s(np.array(sent_s), apart=False, interleaved=False)
    exchange_s = [max(down_s, up_s) for down_s, up_s in zip(*sent_s, strict=True)]
    assert found[0].tolist() == [*exchange_s, 0.0] and found[1].tolist() == [0.0, *exchange_s]


def blocking_1f1b_s(forward_s, backward_s, sent_s, micro_batches):
    """When the last of some stages ends that send and receive as Megatron-LM's pipelines do: who comes to an exchange
    waits for the other side, and both go on when the longer of its messages is there."""
    stages = len(forward_s)
    meetings = {}  # by both sides: what each of them exchanges, in turn
    scripts = []
    for s in range(stages):
        warm = min(stages - 1 - s, micro_batches)
        steps = []
        for _ in range(warm):
            steps += [("up", 1), ("F", 0), ("down", 1)]
        rest = micro_batches - warm
        if rest:
            steps.append(("up", 1))
        for i in range(rest):
            steps += [("F", 0), ("down", 2), ("B", 0), ("up", 2 if i + 1 < rest else 1)]
        for _ in range(warm):
            steps += [("down", 1), ("B", 0), ("up", 1)]
        scripts.append(steps)
    clock, at = [0.0] * stages, [0] * stages
    while any(a < len(script) for a, script in zip(at, scripts, strict=True)):
        for s in range(stages):
            while at[s] < len(scripts[s]):
                what = scripts[s][at[s]][0]
                if what in "FB":
                    clock[s] += forward_s[s] if what == "F" else backward_s[s]
                elif (what == "up" and s > 0) or (what == "down" and s + 1 < stages):
                    link = s - 1 if what == "up" else s
                    other = s - 1 if what == "up" else s + 1
                    came = meetings.setdefault(link, {})
                    if other not in came:
                        came[s] = clock[s]
                        break
                    clock[s] = clock[other] = max(clock[s], came.pop(other)) + sent_s[link]
                    at[other] += 1
                at[s] += 1
    return max(clock)


@pytest.mark.parametrize("sent_s", [(1.0, 1.0, 1.0), (0.1, 3.0, 0.1), (0.1, 0.1, 3.0), (3.0, 0.2, 1.0)])
def test_a_pipeline_over_unequal_links_takes_as_long_as_one_that_blocks(sent_s):
    """Stages that meet for every exchange, played message by message: within 2 % where there are many micro-batches."""
    forward_s, backward_s, count = np.full(4, 0.7), np.full(4, 1.3), 200
    waits_s = waiting_s(np.array([sent_s, sent_s]), apart=False, interleaved=False)
    windows = np.arange(4, 0, -1)
    found = plain_step_s(forward_s + waits_s[0], backward_s + waits_s[1], np.zeros(4), windows, count)
    assert found == pytest.approx(blocking_1f1b_s(forward_s, backward_s, sent_s, count), rel=0.02)


GROUPED = Runtime(p2p_overlap=True, exchanges_apart=True)


def of_two_regions(runtime):
    """A pipeline over two regions with this runtime."""
    problem = replace(far_problem(2), runtime=runtime)
    return step_times(in_two(replicas(problem), problem), CostTables(problem))


@settings(deadline=None, max_examples=cases(10))
@given(part=st.floats(0.05, 1.5))
def test_what_no_buffer_takes_of_a_message_stops_both_its_ends(part):
    """Of b seconds on a link with latency a, buffers that take a part p leave b (1 - p) - a, and no less than nothing:
    so much more does each of two stages take in forward and in backward."""
    free = of_two_regions(GROUPED)
    n_bytes, busy_s = free.messages.n_bytes.max(), free.messages.busy_s.max()
    kept = of_two_regions(replace(GROUPED, p2p_buffer_bytes=part * n_bytes))
    left_s = max(0.0, busy_s * (1 - part) - LATENCY_S)
    for name in ("forward_s", "backward_s"):
        assert getattr(kept.schedule, name) - getattr(free.schedule, name) == pytest.approx(left_s)
    assert np.array_equal(kept.schedule.hold_s, free.schedule.hold_s)
    assert free.step_s <= kept.step_s + 1e-9


def test_who_does_not_compute_while_it_sends_has_no_use_for_buffers():
    """It waits for the whole message, whatever they take; who does and has none that count waits for nothing."""
    times = of_two_regions(GROUPED)
    assert seen_s(times.messages, GROUPED) is None
    alone = replace(GROUPED, p2p_overlap=False, p2p_buffer_bytes=1e9)
    assert np.array_equal(seen_s(times.messages, alone), times.messages.busy_s + times.messages.latency_s)


def test_a_host_makes_a_buffer_for_every_message_received():
    """Of 4 bytes a number, for activations before the forward of all stages but the first, and for their gradients
    before the backward of all but the last."""
    free, kept = (of_two_regions(replace(GROUPED, host_buffer_bytes_per_s=rate)) for rate in (0.0, 1e9))
    made_s = 4 * 256 * far_problem(2).model.hidden_size / 1e9
    assert kept.schedule.forward_s - free.schedule.forward_s == pytest.approx([0, made_s])
    assert kept.schedule.backward_s - free.schedule.backward_s == pytest.approx([made_s, 0])


def on_t4(**nodes):
    """A small model on some nodes of T4."""
    between = Link(latency_s=5e-5, bytes_per_s=1e9)
    return equal_nodes(
        small_gpt(), Batch(global_batch=4, seq_len=256), catalogue.device("t4"), between=between, **nodes
    )


@pytest.mark.parametrize("gathers", [1, 2])
def test_ranks_put_together_what_they_were_sent_in_parts(gathers):
    """One gather before the forward of the second stage, so many before the backward of the first; with a device a
    worker there is nothing to put together."""
    cluster = on_t4(nodes=1, per_node=4)
    for tp, seen in ((2, 1.0), (1, 0.0)):
        config = ParallelConfig(dp=1, tp=tp, pp=2)
        times = []
        for runtime in (GROUPED, replace(GROUPED, message_gathers=gathers)):
            problem = replace(cluster, runtime=runtime)
            times.append(step_times(uniform_plan(problem, config), CostTables(problem)).schedule)
        free, kept = times
        group = group_of(cluster.cluster.pools[0], tp, tp)
        gather = seen * gather_s(256 * cluster.model.hidden_size * cluster.batch.element_bytes, group)
        assert kept.forward_s - free.forward_s == pytest.approx([0, gather])
        assert kept.backward_s - free.backward_s == pytest.approx([gathers * gather, 0])


def test_gradients_may_be_sent_whole_where_activations_are_not():
    """By every rank of a group; inside a node each has a link of its own, between nodes they share a card."""
    for nodes, per_node, times in ((1, 4, 2), (2, 2, 2)):
        problem = on_t4(nodes=nodes, per_node=per_node)
        cut, whole = (
            step_times(uniform_plan(asked, ParallelConfig(dp=1, tp=2, pp=2)), CostTables(asked)).messages.n_bytes
            for asked in (replace(problem, runtime=Runtime(scattered_gradients=cuts)) for cuts in (True, False))
        )
        assert whole[0] == pytest.approx(cut[0])
        assert whole[1] == pytest.approx(times * cut[1])


@pytest.mark.parametrize(("runtime", "gradients"), [(Runtime(), 1), (Runtime(scattered_gradients=False), 2)])
def test_stages_on_one_node_send_as_much_as_stages_on_two(runtime, gradients):
    """Each of two devices sends its half on a link of its own, or all of what is not cut: counted once, or twice."""
    for nodes, per_node in ((1, 4), (2, 2)):
        problem = replace(on_t4(nodes=nodes, per_node=per_node), runtime=runtime)
        plan = uniform_plan(problem, ParallelConfig(dp=1, tp=2, pp=2))
        values = 256 * problem.model.hidden_size * problem.batch.element_bytes
        expected = plan.micro_batches * values * (1 + gradients)
        assert step_times(plan, CostTables(problem)).messages.total_bytes == pytest.approx(expected)
