"""Weights in 16 bits beside those in 32: when gradients come, where they go, and which weights have none."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from runners.engine.gradients import Bucket
from runners.engine.narrow_weights import NarrowWeights
from runners.engine.sequence import sum_over_group


class Twice:
    """A group of two ranks, of which the other has the same gradients."""

    def total(self, x):
        """Twice what is here."""
        return 2 * x


def layers_of(count=3, width=8):
    """Linear layers, each in a bucket of its own."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width) for _ in range(count)]
    return layers, [Bucket(str(n), dict(layer.named_parameters()), None) for n, layer in enumerate(layers)]


def forward(layers, x, told=None):
    """In bf16 under autocast; `told` hears of the gradient of each output."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for number, layer in enumerate(layers):
            x = layer(x).relu()
            if told is not None:
                x.register_hook(lambda _, number=number: told.append(f"output {number}"))
    return x


def test_gradients_come_layer_by_layer_in_every_micro_batch():
    """Of the first micro-batch and of all after it: a layer's weights have theirs before the layer before begins."""
    layers, buckets = layers_of()
    narrow, told = NarrowWeights(layers, buckets, torch.bfloat16), []
    for number, bucket in enumerate(buckets):
        for leaf in bucket.leaves:
            leaf.register_post_accumulate_grad_hook(lambda _, number=number: told.append(f"weights {number}"))
    with narrow.in_place():
        for _ in range(3):
            told.clear()
            forward(layers, torch.randn(4, 8), told).sum().backward()
            assert told == [each for n in (2, 1, 0) for each in (f"output {n}", f"weights {n}", f"weights {n}")]


def test_gradients_are_those_of_autocast_and_weights_are_taken_anew_every_step():
    """Two steps of two micro-batches under way at a time; what products take is in 16 bits, the rest in 32."""
    batches, found = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)), []
    for copies in (False, True):
        layers, buckets = layers_of()
        narrow = NarrowWeights(layers, buckets if copies else [], torch.bfloat16)
        for _ in range(2):
            with narrow.in_place():
                assert layers[0].weight.dtype == (torch.bfloat16 if copies else torch.float32)
                for out in [forward(layers, batch) for batch in batches]:
                    out.sum().backward()
            assert layers[0].weight.dtype == torch.float32 and isinstance(layers[0].weight, nn.Parameter)
            found.append([bucket.vector.clone() for bucket in buckets])
            for bucket in buckets:
                bucket.weights += 0.1
                bucket.vector.zero_()
    for alone, copied in zip(found[:2], found[2:], strict=True):
        assert all(vector.any() for vector in alone)
        assert all(torch.equal(a, b) for a, b in zip(alone, copied, strict=True))


def test_in_32_bits_nothing_is_copied():
    """Nor are weights that have the format of products, those that nothing trains, and what no product takes."""
    layers, buckets = layers_of(1)
    NarrowWeights(layers, buckets, torch.float32)
    assert buckets[0].leaves == list(layers[0].parameters())
    layer = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8))
    trained = {"norm": layer[0].weight, "weight": layer[1].weight}
    bucket = Bucket("0", trained, None)
    narrow = NarrowWeights([layer], [bucket], torch.bfloat16)
    with narrow.in_place():
        kinds = [layer[0].weight.dtype, layer[1].weight.dtype, layer[1].bias.dtype, layer[2].weight.dtype]
    assert kinds == [torch.float32, torch.bfloat16, torch.float32, torch.float32]
    assert len(bucket.leaves) == 2 and any(leaf is layer[0].weight for leaf in bucket.leaves)


def test_a_weight_that_is_looked_up_and_multiplied_gets_both_gradients():
    """As tied embeddings: the matrix of a table in 32 bits, its copy in the product; the bucket waits for both."""
    table, head = nn.Embedding(6, 8), nn.Linear(8, 6, bias=False)
    head.weight = table.weight
    bucket = Bucket("tied", {"weight": table.weight}, None)
    narrow = NarrowWeights([table, head], [bucket], torch.bfloat16)
    assert len(bucket.leaves) == 2
    ids = torch.tensor([[1, 2]])
    with narrow.in_place(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = head(table(ids))
    out.sum().backward()
    got = bucket.vector.view(6, 8)
    assert got[0].any() and not torch.allclose(got[1], got[0])
    expected = table.weight.detach()[[1, 2]].sum(0)
    torch.testing.assert_close(got[0], expected, rtol=0.02, atol=0.02)


def test_gradients_of_a_group_are_summed_before_they_are_added():
    """In 32 bits; others of the layer are as they come."""
    layers, [bucket] = layers_of(1)
    sum_over_group(layers[0].bias, Twice())
    narrow = NarrowWeights(layers, [bucket], torch.bfloat16)
    with narrow.in_place():
        for _ in range(2):
            forward(layers, torch.ones(4, 8)).sum().backward()
    start, stop, _ = bucket.places["bias"]
    used = (forward(layers, torch.ones(1, 8)) > 0).float()[0]
    torch.testing.assert_close(bucket.vector[start:stop], 2 * 2 * 4 * used)


@pytest.mark.parametrize("fails", [False, True])
def test_layers_have_their_parameters_back(fails):
    """Also where the step ends with an error."""
    layers, buckets = layers_of(1)
    parameters = list(layers[0].parameters())
    narrow = NarrowWeights(layers, buckets, torch.bfloat16)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), narrow.in_place():
        1 / (0 if fails else 1)
    assert all(a is b for a, b in zip(layers[0].parameters(), parameters, strict=True))
