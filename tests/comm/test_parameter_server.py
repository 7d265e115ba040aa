"""Laws of gradients that go to the owners of parts and of weights that come back, on real ranks."""

import itertools

import pytest
import torch
from polygon_comm.accelerator import Accelerator
from polygon_comm.members import members_of
from polygon_comm.parameter_server import ServerGroup
from polygon_comm.transport import Wires
from torch.distributed import TCPStore

from tests.patience import PATIENCE_S
from tests.real_ranks import leave_together, run_ranks

ELEMENTS = 1001


def contribution(rank, step):
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(100 * step + rank))


def rank_with_owners(rank, port, region_of, node_of, codec, central):
    """Parts, what this rank holds of each step's sum where it is the owner, and what it is handed in the end."""
    store = TCPStore("127.0.0.1", port, len(region_of), rank == 0, wait_for_workers=False)
    members = members_of("test", range(len(region_of)), dict(enumerate(region_of)), node_of, codec)
    peers = {b if a == rank else a: 1 for a, b in members.leader_pairs if rank in (a, b)}
    wires = Wires(store, rank, peers, address="127.0.0.1", timeout_s=PATIENCE_S, accelerator=Accelerator())
    group = ServerGroup(members, wires)
    parts = group.parts(ELEMENTS, central=central)
    held = []
    for step in range(6):
        vector = contribution(rank, step)
        group.begin_to_owners(vector, "gradient", parts)()
        held.append({part.start: vector[part.start : part.stop].tolist() for part in parts if part.owner == rank})
    sent = sum(wires.sent_bytes.values())
    weights = torch.full((ELEMENTS,), float(rank))
    group.share_from_owners_(weights, parts)
    leave_together(store, rank, len(region_of))
    return [tuple(part) for part in parts], held, weights.tolist(), sent


@pytest.mark.parametrize(
    ("region_of", "node_of", "codec", "central", "owners"),
    [
        ((0, 0, 0), None, "int8", False, [0, 1, 2]),
        ((0, 0, 0), None, "none", True, [0]),
        ((0, 0, 1), None, "none", False, [0, 2]),
        ((0, 1, 1), None, "int8", True, [0]),
        ((0, 0, 0, 1, 1), {0: 0, 1: 0, 2: 1, 3: 2, 4: 3}, "none", False, [0, 2, 3, 4]),
        ((0, 0, 0, 1), {0: 0, 1: 1, 2: 2, 3: 3}, "int8", False, [0, 1, 2, 3, 3, 3]),
    ],
)
def test_owners_hold_the_sum_and_all_are_handed_their_weights(region_of, node_of, codec, central, owners):
    """Every element has one owner, of as many as the others; sums are right, what packing drops is sent later."""
    ranks = len(region_of)
    results = run_ranks(rank_with_owners, ranks, region_of, node_of, codec, central)
    parts = results[0][0]
    assert all(result[0] == parts for result in results)
    assert [owner for _, _, owner, _ in parts] == owners
    assert parts[0][0] == 0 and parts[-1][1] == ELEMENTS
    assert all(before[1] == after[0] for before, after in itertools.pairwise(parts))
    assert {stop - start for start, stop, *_ in parts} <= {ELEMENTS // len(owners), ELEMENTS // len(owners) + 1}
    true = [sum(contribution(rank, step) for rank in range(ranks)) for step in range(6)]
    packed = codec != "none" and len(set(region_of)) > 1
    for start, stop, owner, _ in parts:
        held = [torch.tensor(step[start]) for step in results[owner][1]]
        for mine, right in zip(held, true, strict=True):
            assert torch.allclose(mine, right[start:stop], atol=0.1 if packed else 1e-5)
        assert torch.allclose(sum(held), sum(true)[start:stop], atol=0.05 if packed else 1e-4)
    expected = torch.cat([torch.full((stop - start,), float(owner)) for start, stop, owner, _ in parts])
    assert all(result[2] == expected.tolist() for result in results)
    assert results[0][3] == 0 if len(set(region_of)) == 1 or central else results[0][3] > 0
