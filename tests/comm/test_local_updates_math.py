"""The outer optimizer against torch's Nesterov momentum."""

import torch
from polygon_comm.local_updates import OuterUpdate
from polygon_comm.reduction import SumGroup, members_of
from polygon_comm.transport import Wires
from torch.distributed import HashStore


def test_outer_update_is_nesterov_on_the_differences():
    """For one region, the outer step is torch's SGD(nesterov=True) with the difference as gradient."""
    wires = Wires(HashStore(), 0, {}, address="127.0.0.1", timeout_s=5, device=torch.device("cpu"))
    group = SumGroup(members_of("one", [0], {0: 0}), wires)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(50, generator=generator)
    expected = torch.nn.Parameter(weights.clone())
    reference = torch.optim.SGD([expected], lr=0.7, momentum=0.9, nesterov=True)
    outer = OuterUpdate("x", weights, group, 1.0, [(50,)])
    for _ in range(5):
        moved = torch.randn(50, generator=generator)
        weights += moved
        expected.grad = -moved
        reference.step()
        outer.apply()
        assert torch.allclose(weights, expected.detach(), atol=1e-5)
