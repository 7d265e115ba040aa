"""Laws of the compute model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.cost.blocks import CHECKPOINT_HOST_PART, HOST_ERROR
from polygon.cost.compute import (
    HOST_COPY_BYTES_PER_S,
    HOST_MEMORY_BYTES_PER_S,
    layer_times,
    model_flops_per_step,
    update_s,
)
from polygon.cost.kernels import EAGER_HOST_S, EFFICIENCY, LAUNCH_S, attention_s, delta_rule_s, gemm_s, silicon
from polygon.cost.memory import layer_memory
from polygon.cost.network import FABRIC_EFFICIENCY, RING_STEP_S, Group
from polygon.cost.tables import CostTables
from polygon.domain.block import LinearAttention
from polygon.domain.cluster import Device, Link
from polygon.domain.errors import InputError
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Problem
from polygon.domain.runtime import POLYGON, Runtime
from polygon.formats import catalogue
from tests.nightly import cases
from tests.small_problems import small_cluster

A100 = Device(
    name="A100",
    memory_bytes=80e9,
    flops={"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12},
    memory_bytes_per_s=2.039e12,
    power_w=400,
    architecture="Ampere",
)
NVLINK = Link(latency_s=2e-6, bytes_per_s=300e9)


@given(
    shape=st.tuples(*[st.integers(1, 20_000)] * 3),
    name=st.sampled_from(["h200", "h100-sxm", "a100-80gb", "t4", "mi300x", "b200"]),
    factor=st.floats(0.5, 2.0),
)
@settings(max_examples=cases(200), deadline=None)
def test_another_clock_changes_no_more_than_itself(shape, name, factor):
    """The chip has its multiprocessors at any clock: with bandwidth to match all but the launch is in proportion."""
    device = catalogue.device(name)
    before, after = (gemm_s(silicon(one, "fp16"), *shape) for one in (device, device.at_speed(factor)))
    launch = silicon(device, "fp16").efficiency.launch_s
    assert after - launch == pytest.approx((before - launch) / factor, rel=1e-9)


def gpt(blocks: int = 4, hidden: int = 1024, **changes: object) -> Model:
    shape: dict[str, object] = {
        "name": "g",
        "blocks": blocks,
        "hidden_size": hidden,
        "heads": hidden // 64,
        "kv_heads": hidden // 64,
        "head_dim": 64,
        "ffn_size": 4 * hidden,
        "vocab_size": 51200,
        "max_seq_len": 65536,
    }
    return Model(**{**shape, **changes})  # type: ignore[arg-type]


@settings(deadline=None, max_examples=cases(40))
@given(size=st.integers(1, 8), tp=st.sampled_from([1, 2, 4, 8]), recompute=st.sampled_from(["none", "full"]))
def test_never_faster_than_the_peak(size: int, tp: int, recompute: str):
    """All layers together take at least the model's FLOP at the data sheet's peak."""
    model, batch = gpt(), Batch(global_batch=size, seq_len=2048)
    times = layer_times(model, batch, A100, NVLINK, tp=tp, micro_batch_size=size, recompute=recompute)
    assert times.forward_s.shape == times.backward_s.shape == (model.layers,)
    floor_s = model_flops_per_step(model, batch) / (tp * 312e12)
    assert times.forward_s.sum() + times.backward_s.sum() > floor_s


@settings(deadline=None, max_examples=cases(40))
@given(gbps=st.floats(10, 1000), factor=st.floats(1, 10), tp=st.sampled_from([2, 4, 8]))
def test_more_bandwidth_is_never_slower(gbps: float, factor: float, tp: int):
    """A faster link inside the node never makes a layer slower."""
    model, batch = gpt(), Batch(global_batch=1, seq_len=2048)
    slow, fast = (
        layer_times(model, batch, A100, Link(latency_s=2e-6, bytes_per_s=rate), tp=tp)
        for rate in (gbps * 1e9, gbps * factor * 1e9)
    )
    assert (fast.forward_s <= slow.forward_s * (1 + 1e-9)).all()
    assert (fast.backward_s <= slow.backward_s * (1 + 1e-9)).all()


def test_flops_of_gpt3():
    """72 B s l h^2 (1 + s/12h + V/12lh) for causal attention counted by half (6h when counted in full)."""
    model = gpt(96, 12288, heads=96, kv_heads=96, head_dim=128)
    batch = Batch(global_batch=4, seq_len=2048)
    expected = 72 * 4 * 2048 * 96 * 12288**2 * (1 + 2048 / (12 * 12288) + 51200 / (12 * 96 * 12288))
    assert model_flops_per_step(model, batch) == pytest.approx(expected)


def test_flops_of_linear_attention():
    """Per token two for each weight that it meets and six for each number of the state: written, read, corrected."""
    state = LinearAttention(key_heads=4, value_heads=8, key_dim=32, value_dim=64)
    model = gpt(linear=state, attention_pattern=("linear",))
    keys, values = 4 * 32, 8 * 64
    mixing = 1024 * (2 * keys + 2 * values) + 1024 * 2 * 8 + values * 1024
    block = 2 * (mixing + 2 * 1024 * 4096) + 6 * 8 * 32 * 64
    expected = 3 * 512 * (4 * block + 2 * 1024 * 51200)
    assert model_flops_per_step(model, Batch(global_batch=1, seq_len=512)) == pytest.approx(expected)


def test_dropout_and_determinism_slow_fused_attention_by_what_is_published():
    """Of fused attention's f and b seconds: dropout adds f / 4 and b / 2, determinism 0.3 b, both 0.95 b."""

    def seconds(**switches: bool) -> tuple[float, float]:
        times = layer_times(
            gpt(), Batch(global_batch=1, seq_len=32768), A100, NVLINK, runtime=Runtime(attention="flash2", **switches)
        )
        return times.forward_s[1], times.backward_s[1]

    forward_s, backward_s = seconds()
    dropped, fixed = seconds(attention_dropout=True), seconds(deterministic=True)
    both = seconds(attention_dropout=True, deterministic=True)
    attention_s = (fixed[1] - backward_s) / 0.3
    assert 0.3 * backward_s < attention_s < backward_s
    assert fixed[0] == forward_s and both[0] == dropped[0]
    assert dropped[1] - backward_s == pytest.approx(0.5 * attention_s)
    assert both[1] - backward_s == pytest.approx(0.95 * attention_s)
    # 2 tokens seq_len heads head_dim FLOP forward, two and a half times that backward.
    flops = 2 * 32768**2 * 1024
    assert attention_s > 2.5 * flops / 312e12
    assert (dropped[0] - forward_s) / 0.25 > flops / 312e12


