"""Routed experts of one rank against token by token, and the loss that keeps them equally busy, by hand."""

import math
from dataclasses import replace

import pytest
import torch

from runners.engine.experts import Experts, balance_loss, has_kernel
from runners.engine.gradients import Bucket
from runners.engine.layers import build_layer
from runners.engine.narrow_weights import NarrowWeights
from tests.real_ranks import run_ranks
from tests.runners.stand_in_plans import OPTIONS, in_16_bits, losses_on_cores, uniform
from tests.small_problems import small_model

MODEL = small_model(
    family="llama", gated_mlp=True, rms_norm=True, linear_bias=False, qkv_bias=False, learned_positions=False,
    tied_embeddings=False, experts=4, experts_per_token=2, expert_ffn_size=16, shared_experts=1,
)  # fmt: skip


class Parts:
    """One of two ranks that hold parts of a sequence: the other one's tokens chose as these did."""

    size = 2

    def total(self, counts):
        """Twice what is here."""
        return 2 * counts


def experts():
    """Those of a block, with weights that differ."""
    return experts_of(MODEL)


def experts_of(model):
    """The same of another model."""
    torch.manual_seed(0)
    found = build_layer(model, 1, 0).mlp
    assert isinstance(found, Experts)
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return found


def test_equally_busy_experts_lose_one_a_token():
    """Whatever they are chosen for: four experts, two for each of four tokens, even scores."""
    chosen = torch.tensor([[[0, 1], [2, 3], [0, 2], [1, 3]]])
    assert balance_loss(torch.zeros(1, 4, 4), chosen).item() == pytest.approx(4)
    both = balance_loss(torch.zeros(2, 4, 4), chosen.repeat(2, 1, 1))
    assert both.item() == pytest.approx(8)


def test_a_favourite_costs_more():
    """Two experts, one each: three of four tokens choose the first, at probabilities of 3/4 and 1/4.

    f = 2 / 4 (3, 1); sum of probabilities (3 * 3/4 + 1/4, 3 * 1/4 + 3/4) = (5/2, 3/2); together 15/4 + 3/4.
    """
    scores = torch.tensor([[[math.log(3), 0.0]] * 3 + [[0.0, math.log(3)]]])
    chosen = torch.tensor([[[0], [0], [0], [1]]])
    assert balance_loss(scores, chosen).item() == pytest.approx(4.5)
    # Every sequence by itself: one that loves the first and one that loves the second do not make up for one another.
    assert balance_loss(torch.cat([scores, scores.flip(2)]), torch.cat([chosen, 1 - chosen])).item() == pytest.approx(9)
    # The other half of the sequence is alike: the same part of choices, and these tokens' probabilities alone.
    assert balance_loss(scores, chosen, [Parts()]).item() == pytest.approx(4.5)


def test_experts_are_weighted_by_a_softmax_over_the_chosen():
    """Token by token: its best two, and what all share."""
    layer = experts()
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1))
    expected = torch.zeros_like(x)
    for b in range(2):
        for t in range(3):
            best, chosen = layer.router(x[b, t]).topk(2)
            row = x[b, t][None]
            for weight, e in zip(best.softmax(0), chosen.tolist(), strict=True):
                expected[b, t] += weight * layer.experts[str(e)](row)[0]
            expected[b, t] += layer.shared[0](row)[0]
    torch.testing.assert_close(layer(x), expected)


