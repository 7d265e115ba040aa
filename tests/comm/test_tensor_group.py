"""Laws of the devices of one worker and of rows and parts that change places, on real ranks."""

import pytest
import torch
from polygon_comm.accelerator import Accelerator
from polygon_comm.exchange import ExchangeGroup
from polygon_comm.sharding import PARTS_AHEAD, TAGS, PartExchange, Split
from polygon_comm.tensor_group import TensorGroup
from polygon_comm.transport import Wires, gloo_devices, local_address
from torch.distributed import ReduceOp, TCPStore

from tests.patience import PATIENCE_S
from tests.real_ranks import leave_together, run_ranks

SIZE = 3


def draws(rank):
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(rank))


def with_gradient(function, x):
    """What a function makes of a tensor, and the gradient of its result weighted by 1, 2, 3, ..."""
    x = x.clone().requires_grad_()
    result = function(x)
    (result * torch.arange(1.0, result.numel() + 1).view_as(result)).sum().backward()
    return result.detach(), x.grad


def rank_of_worker(rank, port):
    """Results and gradients of every operation of a group."""
    store = TCPStore("127.0.0.1", port, SIZE, rank == 0, wait_for_workers=False)
    options = {"devices": gloo_devices(1, "127.0.0.1"), "timeout_s": PATIENCE_S, "accelerator": Accelerator()}
    group = TensorGroup(store, rank, SIZE, **options)
    x, named = draws(rank), {}
    for name in ("copy", "sum"):
        named[name] = with_gradient(getattr(group, name), x)
    for name in ("sum_part", "join", "split"):
        named[name] = with_gradient(lambda x, name=name: getattr(group, name)(x, 1), x)
    named["most"] = group.total(x, ReduceOp.MAX), None
    first = x.clone()
    group.broadcast_(first)
    named["broadcast"] = first, None
    leave_together(store, rank, SIZE)
    return {name: [None if t is None else t.tolist() for t in pair] for name, pair in named.items()}


def weighted(n):
    return torch.arange(1.0, 2 * n + 1).view(2, n)


def test_every_operation_and_its_gradient_are_those_of_the_whole():
    """Sums, slices and wholes against the tensors of all ranks; forward and backward are each other's transposes."""
    found = run_ranks(rank_of_worker, SIZE)
    every = [draws(rank) for rank in range(SIZE)]
    total, whole = sum(every), torch.cat(every, 1)
    for rank, named in enumerate(found):
        mine = slice(2 * rank, 2 * rank + 2)
        expected = {
            "copy": (every[rank], SIZE * weighted(6)),
            "sum": (total, weighted(6)),
            "sum_part": (total[:, mine], torch.cat([weighted(2)] * SIZE, 1)),
            "join": (whole, weighted(18)[:, 6 * rank : 6 * rank + 6]),
            "split": (every[rank][:, mine], torch.cat([weighted(2)] * SIZE, 1)),
            "most": (torch.stack(every).max(0).values, None),
            "broadcast": (every[0], None),
        }
        for name, pair in expected.items():
            for got, right in zip(named[name], pair, strict=True):
                assert (got is None) == (right is None), name
                assert right is None or torch.allclose(torch.tensor(got), right, atol=1e-6), name


COUNTS = [[1, 2, 0], [3, 0, 1], [0, 2, 2]]
"""Rows that go from each rank (rows of the table) to each."""


def rank_that_moves(rank, port):
    """Rows that arrived, the gradient of those sent, bytes sent to others."""
    store = TCPStore("127.0.0.1", port, SIZE, rank == 0, wait_for_workers=False)
    group = ExchangeGroup(
        store, rank, SIZE, devices=gloo_devices(1, "127.0.0.1"), timeout_s=PATIENCE_S, accelerator=Accelerator()
    )
    sent, received = COUNTS[rank], [row[rank] for row in COUNTS]
    rows = torch.tensor([[10.0 * rank + to, 0.5] for to in range(SIZE) for _ in range(sent[to])]).view(-1, 2)
    arrived, gradient = with_gradient(lambda x: group.exchange(x, sent, received), rows)
    n_bytes = group.sent_bytes
    swapped = group.swap(torch.arange(3.0)[:, None] + 10 * rank)
    before = group.sent_bytes
    passing = [group.pass_on(torch.full((2, 3), 10.0 * rank + turn)) for turn in range(2)]
    assert [passed().unique().tolist() for passed in passing] == [[10.0 * ((rank - 1) % 3) + turn] for turn in range(2)]
    assert group.sent_bytes - before == 2 * 6 * 4
    leave_together(store, rank, SIZE)
    return arrived[:, 0].tolist(), gradient.tolist(), n_bytes, swapped[:, 0].tolist()