def test_the_embedding_moves_bytes():
    """On a slow memory its backward takes to its forward as the accesses of an element: eight to five."""
    slow = replace(A100, memory_bytes_per_s=A100.memory_bytes_per_s / 100)
    times = layer_times(gpt(), Batch(global_batch=1, seq_len=65536), slow, NVLINK)
    assert times.backward_s[0] / times.forward_s[0] == pytest.approx(8 / 5, rel=1e-3)


def test_an_eager_softmax_passes_over_scores_more_often():
    """Where scores are most of what a slow memory moves, backward takes 16 / 9 of a fused one's; forward as long."""
    slow = replace(A100, memory_bytes_per_s=A100.memory_bytes_per_s / 100)
    batch = Batch(global_batch=1, seq_len=65536)
    eager, fused = (
        layer_times(gpt(), batch, slow, NVLINK, runtime=Runtime(attention="materialised", fused=fused))
        for fused in (False, True)
    )
    assert eager.backward_s[1] / fused.backward_s[1] == pytest.approx(16 / 9, rel=0.02)
    assert eager.forward_s[1] / fused.forward_s[1] == pytest.approx(1, rel=0.02)


def test_optimizer_is_memory_bound():
    """30 bytes a parameter at 70-100 % of the memory bandwidth."""
    seconds = update_s(1e9, A100, Batch(global_batch=1, seq_len=128))
    assert 30e9 / 2.039e12 < seconds < 30e9 / 2.039e12 / 0.7


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_host_updates_in_its_own_memory_and_copies_both_ways(precision):
    """Gradients in 4 bytes there, weights in their own width back; what the device would pass over, at a host's rate;
    whatever the device."""
    batch, slow = Batch(global_batch=1, seq_len=128, precision=precision), replace(A100, memory_bytes_per_s=1e11)
    seconds = update_s(1e9, A100, batch, by_host=True)
    assert seconds == update_s(1e9, slow, batch, by_host=True)
    passes = update_s(1e9, A100, batch) * A100.memory_bytes_per_s * EFFICIENCY["ampere"].memory
    copies = (4 + batch.element_bytes) * 1e9 / HOST_COPY_BYTES_PER_S
    assert seconds == pytest.approx(copies + passes / HOST_MEMORY_BYTES_PER_S, rel=1e-3)


def test_tokens_for_experts_of_the_same_node_stay_off_the_network():
    """Over two nodes half of the tokens cross; the slower of the two ways decides, not the sum at the slower rate."""
    moe = catalogue.model("mixtral-8x7b")
    batch = Batch(global_batch=8, seq_len=4096, precision="bf16")
    fabric, network = Link(latency_s=0.0, bytes_per_s=400e9), Link(latency_s=0.0, bytes_per_s=400e9)

    def exposed(per_node: int) -> float:
        group = Group(members=8, per_node=per_node, devices_per_node=8, intra_node=fabric, inter_node=network)
        return layer_times(moe, batch, A100, fabric, ep=8, ep_group=group).communication_s[1]

    inside, two, eight = exposed(8), exposed(4), exposed(1)
    assert two / eight == pytest.approx(4 / 7, rel=0.05)  # four and seven of eight messages over a card of 50 GB/s
    assert 0.2 * two < inside < 0.3 * two  # seven messages over a fabric eight times as fast


EIGHT_NODES = Group(
    members=64, per_node=8, devices_per_node=8, intra_node=Link(latency_s=0.0, bytes_per_s=1e15),
    inter_node=Link(latency_s=0.0, bytes_per_s=400e9),
)  # fmt: skip


def over_nodes(model, runtime, group=EIGHT_NODES, precision="bf16", recompute="none"):
    """Seconds of a block with experts on A100, forward, backward and of both what is exposed."""
    batch = Batch(global_batch=8, seq_len=4096, precision=precision)
    times = layer_times(
        model, batch, A100, group.intra_node, ep=group.members, ep_group=group, runtime=runtime, recompute=recompute
    )
    return times.forward_s[5], times.backward_s[5], times.communication_s[5]


@pytest.mark.parametrize(("groups", "most"), [(1, 8), (8, 4), (8, 1), (4, 1)])
def test_a_token_crosses_once_to_each_node_of_its_experts(groups, most):
    """The time is that of as many crossings as drawn routings have: k experts at random, of few groups of nodes."""
    model = replace(catalogue.model("deepseek-v3"), expert_groups=groups, groups_per_token=min(most, groups))
    runtime = Runtime(expert_dispatch="nodes")
    rng = np.random.default_rng(0)
    nodes, k, crossings = 8, model.experts_per_token, []
    for own in rng.integers(0, nodes, 4000):
        # Which nodes a token may go to at all: those of its groups, each of which lies on nodes / groups of them.
        allowed = (
            np.arange(nodes).reshape(groups, -1)[rng.choice(groups, model.groups_per_token, replace=False)].ravel()
        )
        chosen = set(rng.choice(allowed, k).tolist())  # of 32 experts a node hardly one is drawn twice
        crossings.append(len(chosen - {own}))
    token = 4096 * model.hidden_size * 2
    exposed = over_nodes(model, runtime)[2]
    # One step over the cards and one inside of the node, there and back, forward and backward.
    expected = 4 * (np.mean(crossings) * token / 50e9 / FABRIC_EFFICIENCY + 2 * RING_STEP_S)
    assert exposed == pytest.approx(expected, rel=0.03)
    assert exposed < over_nodes(model, Runtime())[2]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_experts_whose_rows_are_no_whole_vectors_are_padded(precision):
    """4096 tokens of 64 devices to 8 of 384 experts are 5461 1/3 rows each: within 2 % of what 5464 take."""
    odd, even = (replace(catalogue.model("kimi-k2"), experts=experts) for experts in (384, 256))
    h100 = catalogue.device("h100-sxm")
    batch, link = Batch(global_batch=8, seq_len=4096, precision=precision), EIGHT_NODES.intra_node

    def backward_s(model: Model) -> float:
        runtime = Runtime(graphs="step")
        return layer_times(model, batch, h100, link, ep=64, ep_group=EIGHT_NODES, runtime=runtime).backward_s[5]

    # As many rows in all, of six experts a device or of four.
    assert backward_s(odd) == pytest.approx(backward_s(even), rel=0.05)