def test_every_expert_gets_a_gradient():
    """Also the one that no token has chosen."""
    layer = experts()
    layer(torch.randn(1, 1, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    busy = [e for e, expert in layer.experts.items() if any(p.grad.any() for p in expert.parameters())]
    assert len(busy) == 2


def in_bf16(layer):
    """A mixture's weights in bf16 where one kernel takes all experts, and the bucket that has those in 32 bits."""
    bucket = Bucket("blocks.0", dict(layer.named_parameters()), None)
    return NarrowWeights([layer], [bucket], torch.bfloat16), bucket


@pytest.mark.parametrize("gated", [True, False])
def test_one_kernel_for_all_experts_makes_what_each_makes_by_itself(monkeypatch, gated):
    """Outputs and gradients, an expert without tokens among them; two micro-batches in two steps, between which weights
    change."""
    batches = torch.randn(2, 13, 32, generator=torch.Generator().manual_seed(1))
    found = []
    for kernel in (False, True):
        monkeypatch.setattr("runners.engine.experts.has_kernel", lambda device, dtype, k=kernel: k)
        layer = experts() if gated else experts_of(replace(MODEL, gated_mlp=False))
        narrow, bucket = in_bf16(layer)
        assert bool(layer.stacked) == kernel
        rows = []
        for _ in range(2):
            with narrow.in_place():
                outs = []
                for batch in batches:
                    x = batch.clone().requires_grad_()
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        outs.append((x, layer._run(x, torch.tensor([5, 0, 7, 1]))))
                for x, out in outs:
                    out.float().square().sum().backward()
                    rows += [out.detach().float(), x.grad]
            rows.append(bucket.vector.clone())
            with torch.no_grad():
                bucket.weights.mul_(0.5)
                bucket.vector.zero_()
        found.append(rows)
    for alone, together in zip(*found, strict=True):
        assert alone.any()
        torch.testing.assert_close(together, alone, rtol=0.02, atol=0.02 * float(alone.abs().max()))


def test_experts_that_the_kernel_cannot_take_run_one_after_another(monkeypatch):
    """Biases, widths that are no whole number of 16 bytes, slices of a group; no rows; where there is no kernel."""
    device, bf16 = torch.device("cpu"), torch.bfloat16
    assert not has_kernel(device, bf16)
    monkeypatch.setattr("runners.engine.experts.has_kernel", lambda *of: True)
    plain = experts()
    others = [experts_of(replace(MODEL, linear_bias=True)), experts_of(replace(MODEL, expert_ffn_size=20)), experts()]
    for expert in others[-1].experts.values():
        expert.tp = Parts()
    assert plain.may_run_at_once(device, bf16)
    assert not any(layer.may_run_at_once(device, bf16) for layer in others)
    in_bf16(plain)
    in_bf16(others[0])
    assert sorted(plain.stacked) == ["down", "gate", "up"] and not others[0].stacked
    assert len(plain._run(torch.randn(0, 32), torch.zeros(4, dtype=torch.int64))) == 0


def test_the_balance_loss_enters_gradients_by_its_weight_and_the_scale():
    """The router's gradient grows by weight times scale times that of the loss; outputs are the same."""
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    layer = experts()
    plain = layer(x)
    plain.sum().backward()
    alone = layer.router.weight.grad.clone()
    layer.zero_grad()
    layer.balance.weight, layer.balance.scale = 0.5, 4.0
    with_loss = layer(x)
    with_loss.sum().backward()
    torch.testing.assert_close(with_loss, plain)
    more = layer.router.weight.grad - alone
    layer.zero_grad()
    scores = layer.router(x)
    balance_loss(scores, scores.topk(2).indices).backward()
    torch.testing.assert_close(more, 2.0 * layer.router.weight.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("place", [0, 1])
def test_a_rank_keeps_its_experts(place):
    """The first or the second half of four."""
    group = Parts()
    group.place = place
    layer = experts()
    layer.share_out(group)
    assert list(layer.experts) == [["0", "1"], ["2", "3"]][place]


def losses_by_kernel(rank, port, problem, plan, kernel):
    """Of a rank where there is a kernel for all experts or none; how often it was used."""
    from runners.engine import experts as of_engine

    used, mixed = [], of_engine.Experts._mixed_at_once
    of_engine.has_kernel = lambda *of: kernel
    of_engine.Experts._mixed_at_once = lambda self, *of: used.append(self) or mixed(self, *of)
    return losses_on_cores(rank, port, problem, plan, OPTIONS), len(used)


def test_plans_learn_the_same_with_the_kernel():
    """As by experts one after another: under ZeRO-3, whose weights are away between layers, blocks computed again."""
    model = replace(MODEL, shared_experts=0)
    problem, plan = in_16_bits(*uniform(model, dp=2, zero=3, recompute="full"))
    (alone, never), (together, used) = (
        run_ranks(losses_by_kernel, 2, problem, plan, kernel)[0] for kernel in (False, True)
    )
    assert together == pytest.approx(alone, rel=1e-4) and never == 0 < used
