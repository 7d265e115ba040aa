"""Messages of a shaped group arrive when the given links would bring them; what they carry is what gloo carries."""

import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from polygon_comm.shaped import LinkShape, Pacer, ShapedReceipt, VirtualClock, register_shaped_backend

from runners.engine.options import Options
from tests.real_ranks import run_ranks
from tests.runners.test_training import run_rank
from tests.small_problems import routed_problem

SHAPE = LinkShape(latency_s=0.02, bytes_per_s=4e6)
MESSAGE = 10_000
"""Elements: 40 kB, 10 ms at the link's rate."""


def in_group(rank, port, size, virtual, body):
    """Run the body in a shaped group of so many ranks; its result, and from when to when by the group's clock."""
    clock = VirtualClock() if virtual else None
    register_shaped_backend(lambda source, target: SHAPE, clock)
    dist.init_process_group("shaped", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    now_s = clock.now_s if clock else time.monotonic
    dist.barrier()
    start_s = now_s()
    result = body(rank, clock)
    span_s = start_s, now_s()
    dist.destroy_process_group()
    return result, span_s


def lasted_s(span_s):
    """Seconds from the start to the end."""
    return span_s[1] - span_s[0]


def ping_pong(rank, clock):
    """Three messages there, three of one byte back."""
    there, back = torch.zeros(MESSAGE), torch.zeros(1, dtype=torch.uint8)
    for _ in range(3):
        if rank == 0:
            dist.send(there, 1)
            dist.recv(back, 1)
        else:
            dist.recv(there, 0)
            dist.send(back, 0)


def queue(rank, clock):
    """Four messages at once, received in the opposite order."""
    if rank == 0:
        for work in [dist.isend(torch.full((MESSAGE,), float(i)), 1, tag=i) for i in range(4)]:
            work.wait()
        return None
    buffers = [torch.zeros(MESSAGE) for _ in range(4)]
    works = [dist.irecv(buffer, 0, tag=i) for i, buffer in enumerate(buffers)]
    for work in reversed(works):
        work.wait()
    return [float(buffer[9]) for buffer in buffers]


def two_in_one(rank, clock):
    """One receive of two tensors, which were sent one after the other."""
    group = dist.group.WORLD
    tensors = [torch.full((MESSAGE,), float(i + 1) * (1 - rank)) for i in range(2)]
    (group.recv(tensors, 0, 0) if rank else group.send(tensors, 1, 0)).wait()
    return [float(tensor[9]) for tensor in tensors]


def overlap(rank, clock):
    """Rank 1 computes while the message is under way."""
    if rank == 0:
        dist.send(torch.zeros(MESSAGE), 1)
        return
    work = dist.irecv(torch.zeros(MESSAGE), 0)
    clock.advance(0.025)
    work.wait()


def collectives(rank, clock):
    """Sum, maximum, gather and broadcast."""
    size = dist.get_world_size()
    vector = torch.arange(1003, dtype=torch.float32) * (rank + 1)
    dist.all_reduce(vector)
    highest, mean, flag = torch.tensor([float(rank)]), torch.tensor([float(rank)]), torch.tensor([float(rank)])
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    dist.broadcast(flag, 1)
    parts = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(parts, torch.full((3,), float(rank)))
    return vector.tolist(), [float(x) for x in (highest, mean, flag)], [float(part[0]) for part in parts]


def ring(rank, clock):
    """A sum of 120 kB over three ranks."""
    dist.all_reduce(torch.zeros(3 * MESSAGE))


def gradient_by_ddp(rank, clock):
    """The gradient of a linear layer under torch's DDP."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    data = torch.randn(dist.get_world_size(), 8)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    wrapped(data[rank : rank + 1]).sum().backward()
    return torch.allclose(model.weight.grad[0], data.mean(0), atol=1e-6)


@given(sizes=st.lists(st.integers(0, 10**7), max_size=20), latency_s=st.floats(0, 1), rate=st.floats(1e3, 1e9))
def test_messages_of_a_pair_leave_one_after_the_other(sizes, latency_s, rate):
    """Handed over together, message i arrives after all bytes up to its own, and one latency."""
    pacer = Pacer(LinkShape(latency_s, rate), VirtualClock())
    total = 0
    for size in sizes:
        total += size
        assert pacer.arrival_s(size) == pytest.approx(total / rate + latency_s)


def test_a_message_is_there_when_its_time_has_come():
    """Before it is not complete, though its bytes be there; the clock never goes back."""
    clock = VirtualClock()
    receipt = ShapedReceipt([], torch.tensor([2.0]), clock, [])
    assert not receipt.is_completed()
    clock.advance(1.5)
    assert not receipt.is_completed()
    assert receipt.wait() and receipt.is_completed() and clock.now_s() == 2.0
    clock.wait_until(1.0)
    assert clock.now_s() == 2.0


def test_virtual_times_are_exact():
    """Ping-pong: 3 (20 + 10 + 20 ms and a byte). A queue of four: 20 + 40 ms; of two: 20 + 20. Compute of 25 hides."""
    [(_, first), (_, second)] = run_ranks(in_group, 2, 2, True, ping_pong)
    first, second = lasted_s(first), lasted_s(second)
    assert first == pytest.approx(3 * (0.05 + 1 / 4e6), abs=1e-9) and second < first
    [_, (received, span_s)] = run_ranks(in_group, 2, 2, True, queue)
    assert received == [0.0, 1.0, 2.0, 3.0] and lasted_s(span_s) == pytest.approx(0.06, abs=1e-4)
    [_, (received, span_s)] = run_ranks(in_group, 2, 2, True, two_in_one)
    assert received == [1.0, 2.0] and lasted_s(span_s) == pytest.approx(0.04, abs=1e-4)
    [_, (_, span_s)] = run_ranks(in_group, 2, 2, True, overlap)
    assert lasted_s(span_s) == pytest.approx(0.03, abs=1e-4)


def test_ring_sum_takes_what_the_formula_says():
    """2 (p - 1) rounds of latency + n / (p b): 4 (20 + 10 ms) for 120 kB on three ranks."""
    for _, span_s in run_ranks(in_group, 3, 3, True, ring):
        assert lasted_s(span_s) == pytest.approx(4 * 0.03, abs=1e-4)


def test_paced_messages_are_never_early():
    """In real time the same exchanges take at least as long as on the virtual clock, however busy the machine is.

    Counted from when the sender began: a receiver that leaves the barrier late finds its messages under way. All
    processes of a machine share the clock.
    """
    [(_, span_s), _] = run_ranks(in_group, 2, 2, False, ping_pong)
    assert lasted_s(span_s) >= 3 * 0.05
    [(_, (sent_s, _)), (received, (_, received_s))] = run_ranks(in_group, 2, 2, False, queue)
    assert received == [0.0, 1.0, 2.0, 3.0] and received_s - sent_s >= 0.06


@pytest.mark.parametrize("virtual", [False, True])
def test_collectives_give_the_right_numbers(virtual):
    """Sums, extremes, means, gathers and broadcasts over three ranks."""
    for (vector, scalars, parts), _ in run_ranks(in_group, 3, 3, virtual, collectives):
        assert vector == [6.0 * i for i in range(1003)]
        assert scalars == [2.0, 1.0, 1.0] and parts == [0.0, 1.0, 2.0]


def test_torch_ddp_runs_on_it():
    """torch's own data-parallel wrapper gets the mean gradient."""
    assert [right for right, _ in run_ranks(in_group, 2, 2, False, gradient_by_ddp)] == [True, True]


def test_emulated_links_change_time_and_nothing_else():
    """A plan over two regions trains to the same losses, bit by bit, whether its links are emulated or not."""
    problem, plan = routed_problem(4, streams=2)
    plain, emulated = (
        run_ranks(run_rank, 4, problem, plan, Options(steps=3, emulate_links=emulate)) for emulate in (False, True)
    )
    assert plain == emulated
