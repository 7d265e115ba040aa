"""Products in 8 bits: near those in 32, the same in every plan, of weights as they are."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from runners.engine import float8
from runners.engine.compilation import has_compiler
from runners.engine.float8 import BACKWARD, FORWARD, MULTIPLE, EightBits, fits, has_products, narrowed, turned
from runners.engine.options import Options
from runners.engine.sequence import Linear, column_products
from tests.real_ranks import run_ranks
from tests.runners.test_zero import run_rank, with_zero
from tests.small_problems import routed_problem, small_model

OPTIONS = Options(steps=6, learning_rate=3e-3, clip_norm=0.5)
WIDE = small_model(hidden_size=64, heads=4, kv_heads=4, head_dim=16, ffn_size=128)


def away(found, expected):
    """Relative distance of two tensors."""
    found, expected = found.detach().float(), expected.detach()
    return float((found - expected).norm() / expected.norm())


def layer_of(inner, outer, seed=0):
    """A linear layer with products in 8 bits."""
    torch.manual_seed(seed)
    layer = Linear(inner, outer)
    layer.eight_bits = EightBits(keeps=True)
    return layer


@pytest.mark.parametrize("rows", [1, 30, 64])
def test_outputs_and_gradients_are_those_of_32_bits_but_for_rounding(rows):
    """e4m3 keeps 3 bits of a number and e5m2 2: a rounded product is 2^-4 or 2^-3 off at most, on average a third."""
    layer = layer_of(48, 32)
    plain = nn.Linear(48, 32)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, rows, 48, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    gradient = torch.randn(2, rows, 32)
    (found, expected) = layer(x), plain(y)
    found.backward(gradient)
    expected.backward(gradient)
    assert 0.005 < away(found, expected) < 0.05
    assert 0.005 < away(x.grad, y.grad) < 0.08
    assert 0.005 < away(layer.weight.grad, plain.weight.grad) < 0.08
    assert torch.allclose(layer.bias.grad, plain.bias.grad, rtol=1e-5, atol=1e-5)
    assert layer.weight.grad.dtype == torch.float32


def test_layers_on_one_input_share_it():
    """Together as one by one, but for the order in which gradients of the input are added up."""
    layers = [layer_of(32, 16, seed) for seed in range(3)]
    layers[1].eight_bits = None  # one computes as it is
    x = torch.randn(2, 8, 32, requires_grad=True)
    together = column_products(layers, x, None, by_tokens=False)
    sum(y.square().sum() for y in together).backward()
    mine, x.grad = x.grad, None
    for layer, y in zip(layers, together, strict=True):
        alone = layer(x)
        assert torch.equal(alone, y)
        alone.square().sum().backward()
    assert torch.allclose(x.grad, mine, rtol=1e-4, atol=1e-4)


def test_nothing_is_a_number_too():
    """Zeros stay zeros; an expert without tokens has a gradient of zeros."""
    layer = layer_of(32, 16)
    out = layer(torch.zeros(4, 32))
    assert torch.equal(out, layer.bias.expand(4, 16))
    x = torch.zeros(0, 32, requires_grad=True)
    layer(x).sum().backward()
    assert torch.equal(layer.weight.grad, torch.zeros(16, 32)) and x.grad.shape == (0, 32)


def test_what_is_not_a_number_stays_so():
    """A loss that has run away is seen."""
    x = torch.randn(4, 32)
    x[1, 2] = torch.nan
    assert layer_of(32, 16)(x).isnan().any()


def test_factors_use_the_whole_format():
    """The largest number becomes the format's largest; a transposed matrix has zeros behind its rows."""
    for dtype in (FORWARD, BACKWARD):
        small = narrowed(torch.randn(20, 32) * 1e-6, dtype)
        assert float(small.values.float().abs().max()) == torch.finfo(dtype).max
        whole = turned(small)
        assert whole.values.shape == (32, 32) and not whole.values[:, 20:].float().any()
        assert torch.equal(whole.values[:, :20].float(), small.values.float().T)


@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD])
def test_no_number_of_16_bits_overflows(dtype):
    """However the largest is rounded on its way to 8 bits."""
    for scale in torch.logspace(-20, 20, 2000):
        row = torch.tensor([[float(scale), -0.3 * float(scale)] * MULTIPLE]).bfloat16()
        assert narrowed(row, dtype).values.float().isfinite().all(), float(scale)


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(not has_compiler(), reason="inductor needs a C++ compiler")
def test_the_compiler_s_kernels_are_the_eager_ones():
    """To a step of 8 bits, in which rounding once or twice may differ; transposed copies to the bit."""
    x = torch.randn(50, 32).bfloat16()
    (values, factor), (eager, eager_factor) = (
        make(x, FORWARD) for make in (float8._compiled(float8._cast), float8._cast)
    )
    assert factor == eager_factor
    assert torch.allclose(values.float(), eager.float(), rtol=1 / 8, atol=2**-9)
    bits = eager.view(torch.uint8)
    assert torch.equal(float8._compiled(float8._turn)(bits), float8._turn(bits))


def test_widths_that_units_do_not_take():
    """A layer of 24 inputs computes in 16 bits."""
    assert fits(torch.empty(32, 48)) and not fits(torch.empty(32, 24)) and not fits(torch.empty(8, 32))


def test_a_weight_is_made_narrow_once_until_it_changes():
    """What is kept is of the weight as it was; forgotten, it is made anew."""
    layer = layer_of(32, 16)
    before = layer(torch.ones(1, 32))
    with torch.no_grad():
        layer.weight.mul_(2)
        layer.bias.mul_(2)
    float8.forget([nn.Sequential(layer)])
    assert torch.allclose(layer(torch.ones(1, 32)), 2 * before)


def test_this_machine_has_products():
    """torch's CPU ones; without any a run says so and computes in 16 bits."""
    assert has_products(torch.device("cpu"))


@pytest.fixture(scope="module")
def alone():
    """Losses of one rank, by precision."""
    return {
        precision: list(
            run_ranks(run_rank, 1, *routed_problem(1, model=WIDE, precision=precision), OPTIONS)[0][0].values()
        )
        for precision in ("bf16", "fp8")
    }


def test_eight_bits_learn_as_sixteen(alone):
    """Other numbers, the same course: losses within a per cent, and falling."""
    assert alone["fp8"] != alone["bf16"]
    assert alone["fp8"] == pytest.approx(alone["bf16"], rel=0.01)
    assert alone["fp8"][-1] < alone["fp8"][0] - 0.1


@pytest.mark.parametrize("zero", [0, 3])
def test_every_plan_has_the_losses_of_one_rank(alone, zero):
    """Stages, shares, and weights that are fetched for every product: the same numbers are rounded, the same way.

    Sums of gradients in another order move weights by 1e-8, and some of them over the border between two 8-bit numbers.
    """
    problem, plan = routed_problem(4, model=WIDE, precision="fp8")
    for found, _ in run_ranks(run_rank, 4, problem, with_zero(plan, zero), OPTIONS):
        assert list(found.values()) == pytest.approx(alone["fp8"], rel=2e-3)


def test_recomputed_blocks_have_the_same_losses(alone):
    """Backward multiplies what forward did."""
    problem, plan = routed_problem(1, model=WIDE, precision="fp8")
    plan = replace(plan, stages=tuple(replace(stage, recompute="full") for stage in plan.stages))
    [(found, _)] = run_ranks(run_rank, 1, problem, plan, OPTIONS)
    assert list(found.values()) == pytest.approx(alone["fp8"], rel=1e-6)
