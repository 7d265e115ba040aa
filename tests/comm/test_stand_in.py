"""Laws of the stand-in for GPUs and NCCL: what would hang there hangs here, and what would not does not."""

import pytest
import torch
from torch.distributed import AllreduceOptions, PrefixStore, TCPStore

from tests.comm.stand_in import HangError, StandIn, watched_ranks
from tests.patience import PATIENCE_S
from tests.real_ranks import leave_together


def pair(rank, port, board, **late):
    """A rank's device, a store, and a function that makes communicators of the two ranks."""
    from polygon_comm.transport import gloo_devices

    device = StandIn(rank, 0, board, **late)
    store = TCPStore("127.0.0.1", port, 2, rank == 0, wait_for_workers=False)
    devices = gloo_devices(1, "127.0.0.1")
    return device, store, lambda name: device.group(PrefixStore(name, store), rank, 2, devices, PATIENCE_S)


def both_ways(rank, port, board, first):
    """Two messages, one each way, over one communicator; `first[rank]` says which operation a rank issues first."""
    _, store, make = pair(rank, port, board)
    group, sent, received = make("one"), torch.full((4,), float(rank)), torch.zeros(4)
    works = []
    for what in (first[rank], "recv" if first[rank] == "send" else "send"):
        works.append(group.send([sent], 1 - rank) if what == "send" else group.recv([received], 1 - rank))
    for work in works:
        work.wait()
    values = received.tolist()
    leave_together(store, rank, 2)
    return values


def test_messages_both_ways_over_one_communicator_need_one_order():
    """Both ranks that send first hang, as with NCCL outside of a group call; an order that both agree on does not."""
    with pytest.raises(HangError) as hang:
        watched_ranks(both_ways, 2, ("send", "send"))
    assert all(any("#1 send" in text for text in texts) for texts in hang.value.args[0].values())
    found, _ = watched_ranks(both_ways, 2, ("send", "recv"))
    assert found == [[1.0] * 4, [0.0] * 4]


def crossed(rank, port, board, most_running):
    """Sums over two communicators, issued in another order on each rank."""
    _, store, make = pair(rank, port, board, most_running=most_running)
    groups, values = [make("one"), make("two")], torch.ones(2)
    works = []
    for place in (0, 1) if rank == 0 else (1, 0):
        works.append(groups[place].allreduce([values[place : place + 1]], AllreduceOptions()))
    for work in works:
        work.wait()
    result = values.tolist()
    leave_together(store, rank, 2)
    return result


def test_crossed_communicators_hang_where_too_few_operations_fit():
    """Two at once go on side by side; where a device has room for one, each rank's waits for the other one."""
    assert watched_ranks(crossed, 2, 2)[0] == [[2.0, 2.0]] * 2
    with pytest.raises(HangError):
        watched_ranks(crossed, 2, 1)


def thread_goes_on(rank, port, board):
    """Rank 1 sends only when rank 0 has waited, which holds up rank 0's stream, not its thread."""
    _, store, make = pair(rank, port, board)
    group, values = make("one"), torch.zeros(3)
    if rank:
        store.wait(["waited"])
        group.send([torch.arange(3.0)], 0).wait()
        leave_together(store, rank, 2)
        return None
    work = group.recv([values], 1)
    work.wait()
    doubled = values * 2
    early = torch.empty(3)
    with torch.utils._python_dispatch._disable_current_modes():
        early.copy_(doubled)
        unread = bool(early.isnan().all())
    waited = work.is_completed()
    store.set("waited", "1")
    result = doubled.tolist()
    leave_together(store, rank, 2)
    return waited, unread, result


def test_a_wait_holds_up_the_stream_and_not_the_thread():
    """What was handed over after it is not there yet (NaN), and is right once it is read."""
    found, _ = watched_ranks(thread_goes_on, 2)
    assert found[0] == (False, True, [0.0, 2.0, 4.0])


def summing_threads(rank, port, board, one_stream):
    """Two threads: one waits for a message which the other rank sends when it has got this one's."""
    device, store, make = pair(rank, port, board, one_stream=one_stream)
    ways, received = [make("up"), make("down")], torch.zeros(2)
    way = ways if rank == 0 else ways[::-1]

    def collect():
        way[1].recv([received], 1 - rank).wait()
        device.finish()

    collecting = device.threads(1, "collect").submit(collect)
    if rank == 0:
        store.wait(["collects/1"])
    store.set(f"collects/{rank}", "1")
    way[0].send([torch.full((2,), 1.0 + rank)], 1 - rank).wait()
    device.finish()
    collecting.result()
    leave_together(store, rank, 2)
    return received.tolist()


def test_threads_with_a_stream_each_do_not_hold_one_another_up():
    """A thread that waits for a peer does not keep another one's message from leaving."""
    assert watched_ranks(summing_threads, 2, False)[0] == [[2.0, 2.0], [1.0, 1.0]]
