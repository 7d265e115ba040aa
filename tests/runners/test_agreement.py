"""What counts in a step's loss and gradient norm, of equal copies and of parts."""

import math
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from runners.engine.agreement import Agreement
from runners.engine.gradients import Bucket


class Everyone:
    """A group of one rank that keeps what it is asked to sum."""

    def __init__(self):
        self.told = []

    def begin(self, values, key):
        """Of all."""
        self.told.append((key, values.tolist()))
        return lambda: None

    def begin_near(self, values):
        """Of this region."""
        return self.begin(values, "near")


def agreement(*buckets, rank=0, place=0, is_last=True, cp=1, stop=False):
    """Of a rank whose worker takes three of eight micro-batches."""
    layout = SimpleNamespace(plan=SimpleNamespace(micro_batches=8), worker_of=lambda rank: SimpleNamespace(cp=cp))
    accelerator = SimpleNamespace(from_host=lambda tensor: tensor)
    worker = SimpleNamespace(
        layout=layout, place=place, is_last=is_last, shares=[5, 3], loss_sum=torch.tensor(6.0, dtype=torch.float64),
        loss_scale=0.5, wires=SimpleNamespace(accelerator=accelerator, device=torch.device("cpu")),
        reducer=SimpleNamespace(buckets=list(buckets)),
    )  # fmt: skip
    wanted = threading.Event()
    if stop:
        wanted.set()
    return Agreement(rank, worker, Everyone(), wanted)


def bucket_of(**more):
    """A matrix that is cut (gradient 3, 4) and a vector that is whole (12)."""
    parameters = {"matrix": nn.Parameter(torch.zeros(1, 2)), "bias": nn.Parameter(torch.zeros(1))}
    bucket = Bucket("blocks.0", parameters, None, dims={"matrix": 0})
    bucket.tp = SimpleNamespace()
    bucket.vector.copy_(torch.tensor([3.0, 4, 12]))
    for name, value in more.items():
        setattr(bucket, name, value)
    return bucket


def test_only_the_last_stages_first_slices_tell_a_loss():
    """Loss 6 of 3/8 of the samples; by parts of sequences 3/16; others tell nothing but whether they stop."""
    told = agreement(stop=True)._begin(None, near=False)[0]
    assert told.tolist() == [6, 3 / 8, 0, 1]
    assert agreement(cp=2)._begin(None, near=False)[0].tolist() == [6, 3 / 16, 0, 0]
    assert agreement(place=1)._begin(None, near=False)[0].tolist() == [0, 0, 0, 0]
    assert agreement(is_last=False)._begin(torch.tensor(7.0), near=False)[0].tolist() == [0, 0, 7, 0]
    both = agreement()
    both._begin(None, near=True)
    both._begin(None, near=False)
    assert [key for key, _ in both._everyone.told] == ["near", "scalars"]


def test_a_step_is_known_from_the_sums():
    """Loss by the samples that count, the root of the squares; nobody's loss is none."""
    found = agreement()._read(torch.tensor([8.0, 0.5, 9.0, 0.0]))
    assert found == (8 * 0.5 / 0.5, 3.0, False)
    assert agreement()._read(torch.tensor([8.0, 0.5, 9.0, 1.0])).stop
    assert math.isnan(agreement()._read(torch.tensor([0.0, 0.0, 9.0, 0.0])).loss)


def test_of_what_all_slices_hold_the_first_counts():
    """The first device of a worker counts all, the second its slice of the matrix."""
    bucket = bucket_of()
    assert agreement(bucket)._square([bucket]).item() == pytest.approx(3**2 + 4**2 + 12**2)
    assert agreement(bucket, place=1)._square([bucket]).item() == pytest.approx(3**2 + 4**2)
    assert agreement(bucket)._square([bucket, bucket]).item() == pytest.approx(2 * 169)
    assert agreement(bucket)._square([]).item() == pytest.approx(0)
    # Whole experts: nobody else of the worker has anything of them.
    assert agreement(place=1)._square([bucket_of(tp=None)]).item() == pytest.approx(3**2 + 4**2 + 12**2)


def test_owners_count_what_they_own():
    """Parts of parameter servers: the middle one."""
    parts = [SimpleNamespace(start=0, stop=1, owner=1), SimpleNamespace(start=1, stop=3, owner=0)]
    bucket = bucket_of(parts=parts)
    assert agreement(bucket)._square([bucket]).item() == pytest.approx(4**2 + 12**2)
    assert agreement(bucket, rank=1)._square([bucket]).item() == pytest.approx(3**2)
    assert agreement(bucket, rank=1, place=1)._square([bucket]).item() == pytest.approx(3**2)
    assert agreement(bucket, place=1)._square([bucket]).item() == pytest.approx(4**2)


@pytest.mark.parametrize(
    ("bucket", "together", "alone"),
    [
        ({"parts": [1]}, True, True),
        ({"leads": True, "group": SimpleNamespace(near_place=1)}, True, False),
        ({"leads": False, "group": SimpleNamespace(near_place=0)}, False, True),
        ({"leads": True}, True, False),
        ({"zero": 1, "leads": True, "group": SimpleNamespace(near_place=0)}, True, True),
    ],
)
def test_of_equal_copies_one_counts(bucket, together, alone):
    """The one that leads, or in a region by itself its first."""
    bucket = bucket_of(**bucket)
    assert agreement()._counts(bucket, alone=False) == together
    assert agreement()._counts(bucket, alone=True) == alone


@pytest.mark.parametrize("zero", [2, 3])
def test_of_copies_in_parts_the_first_counts(zero):
    """Ranks 2 to 5 are the second region; those that share its first copy count there, none of them among all."""
    group = SimpleNamespace(near_ranks=(2, 3, 4, 5), members=SimpleNamespace(regions=((0, 1), (2, 3, 4, 5))))
    first = bucket_of(zero=zero, group=group, owners=SimpleNamespace(near_ranks=(2, 3)))
    second = bucket_of(zero=zero, group=group, owners=SimpleNamespace(near_ranks=(4, 5)))
    assert [agreement()._counts(one, alone=True) for one in (first, second)] == [True, False]
    assert [agreement()._counts(one, alone=False) for one in (first, second)] == [False, False]
    near = SimpleNamespace(near_ranks=(0, 1), members=group.members)
    leading = bucket_of(zero=zero, group=near, owners=SimpleNamespace(near_ranks=(0, 1)))
    assert agreement()._counts(leading, alone=False)
