"""Documents that share a sample train as each by itself, under every dimension that an engine splits."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from polygon.domain.errors import InputError
from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.domain.uniform import ParallelConfig, uniform_plan
from runners.data.choice import DataChoice
from runners.data.mixture import Together
from runners.data.packing import PackedSamples
from runners.data.samples import TextSamples, positions_of
from runners.dist_runner import end_process
from runners.engine.documents import documents_at
from runners.engine.layers import build_layers
from runners.engine.options import Options
from runners.engine.run import train
from tests.patience import PATIENCE_S
from tests.real_ranks import run_ranks
from tests.small_problems import routed_problem, small_cluster, small_model

SEQ_LEN, BATCH, STEPS = 24, 8, 3
GPT = small_model()
LLAMA = small_model(
    family="llama", kv_heads=2, gated_mlp=True, tied_embeddings=False, learned_positions=False, rms_norm=True,
    linear_bias=False, qkv_bias=False, query_key_norm="head",
)  # fmt: skip
MOE = replace(LLAMA, experts=4, experts_per_token=2, expert_ffn_size=32, shared_experts=1)
OPTIONS = Options(steps=STEPS, learning_rate=3e-3, clip_norm=0.5, timeout_s=PATIENCE_S)


def packed():
    """Samples of one to five documents of 3 to 24 tokens, some not full."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, SEQ_LEN, 80)
    tokens = rng.integers(0, 256, int(lengths.sum()))
    return PackedSamples(tokens=tokens, documents=np.cumsum([0, *lengths]), seq_len=SEQ_LEN, seed=0)


def alone(samples, number):
    """Every document of a sample, or what the sample has of it: inputs and targets, each in a batch of its own."""
    [inputs], [targets] = samples.batch(range(number, number + 1))
    [places] = samples.positions(range(number, number + 1))
    first = (places == 0).nonzero()[:, 0].tolist()
    return [(inputs[None, a:b], targets[None, a:b]) for a, b in zip(first, [*first[1:], SEQ_LEN], strict=True)]


def forward(layers, model, inputs, targets, *documents):
    x = inputs
    for layer in range(model.layers - 1):
        x = layers[str(layer)](x, *documents)
    return layers[str(model.layers - 1)](x, targets)


WINDOWS = replace(LLAMA, window=5, attention_pattern=("window", "full"))


@pytest.mark.parametrize("model", [GPT, LLAMA, MOE, WINDOWS], ids=["learned positions", "rotary", "experts", "windows"])
def test_loss_and_gradients_are_those_of_documents_by_themselves(model):
    """To 1e-5 of the norm of every gradient."""
    samples, numbers = packed(), range(4)
    layers = build_layers(model, range(model.layers), 0)
    positions = positions_of(samples, numbers)
    loss = forward(layers, model, *samples.batch(numbers), documents_at(positions, causal=model.causal))
    loss.backward()
    found = [parameter.grad.clone() for parameter in layers.parameters()]
    layers.zero_grad()
    expected = sum(forward(layers, model, *one) for number in numbers for one in alone(samples, number))
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for (name, parameter), gradient in zip(layers.named_parameters(), found, strict=True):
        if not name.endswith("key.bias"):  # it changes no attention: its gradient is rounding alone
            assert (gradient - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name


def apart_on_rank(rank, port, model):
    """Losses and norms of a plain loop in which no two documents meet."""
    samples = packed()
    layers = build_layers(model, range(model.layers), OPTIONS.seed)
    parameters = list(layers.parameters())
    decayed = [{"params": [p for p in parameters if (p.ndim > 1) == many]} for many in (True, False)]
    decayed[0]["weight_decay"], decayed[1]["weight_decay"] = OPTIONS.weight_decay, 0.0
    optimizer = torch.optim.AdamW(decayed, lr=OPTIONS.learning_rate, betas=(0.9, 0.95))
    found = []
    for step in range(STEPS):
        numbers = range(step * BATCH, (step + 1) * BATCH)
        ones = [one for number in numbers for one in alone(samples, number)]
        loss = sum(forward(layers, model, *one) for one in ones) / samples.targets(numbers)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, OPTIONS.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def run_rank(rank, port, problem, plan):
    """Loss and gradient's norm of every step as this rank sees them."""
    found = []
    train(
        *(problem, plan, rank, "127.0.0.1", port, OPTIONS),
        on_loss=end_process,
        report=lambda result: found.append((result["loss"], result["gradient_norm"])),
        samples=packed(),
    )
    return found


def uniform(model, **config):
    config = ParallelConfig(micro_batch_size=2, **config)
    batch = Batch(global_batch=BATCH, seq_len=SEQ_LEN, precision="fp32")
    problem = Problem(cluster=small_cluster(config.devices), model=model, batch=batch)
    return problem, uniform_plan(problem, config)


PLANS = {
    "one process": (GPT, {}),
    "pipeline of three": (GPT, {"pp": 3}),
    "interleaved, recomputed": (LLAMA, {"pp": 2, "chunks": 2, "recompute": "full"}),
    "tensor parallel, attention recomputed": (LLAMA, {"tp": 2, "recompute": "selective"}),
    "tensor parallel by tokens, pipeline": (GPT, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    "context parallel": (GPT, {"cp": 2, "dp": 2}),
    "context parallel, rotary, ZeRO-3": (LLAMA, {"cp": 2, "zero": 3}),
    "context parallel, gathered keys": (LLAMA, {"cp": 8}),
    "experts": (MOE, {"dp": 2, "ep": 2}),
}


@pytest.fixture(scope="module")
def expected():
    """Losses and norms by model, each computed once."""
    known = {}

    def of(model):
        if model not in known:
            [known[model]] = run_ranks(apart_on_rank, 1, model)
        return known[model]

    return of


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_trains_as_if_documents_never_met(name, expected):
    """Losses and norms of three steps to 1e-5 of a loop that knows of no packing; later ones follow from gradients."""
    model, config = PLANS[name]
    problem, plan = uniform(model, **config)
    for found in run_ranks(run_rank, plan.world_size, problem, plan):
        for one, wanted in zip(found, expected(model), strict=True):
            assert one == pytest.approx(wanted, rel=1e-5)


def test_what_fills_a_round_of_validation_up_is_one_document():
    """Of several sets as of one; where none is packed, nothing is said."""
    samples = packed()
    last = len(samples) - 1
    positions = samples.positions_or_fill(last, 3)
    assert positions[0].equal(samples.positions(range(last, last + 1))[0])
    assert positions[1:].tolist() == 2 * [list(range(SEQ_LEN))]
    plain = TextSamples(tokens=np.arange(100), seq_len=SEQ_LEN, seed=0)
    assert positions_of(plain, range(2)) is None and plain.positions_or_fill(0, 2) is None
    both = Together(seed=0, parts=[samples, plain])
    assert both.positions(range(len(both))).shape == (len(both), SEQ_LEN)


def test_own_layers_take_no_packed_documents(tmp_path):
    """They get one tensor: refused in one line, before the model is read."""
    problem, plan = routed_problem(1)
    options = replace(OPTIONS, model_file=tmp_path / "own.py", data=DataChoice(packing="documents"))
    with pytest.raises(InputError, match="--packing: found 'documents', expected stream"):
        train(problem, plan, 0, "127.0.0.1", 0, options, on_loss=end_process)
