"""The optimizer step on buckets of one rank, by hand: scaling, clipping, decay, averages, what is kept."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from polygon.domain.errors import InputError
from runners.engine import update as update_module
from runners.engine.gradients import Bucket
from runners.engine.options import Options
from runners.engine.update import Update

PLAIN = Options(learning_rate=0.5, weight_decay=0.0, clip_norm=None, steps=10)


def bucket_of(**shapes):
    """Weights that are all one."""
    return Bucket("blocks.0", {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}, None)


def updated(options, gradient, *, norm=0.0, scaled=False, optimizer="sgd", steps=1, **shapes):
    """A bucket after steps with the same gradient everywhere, and what made them."""
    bucket = bucket_of(**(shapes or {"matrix": (2, 2), "bias": (2,)}))
    update = Update([bucket], 0, optimizer, options, scaled=scaled)
    for step in range(steps):
        bucket.vector.fill_(gradient)
        update.apply(norm, step)
    return bucket, update


def test_a_step_subtracts_the_rate_times_the_gradient_and_forgets_it():
    """1 - 0.5 * 0.2; the momentum of 0.9 comes in the second step."""
    bucket, update = updated(PLAIN, 0.2)
    assert bucket.weights.tolist() == pytest.approx([0.9] * 6)
    assert bucket.vector.tolist() == [0] * 6
    assert update.applied == 1
    bucket, update = updated(PLAIN, 0.2, steps=2)
    assert bucket.weights.tolist() == pytest.approx([0.9 - 0.5 * 0.38] * 6)
    assert update.applied == 2


def test_only_what_is_longer_is_clipped():
    """Norm 0.4 is made 0.2, norm 0.2 is left; a scaled one is clipped by what it is without the scale."""
    clipped = replace(PLAIN, clip_norm=0.2)
    assert updated(clipped, 0.2, norm=0.4)[0].weights.tolist() == pytest.approx([0.95] * 6)
    assert updated(clipped, 0.2, norm=0.2)[0].weights.tolist() == pytest.approx([0.9] * 6)
    assert updated(clipped, 0.2, norm=0.1)[0].weights.tolist() == pytest.approx([0.9] * 6)
    scale = 2.0**16
    bucket, _ = updated(clipped, 0.2 * scale, norm=0.4 * scale, scaled=True)
    assert bucket.weights.tolist() == pytest.approx([0.95] * 6)
    bucket, _ = updated(clipped, 0.2 * scale, norm=0.1 * scale, scaled=True)
    assert bucket.weights.tolist() == pytest.approx([0.9] * 6)


def test_an_overflow_halves_the_scale_and_changes_no_weight():
    """The step counts for nothing; without scaling there is no scale to lower, and the weights stay as well."""
    bucket = bucket_of(matrix=(2, 2))
    update = Update([bucket], 0, "sgd", PLAIN, scaled=True)
    bucket.vector.fill_(torch.inf)
    assert update.apply(torch.inf, 0) is False
    assert (update.loss_scale, update.applied) == (2.0**15, 0)
    assert bucket.weights.tolist() == [1] * 4 and bucket.vector.tolist() == [0] * 4
    bucket.vector.fill_(0.2 * 2.0**15)
    assert update.apply(1.0, 0) is True
    assert (update.loss_scale, update.applied) == (2.0**15, 1)
    assert bucket.weights.tolist() == pytest.approx([0.9] * 4)
    plain = Update([bucket], 0, "sgd", PLAIN, scaled=False)
    bucket.vector.fill_(torch.nan)
    assert plain.apply(torch.nan, 0) is False
    assert (plain.loss_scale, plain.applied) == (1.0, 0)
    assert bucket.weights.tolist() == pytest.approx([0.9] * 4) and bucket.vector.tolist() == [0] * 4


def test_the_scale_doubles_after_so_many_steps_without_overflow(monkeypatch):
    """An overflow begins the count anew; without scaling there is none."""
    assert torch.amp.GradScaler("cpu").get_growth_interval() == update_module.GROWTH_STEPS
    monkeypatch.setattr(update_module, "GROWTH_STEPS", 3)
    update = Update([bucket_of(matrix=(2, 2))], 0, "sgd", PLAIN, scaled=True)
    scales = []
    for norm in (1, 1, torch.inf, 1, 1, 1, 1, 1, 1):
        update.apply(norm, 0)
        scales.append(update.loss_scale / 2.0**16)
    assert scales == [1, 1, 0.5, 0.5, 0.5, 1, 1, 1, 2]
    plain = Update([bucket_of(matrix=(2, 2))], 0, "sgd", PLAIN, scaled=False)
    for _ in range(3):
        plain.apply(1.0, 0)
    assert plain.loss_scale == 1.0


@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_matrices_decay_and_vectors_where_all_do(decay):
    """Without gradient: 1 - 0.5 * 0.1."""
    bucket, _ = updated(replace(PLAIN, weight_decay=0.1, decay=decay), 0.0, bias=(2,), matrix=(2, 2))
    left = 1.0 if decay == "matrices" else 0.95
    assert bucket.weights.tolist() == pytest.approx([0.95] * 4 + [left] * 2)
    # Adafactor has a rate of its own for gradients; weights decay by the rate that is given.
    bucket, _ = updated(replace(PLAIN, weight_decay=0.1, decay=decay), 0.0, optimizer="adafactor")
    assert bucket.weights.tolist() == pytest.approx([0.95] * 4 + [left] * 2)


def test_the_average_begins_with_the_first_weights_and_moves_by_the_rest():
    """0.9, then 0.75 * 0.9 + 0.25 * 0.71."""
    options = replace(PLAIN, average=0.75)
    bucket, update = updated(options, 0.2)
    assert update.state(bucket, {})["matrix"]["average"].flatten().tolist() == pytest.approx([0.9] * 4)
    bucket, update = updated(options, 0.2, steps=2)
    assert bucket.weights.tolist() == pytest.approx([0.71] * 6)
    average = 0.75 * 0.9 + 0.25 * 0.71
    assert update.state(bucket, {})["bias"]["average"].tolist() == pytest.approx([average] * 2)
    assert update.state_bytes() == 2 * 4 * 6  # momentum and average, fp32
    assert update.state_keys == ("momentum_buffer", "average")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon", "adafactor"])
@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
def test_another_rank_goes_on_from_what_was_kept(optimizer, offload):
    """Saved after two steps and loaded into new buckets: the third step is the same, with averages and without."""
    options = replace(PLAIN, weight_decay=0.1, average=0.75, learning_rate=0.01, offload_optimizer=offload)

    def gradients():
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(14, generator=generator) for _ in range(3)]

    def pair():
        bucket = bucket_of(first=(2, 3), bias=(2,), second=(3, 2))
        return bucket, Update([bucket], 0, optimizer, options, scaled=False)

    one, update = pair()
    for step, gradient in enumerate(gradients()[:2]):
        one.vector.copy_(gradient)
        update.apply(1.0, step)
    extra = torch.arange(14.0)
    states = {
        name: {key: kept.clone() if isinstance(kept, torch.Tensor) else kept for key, kept in state.items()}
        for name, state in update.state(one, {"extra": extra}).items()
    }
    assert all(state["updates"] == 2 for state in states.values())
    assert states["second"]["extra"].tolist() == [[6, 7], [8, 9], [10, 11]]
    other, loaded = pair()
    assert loaded.state(other, {})["first"].keys() == {"value", "updates"} and loaded.state_keys == ()
    restored = torch.zeros(14)
    loaded.load(other, states, {"extra": restored, "unknown": torch.zeros(14)})
    assert restored.tolist() == extra.tolist()
    assert loaded.applied == 2
    assert loaded.state_bytes() == update.state_bytes()
    for bucket, way in ((one, update), (other, loaded)):
        bucket.vector.copy_(gradients()[2])
        way.apply(1.0, 2)
    assert torch.equal(one.weights, other.weights)
    for name, state in update.state(one, {}).items():
        again = loaded.state(other, {})[name]
        assert again.keys() == state.keys()
        assert all(torch.equal(torch.as_tensor(state[key]), torch.as_tensor(again[key])) for key in state)


def test_a_checkpoint_of_another_optimizer_is_refused():
    """In one line; one without averages can be gone on with."""
    bucket, update = updated(PLAIN, 0.2)
    states = update.state(bucket, {})
    other = Update([bucket_of(matrix=(2, 2), bias=(2,))], 0, "adamw", PLAIN, scaled=False)
    with pytest.raises(InputError, match=r"found .*momentum_buffer.*expected exp_avg \(optimizer adamw\)"):
        other.load(other.buckets[0], states, {})
    averaging = Update([bucket_of(matrix=(2, 2), bias=(2,))], 0, "sgd", replace(PLAIN, average=0.9), scaled=False)
    averaging.load(averaging.buckets[0], states, {})
    assert averaging.applied == 1 and averaging.buckets[0].weights.tolist() == pytest.approx([0.9] * 6)