@pytest.mark.parametrize("seq_len", [197, 333])
def test_a_number_of_tokens_that_is_no_whole_vector_costs_no_more_than_the_next(seq_len: int):
    """A weight's gradient sums over them."""
    odd, even = (
        layer_times(
            gpt(), Batch(global_batch=1, seq_len=length), A100, EIGHT_NODES.intra_node, runtime=Runtime(graphs="step")
        ).backward_s[1]
        for length in (seq_len, -(-seq_len // 8) * 8)
    )
    assert odd <= even


def test_biases_of_experts_are_added_by_kernels_of_their_own():
    """Of gpt-oss's four experts a token, 2,880 numbers each: 24 bytes a number in forward, 40 in backward, 16 and 20
    more for the limits of what the activation takes; each of 128 experts launches two and five kernels. Fused products
    do none of it, nor do they write what the activation takes and gives."""
    oss = catalogue.model("gpt-oss-120b")
    card, batch = catalogue.device("h100-sxm"), Batch(global_batch=8, seq_len=4096)

    def seconds(bias: bool, **switches: bool) -> np.ndarray:
        model, runtime = replace(oss, linear_bias=bias), Runtime(**switches)
        times = layer_times(model, batch, card, NVLINK, micro_batch_size=8, runtime=runtime)
        return np.array([times.forward_s[1], times.backward_s[1]])

    numbers = 8 * 4096 * oss.experts_per_token * oss.hidden_size
    assert oss.expert_ffn_size == oss.hidden_size
    rate = card.memory_bytes_per_s * EFFICIENCY["hopper"].memory
    biased, plain = seconds(True), seconds(False)
    launches_s = 128 * LAUNCH_S * np.array([2, 5])
    assert biased - plain == pytest.approx(np.array([40, 60]) * numbers / rate + launches_s, rel=1e-3)
    fused = seconds(True, fused_experts=True)
    # Three numbers of the width pass in forward; of six in backward two are read still.
    assert plain - fused == pytest.approx(2 * np.array([3, 4]) * numbers / rate, rel=1e-3)
    assert fused == pytest.approx(seconds(False, fused_experts=True), rel=1e-12)


@pytest.mark.parametrize(
    ("ep", "experts", "dispatch", "sorted_again"),
    [
        (8, 64, "experts", True),
        (8, 64, "nodes", False),
        (64, 64, "experts", False),  # one a device: as they arrive
        (1, 64, "experts", False),
    ],
)
def test_tokens_of_many_ranks_are_sorted_by_expert_where_they_arrive(ep, experts, dispatch, sorted_again):
    """Read and written, and back the same way: four passes over all that a device's tokens send, each way."""
    model = replace(catalogue.model("qwen3-30b-a3b"), experts=experts)
    card, batch = catalogue.device("h100-sxm"), Batch(global_batch=8, seq_len=4096)

    def seconds(sorts: bool) -> np.ndarray:
        runtime = Runtime(expert_dispatch=dispatch, sorts_arrivals=sorts, graphs="step")
        times = layer_times(model, batch, card, NVLINK, micro_batch_size=2, ep=ep, runtime=runtime)
        return np.array([times.forward_s[1], times.backward_s[1]])

    sent_bytes = 2 * 2 * 4096 * model.experts_per_token * model.hidden_size
    rate = card.memory_bytes_per_s * EFFICIENCY["hopper"].memory
    expected = 4 * sent_bytes / rate if sorted_again else 0.0
    assert seconds(True) - seconds(False) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_norms_and_the_activation_of_experts_are_computed_once_more():
    """Of a block of Qwen3-30B: 2 x 2 passes over 2,048 numbers and three over 8 x 768, in fewer bytes held."""
    model, runtime = catalogue.model("qwen3-30b-a3b"), Runtime(selective="norms", graphs="step")
    card, batch = catalogue.device("h100-sxm"), Batch(global_batch=8, seq_len=4096)

    def seconds(recompute: str) -> np.ndarray:
        times = layer_times(model, batch, card, NVLINK, recompute=recompute, runtime=runtime)
        return np.array([times.forward_s[1], times.backward_s[1]])

    again = seconds("selective") - seconds("none")
    rate = card.memory_bytes_per_s * EFFICIENCY["hopper"].memory
    assert again[0] == 0
    assert again[1] == pytest.approx(2 * 4096 * (4 * 2048 + 3 * 8 * 768) / rate + 3 * LAUNCH_S, rel=1e-9)
    kept, dropped = (
        layer_memory(model, batch, recompute=recompute, runtime=runtime) for recompute in ("none", "selective")
    )
    # What either norm gives, and one of three numbers of the width.
    saved_bytes = 2 * 4096 * (2 * 2048 + 8 * 768)
    assert kept.activation_bytes[1] - dropped.activation_bytes[1] == pytest.approx(saved_bytes, rel=1e-9)
    assert dropped.transient_bytes[1] == kept.transient_bytes[1]


@pytest.mark.parametrize(
    ("switches", "forward_bytes", "backward_bytes", "kept_bytes"),
    [
        ({"norms": "fused", "positions": "fused"}, 0, 0, 0),
        ({"norms": "copies", "positions": "fused"}, 2 * 8 * 4096, 2 * 10 * 4096, 2 * (4 - 2) * 4096),
        ({"norms": "operations", "positions": "fused"}, 2 * 28 * 4096, 2 * 40 * 4096, 2 * (8 - 2) * 4096),
        ({"norms": "fused", "positions": "operations"}, 16 * 8192, 16 * 8192, 0),
    ],
)
def test_what_norms_and_positions_move_and_keep(switches, forward_bytes, backward_bytes, kept_bytes):
    """Of a block of Llama-7B with 32 heads, by token, over one whose norms and positions are a kernel each; and what an
    eager program does where the switches do not say."""
    model, batch, card = (
        catalogue.model("llama2-7b"),
        Batch(global_batch=8, seq_len=2048),
        catalogue.device("a100-80gb"),
    )

    def of(**switches: Any) -> tuple[np.ndarray, float]:
        runtime = Runtime(fused=False, graphs="step", **switches)
        times = layer_times(model, batch, card, NVLINK, runtime=runtime)
        held = layer_memory(model, batch, runtime=runtime).activation_bytes[1]
        return np.array([times.forward_s[1], times.backward_s[1]]), float(held)

    rate = card.memory_bytes_per_s * EFFICIENCY["ampere"].memory
    (seconds, held), (least, least_held) = of(**switches), of(norms="fused", positions="fused")
    assert seconds - least == pytest.approx(
        np.array([forward_bytes, backward_bytes]) * 2048 / rate, rel=1e-6, abs=1e-12
    )
    assert held - least_held == pytest.approx(kept_bytes * 2048, rel=1e-9)
    eager, told = of(), of(norms="operations", positions="operations")
    assert (eager[0].tolist(), eager[1]) == (told[0].tolist(), told[1])


def test_graphs_take_launches_from_the_host():
    """Of the router first; of the whole step then, which waits for nobody: small blocks gain, dense ones too."""
    moe = replace(catalogue.model("qwen3-30b-a3b"), hidden_size=256)
    none, routing, step = (sum(over_nodes(moe, Runtime(graphs=graphs))[:2]) for graphs in ("none", "routing", "step"))
    waits_s = sum(EAGER_HOST_S)
    assert none - routing == pytest.approx(waits_s / 4, rel=1e-6)
    assert step < routing - waits_s / 4 + 1e-9
    dense = gpt(hidden=256)
    batch = Batch(global_batch=1, seq_len=128)
    eager, whole = (
        layer_times(dense, batch, A100, EIGHT_NODES.intra_node, runtime=Runtime(graphs=graphs)).forward_s[1]
        for graphs in ("none", "step")
    )
    assert whole < eager / 3


def test_tokens_go_in_8_bits_where_products_are():
    """There in half the bytes, back in all of them; without such products nothing changes."""
    model = catalogue.model("deepseek-v3")
    h100 = catalogue.devices()["h100-sxm"]
    batch = Batch(global_batch=8, seq_len=4096, precision="fp8")

    def exposed(narrow: bool) -> float:
        runtime = Runtime(expert_dispatch="nodes", narrow_dispatch=narrow)
        link = EIGHT_NODES.intra_node
        return layer_times(model, batch, h100, link, ep=64, ep_group=EIGHT_NODES, runtime=runtime).communication_s[5]

    assert exposed(True) == pytest.approx(0.75 * exposed(False), rel=0.02)
    narrow, wide = (over_nodes(model, Runtime(narrow_dispatch=on)) for on in (True, False))
    assert narrow == wide


def test_a_device_without_8_bit_products_makes_16_bit_ones():
    """fp8 is for those that have it; beside them an older device computes as in bf16."""
    model, link = catalogue.model("llama3-8b"), EIGHT_NODES.intra_node

    def seconds(device: str, precision: str) -> float:
        batch = Batch(global_batch=8, seq_len=4096, precision=precision)
        return layer_times(model, batch, catalogue.device(device), link).forward_s[1]

    assert seconds("a100-80gb", "fp8") == seconds("a100-80gb", "bf16")
    assert seconds("h100-sxm", "fp8") < 0.9 * seconds("h100-sxm", "bf16")


@pytest.mark.parametrize(("given", "precision"), [("bf16", "bf16"), ("fp16", "bf16"), ("bf16", "fp16")])
def test_a_card_that_gives_one_16_bit_peak_computes_everything_at_it(given, precision):
    """Products and attention alike, whichever of both formats the data sheet names."""
    both = replace(A100, flops={"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12})
    one = replace(A100, flops={"fp32": 19.5e12, given: 312e12})
    batch = Batch(global_batch=8, seq_len=8192, precision=precision)
    times = [layer_times(gpt(), batch, card, NVLINK, micro_batch_size=2) for card in (one, both)]
    np.testing.assert_array_equal(times[0].forward_s, times[1].forward_s)
    np.testing.assert_array_equal(times[0].backward_s, times[1].backward_s)


def test_a_processor_slow_in_16_bits_attends_in_32_at_its_own_rate():
    """Attention is computed in the precision of the batch."""
    assert silicon(catalogue.device("cpu-core"), "fp32").peak_flops_16 == catalogue.device("cpu-core").flops["fp32"]


def test_casts_by_kernels_of_their_own_cost_more():
    """As an H200 took for a block of GPT-3 1.3B by them: 4.2 ms, where one kernel does it in 0.7."""
    model, link, h200 = catalogue.model("gpt3-1.3b"), EIGHT_NODES.intra_node, catalogue.device("h200")
    batch = Batch(global_batch=8, seq_len=2048, precision="fp8")

    def seconds(casts: str) -> float:
        runtime = Runtime(casts=casts, cached_casts=True)
        times = layer_times(model, batch, h200, link, micro_batch_size=8, runtime=runtime)
        return times.forward_s[1] + times.backward_s[1]

    assert seconds("apart") - seconds("fused") == pytest.approx(3.5e-3, rel=0.1)


def test_parts_of_a_sequence_are_exchanged_by_heads_or_gathered():
    """By heads a device sends 7/8 of queries, keys, values and result, both ways, whatever attention takes; where 12
    heads cannot be shared out by 8, the keys and values of all."""
    device, cp, runtime = catalogue.device("h100-sxm"), 8, Runtime(context="heads")
    link = Link(latency_s=0.0, bytes_per_s=100e9)
    batch = Batch(global_batch=8, seq_len=65536)

    def sent_s(heads: int, kv_heads: int) -> float:
        model = replace(catalogue.model("llama3-8b"), heads=heads, kv_heads=kv_heads, hidden_size=heads * 128)
        return layer_times(model, batch, device, link, cp=cp, cp_link=link, runtime=runtime).communication_s[1]

    own = 65536 / cp * 128 * 2 / (100e9 * FABRIC_EFFICIENCY)
    assert sent_s(32, 8) == pytest.approx(2 * (7 / 8 * (32 + 8) * 2 * own + 14 * RING_STEP_S), rel=1e-6)
    assert sent_s(12, 4) == pytest.approx(2 * (7 * 4 * 2 * own + 7 * RING_STEP_S), rel=1e-6)


def in_a_ring(rate: float, cp: int = 8, **switches: bool):
    """Seconds of a block whose keys and values pass round a ring over links of a rate: forward, backward, exposed."""
    link, batch = Link(latency_s=0.0, bytes_per_s=rate), Batch(global_batch=8, seq_len=65536)
    runtime = Runtime(context="ring", **switches)
    times = layer_times(gpt(), batch, A100, link, cp=cp, cp_link=link, runtime=runtime)
    return np.array([times.forward_s[1], times.backward_s[1], times.communication_s[1]])


def test_a_ring_hides_behind_attention_as_far_as_it_goes():
    """Seven messages of an eighth of keys and values, twice as many in backward. Where attention takes longer, 0.2 of
    them are seen; where they do, all but 0.8 of seven eighths of attention, the eighth being its own keys."""
    sent_s = 7 * (RING_STEP_S + 65536 / 8 * 2 * 1024 * 2 / (600e9 * FABRIC_EFFICIENCY))
    assert in_a_ring(600e9)[2] == pytest.approx(0.2 * 3 * sent_s)
    plain, dropped, fixed = (
        in_a_ring(1e9, **switches) for switches in ({}, {"attention_dropout": True}, {"deterministic": True})
    )
    one = in_a_ring(1e9, cp=1, deterministic=True) - in_a_ring(1e9, cp=1)
    assert one[2] == 0
    # Of an eighth of the queries determinism takes an eighth of what it takes of all, dropout a share that is seen too.
    assert plain[2] - fixed[2] == pytest.approx(0.8 * 7 / 8 * one[1] / 8)
    assert fixed[1] - plain[1] == pytest.approx((1 - 0.8 * 7 / 8) * one[1] / 8)
    forward_s, backward_s = dropped[:2] - plain[:2]
    assert plain[2] - dropped[2] == pytest.approx(0.7 / 0.3 * (forward_s + backward_s))


def test_gathered_keys_are_of_all_heads_and_their_gradients_of_32_bits():
    """Where attention hides all but 0.2, seven of eight parts of keys and values come in forward and in backward; there
    the gradients pass on eight times in twice the bytes, the last beside nothing. With an eighth of the heads of keys
    that is no less, unlike in a ring; and parts are put together in what memory takes for 40 and 59 bytes a number."""
    link, batch = Link(latency_s=0.0, bytes_per_s=600e9), Batch(global_batch=8, seq_len=65536)
    numbers = 65536 / 8 * 1024

    def seconds(context: str, kv_heads: int = 16) -> np.ndarray:
        model, runtime = replace(gpt(), kv_heads=kv_heads), Runtime(context=context)
        times = layer_times(model, batch, A100, link, cp=8, cp_link=link, runtime=runtime)
        return np.array([times.forward_s[1], times.backward_s[1], times.communication_s[1]])

    assert gpt().heads == 16
    gather_s = 7 * (RING_STEP_S + 2 * numbers * 2 / (600e9 * FABRIC_EFFICIENCY))
    passed_s = RING_STEP_S + 2 * numbers * 4 / (600e9 * FABRIC_EFFICIENCY)
    exposed_s = 0.2 * (2 * gather_s + 7 * passed_s) + passed_s
    all_heads = seconds("gathered")
    assert all_heads[2] == pytest.approx(exposed_s)
    assert seconds("gathered", kv_heads=2)[2] == all_heads[2]
    assert seconds("ring", kv_heads=2)[2] < seconds("ring")[2] / 4
    rate = A100.memory_bytes_per_s * EFFICIENCY["ampere"].memory
    computed = all_heads[:2].sum() - all_heads[2] - (seconds("ring")[:2].sum() - seconds("ring")[2])
    assert computed == pytest.approx(7 * (40 + 59) * numbers / rate)


@pytest.mark.parametrize("tp", [1, 2])
def test_eager_norms_and_positions_pass_through_memory_again(tp: int):
    """RMSNorm as seven fp32 operations moves 28 bytes a number more in forward and 40 in backward than one kernel, and
    complex positions 16 and 16 of queries and keys, which tensor parallelism divides."""
    batch = Batch(global_batch=1, seq_len=32768)

    def seconds(rms_norm: bool, fused: bool) -> np.ndarray:
        model = gpt(kv_heads=4, rms_norm=rms_norm)
        times = layer_times(model, batch, A100, NVLINK, tp=tp, runtime=Runtime(fused=fused))
        return np.array([times.forward_s[1], times.backward_s[1]])

    assert seconds(True, fused=True) == pytest.approx(seconds(False, fused=True))
    norms, turned = 2 * 1024, (1024 + 4 * 64) / tp
    n_bytes = np.array([28 * norms + 16 * turned, 40 * norms + 16 * turned])
    more_s = seconds(True, fused=False) - seconds(False, fused=False)
    assert more_s == pytest.approx(32768 * n_bytes / (0.98 * 2.039e12))


@pytest.mark.parametrize("rate", [400e9, 4e9])
def test_what_hides_behind_compute_slows_it(rate):
    """Beside another micro-batch only the longer of the two counts, and compute takes `contention` longer meanwhile."""
    model = catalogue.model("deepseek-v3")
    group = replace(EIGHT_NODES, inter_node=Link(latency_s=0.0, bytes_per_s=rate))
    forward, backward, exposed = over_nodes(model, Runtime(), group)
    sent = exposed / 2
    forward, backward = forward - sent, backward - sent
    hidden = over_nodes(model, Runtime(ep_overlap=True, contention=0.2), group)
    for alone, got in ((forward, hidden[0]), (backward, hidden[1])):
        assert got == pytest.approx(max(alone, sent) + 0.2 * min(alone, sent))
    assert hidden[2] == pytest.approx(max(0.0, sent - forward) + max(0.0, sent - backward))


def test_of_experts_in_groups_a_token_chooses_few():
    """Groups divide the experts, and a token's are some of them."""
    model = catalogue.model("deepseek-v3")
    assert (model.expert_groups, model.groups_per_token) == (8, 4)
    with pytest.raises(InputError, match="expert_groups: found 7, expected a divisor of experts"):
        replace(model, expert_groups=7)
    with pytest.raises(InputError, match="groups_per_token: found 9"):
        replace(model, groups_per_token=9)


@settings(deadline=None, max_examples=40)
@given(factor=st.floats(1, 5), size=st.integers(1, 16))
def test_a_slower_host_shows_in_small_forwards_alone(factor: float, size: int):
    """A program whose host takes so many times as long has forwards of at least its time, and the same backwards."""
    model, batch = gpt(), Batch(global_batch=size, seq_len=512)
    plain = Runtime(fused=False)
    one, slow = (
        layer_times(model, batch, A100, NVLINK, micro_batch_size=size, runtime=runtime)
        for runtime in (plain, replace(plain, host_forward_factor=factor))
    )
    blocks = slice(1, -1)
    host_s = factor * EAGER_HOST_S[0]
    assert slow.forward_s[blocks] == pytest.approx(np.maximum(one.forward_s[blocks], host_s))
    assert slow.backward_s == pytest.approx(one.backward_s)


@pytest.mark.parametrize(("seq_len", "seen"), [(16, 1.0), (32768, 0.0)])
def test_a_checkpoint_costs_a_busy_host_more_than_a_second_forward(seq_len: int, seen: float):
    """Where the host holds a block up, by a part of what it needs for both passes; where it does not, nothing."""
    batch = Batch(global_batch=1, seq_len=seq_len)
    plain, again = (
        layer_times(gpt(), batch, A100, NVLINK, runtime=Runtime(fused=False), recompute=how) for how in ("none", "full")
    )
    more_s = again.backward_s[1] - plain.backward_s[1] - plain.forward_s[1]
    assert more_s == pytest.approx(seen * CHECKPOINT_HOST_PART * sum(EAGER_HOST_S), abs=1e-9)


@pytest.mark.parametrize("architecture", ["ampere", "hopper", "blackwell"])
def test_a_later_attention_kernel_reaches_more_of_the_peak(architecture):
    """Where all three were fitted to training, or measured: each no slower than the one before, none above the peak."""
    reached = EFFICIENCY[architecture]
    for way in ("forward", "backward"):
        first, second, vendors = (getattr(reached, f"{name}_{way}") for name in ("triton", "flash2", "flash"))
        assert 0 < first < second <= vendors < reached.gemm


def test_a_head_that_tells_classes_of_a_text_multiplies_no_vocabulary():
    """Its FLOP are those of one token a sequence; its weights a dense layer of h and one of so many columns; the
    embedding stays, and is not shared."""
    words, batch = gpt(tied_embeddings=False), Batch(global_batch=1, seq_len=2048)
    told = replace(words, classes=2)
    h, vocabulary = words.hidden_size, words.vocab_size
    assert words.parameters - told.parameters == h * vocabulary - (h * h + h + 2 * h + 2) and told.tied_values == 0
    less = model_flops_per_step(words, batch) - model_flops_per_step(told, batch)
    assert less == pytest.approx(3 * 2 * h * (2048 * vocabulary - h - 2))
    times, without = (layer_times(model, batch, A100, NVLINK) for model in (words, told))
    assert without.forward_s[-1] < 0.1 * times.forward_s[-1] and without.forward_s[:-1] == pytest.approx(
        times.forward_s[:-1]
    )
    held, kept = (layer_memory(model, batch, micro_batch_size=2) for model in (words, told))
    assert kept.transient_bytes[-1] < 0.1 * held.transient_bytes[-1] and kept.tied_parameters == 0
    assert told.special(2048) == {"classes": 2}
    with pytest.raises(InputError, match=r"model\.classes"):
        gpt(classes=2)


def test_attention_of_one_generation_before_gains_nothing_from_a_new_card():
    """FlashAttention-2 knows no unit newer than Ampere's: on a B200 it is as fast as on an H100, within a tenth."""
    work = {"tokens": 4096, "seq_len": 2048, "keys": 1024.0, "heads": 32, "head_dim": 64, "value_dim": 64}
    h100, b200 = (silicon(catalogue.device(name), "bf16") for name in ("h100-sxm", "b200"))
    for old, new in zip(attention_s(h100, "flash2", **work), attention_s(b200, "flash2", **work), strict=True):
        assert new == pytest.approx(old, rel=0.1)


@pytest.mark.parametrize("name", ["mi250x-gcd", "mi300x", "mi355x"])
def test_flash_attention_2_on_amd_is_the_vendors_own(name):
    """Composable Kernel and AOTriton go by that name: no rate of an A100's peak is theirs."""
    work = {"tokens": 4096, "seq_len": 2048, "keys": 1024.0, "heads": 32, "head_dim": 128, "value_dim": 128}
    chip = silicon(catalogue.device(name), "bf16")
    own = attention_s(chip, "flash", **work)
    assert attention_s(chip, "flash2", **work) == attention_s(chip, "triton", **work) == own
    assert all(seconds > 0 for seconds in delta_rule_s(chip, tokens=4096, heads=32, key_dim=128, value_dim=128))
    assert all(old > new for old, new in zip(attention_s(chip, "flash1", **work), own, strict=True))


@pytest.mark.parametrize(("name", "units"), [("mi250x-gcd", 110), ("mi300x", 304), ("mi325x", 304), ("mi355x", 256)])
def test_amds_compute_units_are_those_of_its_data_sheets(name, units):
    assert silicon(catalogue.device(name), "bf16").multiprocessors == units


def test_attention_that_repeats_its_dropout_is_one_generation_older_on_blackwell():
    """cuDNN has no deterministic backward with dropout there, and elsewhere has one; each alone is in its kernel."""
    batch = Batch(global_batch=1, seq_len=8192)

    def backward_s(device: str, attention: str, **switches: bool) -> float:
        runtime = Runtime(attention=attention, **switches)
        return layer_times(gpt(), batch, catalogue.device(device), NVLINK, runtime=runtime).backward_s[1]

    both = {"attention_dropout": True, "deterministic": True}
    assert backward_s("gb200", "flash", **both) == backward_s("gb200", "flash2", **both)
    for switch in both:
        assert backward_s("gb200", "flash", **{switch: True}) < backward_s("gb200", "flash2", **{switch: True})
    assert backward_s("h100-sxm", "flash", **both) < backward_s("h100-sxm", "flash2", **both)


def test_checkpoints_by_operators_gather_the_tokens_parts_anew():
    """They keep what a sum scattered and not what was gathered: half a sum more than a program that keeps all."""
    batch, slow = Batch(global_batch=8, seq_len=2048), Link(latency_s=0.0, bytes_per_s=1e9)

    def backward_s(kept: bool, recompute: str, selective: str) -> float:
        runtime = Runtime(keeps_gathered=kept, selective=selective)
        split = {"tp": 4, "sequence_parallel": True, "recompute": recompute, "runtime": runtime}
        return layer_times(gpt(), batch, A100, slow, **split).backward_s[1]

    assert backward_s(True, "selective", "operators") == backward_s(False, "selective", "operators")
    for recompute, selective in (("none", "operators"), ("selective", "attention")):
        assert backward_s(True, recompute, selective) < 0.9 * backward_s(False, recompute, selective)


def test_the_first_flash_attention_takes_what_its_author_says_of_it():
    """On an A100 30 to 50 % of the peak forward and 25 to 35 % backward (arXiv:2307.08691), launches left out."""
    chip = silicon(A100, "bf16")
    work = {"tokens": 4096, "seq_len": 2048, "keys": 1024.0, "heads": 32, "head_dim": 128, "value_dim": 128}
    forward_s, backward_s = attention_s(chip, "flash1", **work)
    flops = 4096 * 1024 * 32 * 128 * 4.0
    assert 0.30 < flops / forward_s / A100.flops["bf16"] < 0.50
    assert 0.25 < 2.5 * flops / backward_s / A100.flops["bf16"] < 0.35


@pytest.mark.parametrize(("seq_len", "part"), [(16, HOST_ERROR), (8192, 0.0)])
def test_an_unknown_host_widens_what_waits_for_it_alone(seq_len: int, part: float):
    """Of blocks that take as long as the host launches them, both ways, by its own interval; large ones hide it."""
    batch = Batch(global_batch=1, seq_len=seq_len)
    times = layer_times(gpt(), batch, A100, NVLINK, runtime=Runtime(fused=False))
    whole_s = times.forward_s + times.backward_s
    if part:
        assert whole_s[1:-1] == pytest.approx(sum(EAGER_HOST_S))
    assert times.host_error * whole_s.sum() == pytest.approx(part * whole_s[1:-1].sum())


def test_whole_experts_are_not_cut_and_their_tokens_not_gathered():
    """Of eight tensor-parallel devices each has 16 of 128 experts: wider products, and no sum behind the MLP but the
    way to the experts and back, seven eighths of a device's tokens eight times over."""
    model, batch = catalogue.model("qwen3-30b-a3b"), Batch(global_batch=8, seq_len=4096)
    h100, endless = catalogue.device("h100-sxm"), Link(latency_s=0.0, bytes_per_s=1e18)
    link = Link(latency_s=0.0, bytes_per_s=450e9)

    def forward(experts, link, sequence=True):
        runtime = Runtime(experts=experts)
        found = layer_times(model, batch, h100, link, tp=8, sequence_parallel=sequence, runtime=runtime)
        return found.forward_s[1]

    assert forward("whole", endless) < 0.9 * forward("cut", endless)
    assert forward("whole", link, sequence=False) == forward("cut", link, sequence=False)
    attention_sum = forward("cut", link) - forward("cut", endless)
    exchange_s = 2 * (8 * 2048 * 2 * 4096 / 8 * 7 / 8 / 450e9 / FABRIC_EFFICIENCY + 7 * RING_STEP_S)
    exchange_endless_s = 2 * 7 * RING_STEP_S
    sent = forward("whole", link) - forward("whole", endless)
    assert sent == pytest.approx(attention_sum / 2 + exchange_s - exchange_endless_s, rel=0.02)


def test_whole_experts_weigh_what_slices_of_all_do():
    """Routed rows are kept of a device's part of the tokens, not of all."""
    problem = Problem(
        cluster=small_cluster(16), model=catalogue.model("qwen3-30b-a3b"), batch=Batch(global_batch=8, seq_len=512)
    )
    whole = replace(problem, runtime=replace(problem.runtime, experts="whole"))
    cut, whole = (CostTables(one).memory(4, 1, "none", 1, 4, True).layers for one in (problem, whole))
    assert whole.parameters == pytest.approx(cut.parameters)
    assert (whole.activation_bytes[1:-1] < cut.activation_bytes[1:-1]).all()


def test_an_optimizer_beside_passes_of_their_own_is_between_one_kernel_and_many_operations():
    """AdamW reads gradient, weight and two moments and writes three of them (28 bytes); beside it the gradient's norm
    (4), its clipping (8), zeros (4) and a 16-bit copy of the weights (6). As the engine runs it."""
    batch = Batch(global_batch=1, seq_len=128)
    seconds = {way: update_s(1e9, A100, batch, way=way) for way in ("fused", "apart", "operations")}
    assert seconds["fused"] < seconds["apart"] < seconds["operations"]
    passed = (seconds["apart"] - 2 * LAUNCH_S) * A100.memory_bytes_per_s * EFFICIENCY["ampere"].memory
    assert passed == pytest.approx(1e9 * (28 + 4 + 8 + 4 + 6))
    assert POLYGON.update_way == "apart" and Runtime().update_way == "fused"
    assert Runtime(fused=False).update_way == "operations"


def test_experts_one_after_another_wait_for_the_host_where_they_are_small():
    """As many rows and FLOP in four times the experts: grouped products hardly notice, a host that launches each has
    four times to do, and half of it where two devices share the experts. Where rows are many nobody waits."""
    batch, link, device = Batch(global_batch=8, seq_len=2048), EIGHT_NODES.intra_node, catalogue.device("h100-sxm")

    def seconds(experts: int, *, looped: bool, size: int = 1, ep: int = 1) -> tuple[float, float]:
        of = replace(catalogue.model("mixtral-8x7b"), hidden_size=1024, heads=8, kv_heads=8, ffn_size=8 * 3584)
        model = replace(of, experts=experts, experts_per_token=experts // 4, expert_ffn_size=8 * 3584 // experts)
        runtime = Runtime(fused=False, looped_experts=looped)
        times = layer_times(model, batch, device, link, micro_batch_size=size, ep=ep, runtime=runtime)
        return float(times.forward_s[1]), float(times.backward_s[1])

    host = EFFICIENCY["hopper"]
    for part, (kernels, eager_s) in enumerate(((5 / 24, host.host_forward_s), (16 / 70, host.host_backward_s))):
        more = seconds(32, looped=True)[part] - seconds(8, looped=True)[part]
        assert more == pytest.approx(24 * kernels * eager_s, rel=0.1)
        assert seconds(32, looped=False)[part] - seconds(8, looped=False)[part] < 0.1 * more
        halved = seconds(32, looped=True)[part] - seconds(32, looped=True, ep=2)[part]
        assert halved == pytest.approx(16 * kernels * eager_s, rel=0.1)
        large, grouped = (seconds(8, looped=looped, size=64)[part] for looped in (True, False))
        assert large == pytest.approx(grouped, rel=0.05) and large <= grouped


def test_experts_run_as_one_where_torch_has_a_kernel_for_them():
    """In bf16 on Hopper, without biases, whole: then a host adds three gradients an expert in backward, and waits for
    other devices alone. Elsewhere they run one after another."""
    link, mixtral = EIGHT_NODES.intra_node, catalogue.model("mixtral-8x7b")
    small = replace(mixtral, hidden_size=1024, heads=8, kv_heads=8, ffn_size=3584, experts_per_token=2)

    def seconds(experts: int, *, kernel: bool, ep: int = 1, **more: Any) -> tuple[float, float]:
        name, precision = more.get("device", "h100-sxm"), more.get("precision", "bf16")
        model = replace(small, experts=experts, expert_ffn_size=28672 // experts, linear_bias=more.get("bias", False))
        runtime = Runtime(fused=False, looped_experts=True, grouped_experts=kernel)
        batch = Batch(global_batch=8, seq_len=64, precision=precision)
        times = layer_times(
            model, batch, catalogue.device(name), link, micro_batch_size=1, ep=ep, tp=more.get("tp", 1), runtime=runtime
        )
        return float(times.forward_s[1]), float(times.backward_s[1])

    host = EFFICIENCY["hopper"]
    one_by_one, at_once = ([seconds(n, kernel=kernel) for n in (8, 32)] for kernel in (False, True))
    assert one_by_one[1][0] - one_by_one[0][0] == pytest.approx(24 * 5 / 24 * host.host_forward_s, rel=0.1)
    assert at_once[1][0] == pytest.approx(at_once[0][0])
    assert at_once[1][1] - at_once[0][1] == pytest.approx(24 * 3 / 70 * host.host_backward_s, rel=0.01)
    # What the host does for experts after it knows how many rows come is hidden behind nothing.
    asked, alone = (seconds(8, kernel=True, ep=ep)[0] for ep in (2, 1))
    assert asked >= alone
    for elsewhere in ({"device": "a100-80gb"}, {"precision": "fp8"}, {"precision": "fp16"}, {"bias": True}, {"tp": 2}):
        assert seconds(8, kernel=True, **elsewhere) == seconds(8, kernel=False, **elsewhere)


def test_a_host_that_is_ahead_of_experts_is_so_of_the_rest_of_the_block():
    """Forward ends at the device's pace where experts take it longer than all launches do, though attention alone takes
    less than its own; an unknown host then widens nothing."""
    batch, link, device = Batch(global_batch=8, seq_len=512), EIGHT_NODES.intra_node, catalogue.device("h100-sxm")
    model = replace(catalogue.model("mixtral-8x7b"), hidden_size=1024, heads=8, kv_heads=8, expert_ffn_size=32768)
    times = {}
    for slower in (1.0, 1.3):
        runtime = Runtime(fused=False, looped_experts=True, host_forward_factor=slower)
        times[slower] = layer_times(model, batch, device, link, micro_batch_size=16, runtime=runtime)
    assert times[1.0].forward_s[1] == times[1.3].forward_s[1]
    attention = layer_times(replace(model, experts=0, ffn_size=1), batch, device, link, micro_batch_size=16)
    assert attention.forward_s[1] < EFFICIENCY["hopper"].host_forward_s


def test_masks_of_windows_slow_attention_down():
    """In blocks of queries a window costs twice its keys, read under a mask: 2.5 and 1.8 times as long a score as
    without one, forward and backward. Sequences no longer than the window have neither."""
    model = replace(catalogue.model("mistral-7b"), window=4096, attention_pattern=("window",))
    link, device = EIGHT_NODES.intra_node, catalogue.device("h100-sxm")
    block, host = model.block(1), EFFICIENCY["hopper"]

    def seconds(tokens: int, *, blocks: bool) -> tuple[float, float]:
        runtime = Runtime(windows_in_blocks=blocks, graphs="step")
        times = layer_times(model, Batch(global_batch=1, seq_len=tokens), device, link, runtime=runtime)
        return float(times.forward_s[1]), float(times.backward_s[1])

    assert seconds(4096, blocks=True) == seconds(4096, blocks=False)
    flops = 32768 * block.heads * (128 + 128) * 2.0
    masked, seen = (keys(32768) * flops / device.peak_flops("bf16") for keys in (block.keys_compared, block.keys_seen))
    more = np.subtract(seconds(32768, blocks=True), seconds(32768, blocks=False))
    assert more[0] == pytest.approx((2.5 * masked - seen) / host.flash_forward)
    assert more[1] == pytest.approx(2.5 * (1.8 * masked - seen) / host.flash_backward)