def test_rows_change_places_and_their_gradients_go_back():
    """In the order of the members; bytes to oneself do not count, those of gradients do."""
    found = run_ranks(rank_that_moves, SIZE)
    for rank, (arrived, gradient, n_bytes, swapped) in enumerate(found):
        assert arrived == [10.0 * other + rank for other in range(SIZE) for _ in range(COUNTS[other][rank])]
        weights = []
        for to in range(SIZE):
            before = sum(COUNTS[other][to] for other in range(rank))
            weights += [[2.0 * row + 1, 2.0 * row + 2] for row in range(before, before + COUNTS[rank][to])]
        assert gradient == weights
        away = sum(COUNTS[rank]) + sum(row[rank] for row in COUNTS) - 2 * COUNTS[rank][rank]
        assert n_bytes == 8 * away
        assert swapped == [10.0 * other + rank for other in range(SIZE)]


def rank_with_parts(rank, port):
    """Rank 0 serves its peer's parts of many vectors; what that has collected, in its order."""
    store = TCPStore("127.0.0.1", port, 2, rank == 0, wait_for_workers=False)
    wires = Wires(store, rank, {1 - rank: 1}, address="127.0.0.1", timeout_s=PATIENCE_S, accelerator=Accelerator())
    exchange = PartExchange(wires)
    splits = [Split(str(number), (0, 1), 5 + number % 3) for number in range(TAGS + 3)]
    vectors = [torch.arange(split.elements) + 100.0 * number for number, split in enumerate(splits)]
    taken = []
    if rank == 0:
        exchange.serve(1, (vector[split.part(1)] for split, vector in zip(splits, vectors, strict=True)))
    else:
        exchange.collect(0, splits, torch.float32, lambda split, part: taken.append((split.name, part.tolist())))
    exchange.finish()
    exchange.close()
    leave_together(store, rank, 2)
    return taken, len(exchange.jobs)


def test_parts_are_collected_in_their_order():
    """More of them than there are tags, with as many ahead as may be."""
    assert PARTS_AHEAD < TAGS
    (nothing, _), (taken, _) = found = run_ranks(rank_with_parts, 2)
    assert nothing == []
    for number, (name, part) in enumerate(taken):
        assert name == str(number)
        assert part == [100.0 * number + i for i in range((5 + number % 3) // 2, 5 + number % 3)]
    assert len(taken) == TAGS + 3 and [left for _, left in found] == [0, 0]


@pytest.mark.parametrize(("owners", "elements"), [((4,), 7), ((2, 5, 9), 10), ((0, 1, 2, 3), 2)])
def test_a_split_s_stretches_cover_it_once(owners, elements):
    """One after the other, none more than one element longer than another."""
    split = Split("x", owners, elements)
    places = [place for rank in owners for place in range(elements)[split.part(rank)]]
    assert places == list(range(elements))
    lengths = [split.length(rank) for rank in owners]
    assert lengths == [len(range(elements)[split.part(rank)]) for rank in owners]
    assert max(lengths) - min(lengths) <= 1


def test_gloo_s_devices_are_on_the_interface_that_is_named(monkeypatch):
    """Whatever the address is; and one for each stream."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,other")
    assert len(gloo_devices(2, "192.0.2.1")) == 2
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with pytest.raises(RuntimeError):
        gloo_devices(1, "192.0.2.1")
    assert len(gloo_devices(3, "127.0.0.1")) == 3
    assert local_address("127.0.0.1", 1) == "127.0.0.1"
