"""The outer optimizer against torch's Nesterov momentum."""

import pytest
import torch
from polygon_comm.accelerator import Accelerator
from polygon_comm.local_updates import OuterUpdate
from polygon_comm.members import members_of
from polygon_comm.reduction import SumGroup
from polygon_comm.transport import Wires
from torch.distributed import HashStore, TCPStore

from tests.patience import PATIENCE_S
from tests.real_ranks import leave_together, run_ranks


def test_outer_update_is_nesterov_on_the_differences():
    """For one region, the outer step is torch's SGD(nesterov=True) with the difference as gradient."""
    wires = Wires(HashStore(), 0, {}, address="127.0.0.1", timeout_s=PATIENCE_S, accelerator=Accelerator())
    group = SumGroup(members_of("one", [0], {0: 0}), wires)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(50, generator=generator)
    expected = torch.nn.Parameter(weights.clone())
    reference = torch.optim.SGD([expected], lr=0.7, momentum=0.9, nesterov=True)
    outer = OuterUpdate("x", weights, group, 1.0, [(50,)], rate=0.7, momentum=0.9)
    for _ in range(5):
        moved = torch.randn(50, generator=generator)
        weights += moved
        expected.grad = -moved
        reference.step()
        outer.apply()
        assert torch.allclose(weights, expected.detach(), atol=1e-5)


def test_what_a_region_did_during_an_exchange_is_added_to_its_result():
    """The end of an exchange replaces the weights sent by the new common ones and keeps what came after them."""
    wires = Wires(HashStore(), 0, {}, address="127.0.0.1", timeout_s=PATIENCE_S, accelerator=Accelerator())
    group = SumGroup(members_of("one", [0], {0: 0}), wires)
    weights = torch.zeros(3)
    outer = OuterUpdate("x", weights, group, 1.0, [(3,)], rate=0.5, momentum=0.0)
    weights += 4.0
    end = outer.begin(weights.clone())
    weights += torch.tensor([1.0, 0.0, -3.0])
    end()
    assert outer.start.tolist() == [2.0, 2.0, 2.0]
    assert weights.tolist() == [3.0, 2.0, -1.0]


def quadratic_descent(rank, port, steps):
    """Weights after local SGD with an exchange every step (H = 1), and what the synchronous one would give."""
    store = TCPStore("127.0.0.1", port, 2, rank == 0, wait_for_workers=False)
    members = members_of("pair", [0, 1], {0: 0, 1: 1})
    wires = Wires(store, rank, {1 - rank: 1}, address="127.0.0.1", timeout_s=PATIENCE_S, accelerator=Accelerator())
    goals = torch.randn(2, 40, generator=torch.Generator().manual_seed(1))
    fractions = (0.25, 0.75)
    local, common = torch.nn.Parameter(torch.zeros(40)), torch.nn.Parameter(torch.zeros(40))
    optimizers = [torch.optim.SGD([weights], lr=0.1, momentum=0.9) for weights in (local, common)]
    outer = OuterUpdate("x", local.data, SumGroup(members, wires), fractions[rank], [(40,)], rate=1.0, momentum=0.0)
    for _ in range(steps):
        local.grad = local.data - goals[rank]
        common.grad = sum(w * (common.data - goal) for w, goal in zip(fractions, goals, strict=True))
        for optimizer in optimizers:
            optimizer.step()
        outer.apply()
    leave_together(store, rank, 2)
    return local.detach().tolist(), common.detach().tolist()


def test_one_local_step_with_plain_averaging_is_synchronous_sgd():
    """With H = 1, outer rate 1 and no outer momentum, local SGD is SGD on the weighted mean of the gradients."""
    results = run_ranks(quadratic_descent, 2, 20)
    assert results[0][0] == results[1][0]
    assert results[0][0] == pytest.approx(results[0][1], abs=1e-5)


def two_regions_of_two(rank, port, divided):
    """Weights that the ranks of two regions have after three exchanges, each of all or of its part of them."""
    store = TCPStore("127.0.0.1", port, 4, rank == 0, wait_for_workers=False)
    members = members_of("four", range(4), {0: 0, 1: 0, 2: 1, 3: 1})
    streams = {peer: 1 for peer in range(4) if peer != rank}
    wires = Wires(store, rank, streams, address="127.0.0.1", timeout_s=PATIENCE_S, accelerator=Accelerator())
    group, region = SumGroup(members, wires), rank // 2
    parts = [(0, 20), (20, 41)] if divided else [(0, 41), (0, 41)]
    part = slice(*parts[rank % 2])

    def whole(vector):
        if not divided:
            return vector
        found = torch.zeros(41)
        found[part] = vector
        group.share_parts(found, parts)
        return found

    weights = torch.zeros(41)[part]
    outer = OuterUpdate(
        *("x", weights, group, (0.25, 0.75)[region], [(41,)]), rate=0.7, momentum=0.9, part=part, whole=whole
    )
    for step in range(3):
        weights += torch.randn(2, 41, generator=torch.Generator().manual_seed(step))[region][part]
        outer.apply()
    leave_together(store, rank, 4)
    return weights.tolist(), len(outer.start) + len(outer.momentum)


def test_parts_of_the_weights_are_updated_as_all_of_them():
    """Each holder in a region keeps the outer optimizer of its part alone, and all parts together are the whole."""
    whole, divided = (run_ranks(two_regions_of_two, 4, kind) for kind in (False, True))
    assert all(weights == whole[0][0] for weights, _ in whole)
    for first, second in (divided[:2], divided[2:]):
        assert first[0] + second[0] == pytest.approx(whole[0][0], abs=1e-6)
        assert (first[1], second[1], whole[0][1]) == (40, 42, 82)
