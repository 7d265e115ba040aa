"""Loss laws: the same numbers under every plan, on real ranks."""

import pytest
import torch

from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from runners.dist_runner import end_process
from runners.engine.data import samples_for
from runners.engine.layers import build_layers
from runners.engine.options import Options
from runners.engine.training import train
from tests.real_ranks import run_ranks
from tests.small_problems import routed_problem, small_cluster, small_model, small_plan

LLAMA = small_model(
    family="llama", kv_heads=2, gated_mlp=True, tied_embeddings=False, learned_positions=False, rms_norm=True,
    linear_bias=False, qkv_bias=False,
)  # fmt: skip


def run_rank(rank, port, problem, plan, options):
    """Losses of every step as this rank sees them."""
    losses = []
    train(
        problem,
        plan,
        rank,
        "127.0.0.1",
        port,
        options,
        on_loss=end_process,
        report=lambda result: losses.append(result["loss"]),
    )
    return losses


def plain_loop(rank, port, problem, options):
    """The same training as one would write it without any plan: whole batches, torch's own AdamW and clipping."""
    model, batch = problem.model, problem.batch
    layers = build_layers(model, range(model.layers), options.seed)
    samples = samples_for(model, batch.seq_len, options.seed)
    parameters = list(dict.fromkeys(layers.parameters()))
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": options.weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=options.learning_rate,
        betas=(0.9, 0.95),
    )
    losses = []
    for step in range(options.steps):
        x, targets = samples.batch(range(step * batch.global_batch, (step + 1) * batch.global_batch))
        for layer in layers.values():
            x = layer(x, targets) if layer is layers[str(model.layers - 1)] else layer(x)
        loss = x / batch.tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, options.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("model", [small_model(), LLAMA], ids=["gpt-tied", "llama"])
def test_loss_is_the_same_under_every_plan(model):
    """Routed plans of 2, 4 and 8 ranks (uneven layers, widths, shares) give a plain loop's losses to 1e-5."""
    options = Options(steps=20, learning_rate=3e-3, clip_norm=0.5)
    problem, _ = routed_problem(1, model=model)
    [expected] = run_ranks(plain_loop, 1, problem, options)
    assert expected[-1] < 0.9 * expected[0]
    for ranks in (1, 2, 4, 8):
        problem, plan = routed_problem(ranks, model=model, streams=2 if ranks == 4 else 1)
        for losses in run_ranks(run_rank, ranks, problem, plan, options):
            assert losses == pytest.approx(expected, rel=1e-5)


def test_int8_keeps_the_loss():
    """Activations, their gradients and weight gradients packed in int8: loss within 2 % after 200 steps."""
    options = Options(steps=200, learning_rate=3e-3)
    ends = []
    for compression in ("none", "int8"):
        problem = Problem(
            cluster=small_cluster(2, 1),
            model=small_model(blocks=2),
            batch=Batch(global_batch=16, seq_len=16, precision="fp32"),
        )
        plan = small_plan(
            problem.cluster,
            [(0, 2), (2, 4)],
            [[0], [1, 2]],
            [[0, 0], [0, 1], [0, 1], [0, 0]],
            micro_batch_size=4,
            compression=compression,
        )
        losses = run_ranks(run_rank, 3, problem, plan, options)[0]
        ends.append(sum(losses[-10:]) / 10)
    assert ends[0] < 3.2
    assert ends[1] != ends[0]
    assert ends[1] == pytest.approx(ends[0], rel=0.02)
