"""Which weights a worker fetches when, and which parts of them and of gradients it keeps."""

from types import SimpleNamespace

import pytest
import torch
from polygon_comm.accelerator import Accelerator
from polygon_comm.members import members_of
from polygon_comm.reduction import SumGroup
from polygon_comm.transport import Wires
from torch import nn
from torch.distributed import HashStore

from polygon.domain.schedule import Action
from runners.engine.zero_sharding import ShardedBucket, buckets_by_layer, uses
from tests.patience import PATIENCE_S
from tests.small_problems import small_model


def bucket_of(zero, dtype=torch.float32):
    """Six weights in two parameters, of which this rank, the second of two, keeps the last three."""
    wires = Wires(HashStore(), 1, {}, address="127.0.0.1", timeout_s=PATIENCE_S, accelerator=Accelerator())
    alone = SumGroup(members_of("own", [1], {1: 0}), wires)
    owners = SimpleNamespace(near_ranks=(0, 1), near_place=1)
    parameters = {"bias": nn.Parameter(torch.tensor([5.0, 6])), "matrix": nn.Parameter(torch.arange(1.0, 5).view(2, 2))}
    return ShardedBucket(
        "blocks.0", parameters, alone, accelerator=Accelerator(), zero=zero, owners=owners, copies=None,
        dtype=dtype,
    )  # fmt: skip


def layout_of(first, last, *, ep=1, apart=False, **model):
    """Of one stage, as far as it is asked."""
    stage = SimpleNamespace(first_layer=first, last_layer=last, ep=ep)
    problem = SimpleNamespace(model=small_model(**model))
    plan = SimpleNamespace(stages=[stage])
    return SimpleNamespace(problem=problem, plan=plan, tied_apart=apart, experts_apart=lambda stage: ep)


def test_a_layer_is_fetched_unless_the_one_before_used_it():
    """Forward in order, backward in reverse; the last layer's weights are still there when backward begins."""
    chunks = [{0: ("a",), 1: ("b",), 2: ("c", "a")}]
    found = list(uses([Action("F", 0), Action("B", 0)], chunks))
    assert [use.layer for use in found] == [0, 1, 2, 2, 1, 0]
    assert [use.fetched for use in found] == [("a",), ("b",), ("c", "a"), (), ("b",), ("a",)]
    assert found[2].buckets == ("c", "a")
    two = [{0: ("a",)}, {3: ("d",)}]
    assert [use.layer for use in uses([Action("F", 0, 1), Action("F", 0), Action("B", 0, 1)], two)] == [3, 0, 3]


def test_tied_weights_are_the_embeddings_or_a_bucket_of_their_own():
    """The head takes the embedding's weights; where another stage holds one of them both have a copy."""
    assert buckets_by_layer(layout_of(0, 6), 0)[5] == ("head", "embedding")
    assert buckets_by_layer(layout_of(0, 6), 0)[0] == ("embedding",)
    assert buckets_by_layer(layout_of(0, 3, apart=True), 0) == {
        0: ("embedding", "tied"), 1: ("blocks.0",), 2: ("blocks.1",),
    }  # fmt: skip
    assert buckets_by_layer(layout_of(3, 6, apart=True), 0)[5] == ("head", "tied")
    assert buckets_by_layer(layout_of(0, 6, tied_embeddings=False), 0)[5] == ("head",)


def test_spread_experts_have_a_bucket_of_their_own():
    """In blocks that have them, where several devices share them out."""
    routed = {"experts": 4, "experts_per_token": 2, "expert_ffn_size": 16, "dense_blocks": 1}
    spread = buckets_by_layer(layout_of(0, 6, ep=2, **routed), 0)
    assert [len(spread[layer]) for layer in range(5)] == [1, 1, 2, 2, 2]
    assert all(len(names) == 1 for names in list(buckets_by_layer(layout_of(0, 6, **routed), 0).values())[:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_weights_are_there_only_when_they_are_needed(dtype):
    """ZeRO-3 keeps its part in fp32; filled, parameters see all weights in the format that layers compute in."""
    bucket = bucket_of(3, dtype)
    assert bucket.weights.tolist() == [4, 5, 6] and bucket.weights.dtype == torch.float32
    assert (bucket.weights_start, bucket.vector_start) == (3, 3)
    assert bucket.whole_weights.untyped_storage().nbytes() == 0
    bucket.fill([(slice(0, 3), torch.tensor([10.0, 20, 30], dtype=dtype))])
    matrix, bias = bucket.parameters["matrix"], bucket.parameters["bias"]
    assert matrix.tolist() == [[10, 20], [30, 4]] and bias.tolist() == [5, 6] and matrix.dtype == dtype
    bucket.drop()
    assert bucket.whole_weights.untyped_storage().nbytes() == 0
    bucket.weights.mul_(2)
    bucket.renew()
    assert bucket.given.tolist() == [8, 10, 12] and bucket.given.dtype == dtype


def test_zero_2_keeps_all_weights():
    """And a part of the gradient."""
    bucket = bucket_of(2)
    assert bucket.weights.tolist() == [1, 2, 3, 4, 5, 6] and bucket.weights_start == 0
    assert bucket.vector.tolist() == [0, 0, 0] and bucket.vector_start == 3
    assert all(parameter.grad is None for parameter in bucket.parameters.values())


@pytest.mark.parametrize("zero", [2, 3])
def test_a_micro_batchs_gradient_is_taken_and_its_room_given_back(zero):
    """Parameters see it while backward runs; opened twice it is the same."""
    bucket = bucket_of(zero)
    bucket.fill([]) if zero == 3 else None
    bucket.open_gradient()
    bucket.parameters["bias"].grad += 2.0
    bucket.open_gradient()
    assert bucket.take_gradient().tolist() == [0, 0, 0, 0, 2, 2]
    assert bucket.passing is None and bucket.parameters["bias"].grad is None
    assert bucket.take_gradient().tolist() == [0] * 6


def test_the_sum_waits_for_all_parts():
    """Two of two; none wanted is complete at once; what fails is raised where it is waited for."""
    bucket = bucket_of(2)
    bucket.expect(2)
    bucket.add(torch.tensor([1.0, 2, 3]))
    assert not bucket._complete.done()
    bucket.add(torch.tensor([1.0, 1, 1]))
    assert bucket._complete.done()
    bucket.begin(torch.float32)()
    assert bucket.vector.tolist() == [2, 3, 4]
    bucket.expect(0)
    assert bucket._complete.done()
    bucket.fail(ValueError("late"))  # what is complete stays so
    bucket.begin(torch.float32)()
    bucket.expect(1)
    bucket.fail(ValueError("lost"))
    bucket.fail(ValueError("lost again"))
    with pytest.raises(ValueError, match=r"lost$"):
        bucket.begin(torch.float32)


def test_a_region_by_itself_takes_the_mean_of_its_own_samples():
    """A quarter of all samples: four times the sum; a region without any has none."""
    for fraction, expected in ((0.25, [4, 8, 12]), (0.0, [0, 0, 0])):
        bucket = bucket_of(2)
        bucket.alone, bucket.fraction = True, fraction
        bucket.expect(1)
        bucket.add(torch.tensor([1.0, 2, 3]))
        bucket.begin(torch.float32)()
        assert bucket.vector.tolist() == expected
