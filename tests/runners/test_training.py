"""Loss laws: the same numbers under every plan, on real ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from polygon.domain.model import Batch
from polygon.domain.plan import Problem, Worker
from runners.data.sources import samples_for
from runners.dist_runner import end_process
from runners.engine.layers import build_layers
from runners.engine.options import Options
from runners.engine.rank_layout import Layout
from runners.engine.run import train
from tests.real_ranks import run_ranks
from tests.routed_plans import ranked
from tests.small_problems import routed_problem, small_cluster, small_model, small_plan

LLAMA = small_model(
    family="llama", kv_heads=2, gated_mlp=True, tied_embeddings=False, learned_positions=False, rms_norm=True,
    linear_bias=False, qkv_bias=False, experts=3, experts_per_token=2, expert_ffn_size=32, shared_experts=1,
    dense_blocks=2,
)  # fmt: skip
OPTIONS = Options(steps=8, learning_rate=3e-3, clip_norm=0.5)


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


def plain_losses(layers, optimizer, problem, options, on_step=lambda: None):
    """Losses of one process that takes whole batches."""
    model, batch = problem.model, problem.batch
    samples, losses = samples_for(model, batch.seq_len, options.seed), []
    for step in range(options.steps):
        x, targets = samples.batch(range(step * batch.global_batch, (step + 1) * batch.global_batch))
        for layer in layers.values():
            x = layer(x, targets) if layer is layers[str(model.layers - 1)] else layer(x)
        loss = x / targets.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(layers.parameters(), options.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        on_step()
        losses.append(loss.item())
    return losses


def plain_loop(rank, port, problem, options):
    """The same training as one would write it without any plan: whole batches, torch's own AdamW and clipping."""
    layers = build_layers(problem.model, range(problem.model.layers), options.seed)
    parameters = list(layers.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": options.weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=options.learning_rate,
        betas=(0.9, 0.95),
    )
    return plain_losses(layers, optimizer, problem, options)


@pytest.fixture(scope="module")
def reference():
    """Losses of a plain loop over the GPT."""
    problem, _ = routed_problem(1)
    [losses] = run_ranks(plain_loop, 1, problem, OPTIONS)
    assert losses[-1] < 0.9 * losses[0]
    return losses


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_loss_is_the_same_under_every_plan(reference, ranks):
    """Routed plans of 2, 4 and 8 ranks (uneven layers, widths, shares) give a plain loop's losses to 1e-5."""
    problem, plan = routed_problem(ranks, streams=2 if ranks == 4 else 1)
    for losses in run_ranks(run_rank, ranks, problem, plan, OPTIONS):
        assert losses == pytest.approx(reference, rel=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_plan_s_own_order_keeps_the_loss(reference, seed):
    """Eight ranks in any order that ends: micro-batches overtake one another, on both ways."""
    problem, plan = routed_problem(8)
    plan = ranked(plan, np.random.default_rng(seed))
    for losses in run_ranks(run_rank, 8, problem, plan, replace(OPTIONS, steps=5)):
        assert losses == pytest.approx(reference[:5], rel=1e-5)


def test_overlap_changes_no_number(reference):
    """Eight ranks that communicate only while they do not compute (no lookahead) get on, with the same losses."""
    options = replace(OPTIONS, steps=4, lookahead=0)
    for losses in run_ranks(run_rank, 8, *routed_problem(8), options):
        assert losses == pytest.approx(reference[:4], rel=1e-5)


def steps_of(rank, port, problem, plan, options):
    """What every step reports on this rank."""
    found = []
    train(problem, plan, rank, "127.0.0.1", port, options, on_loss=end_process, report=found.append)
    return found


def test_a_worker_without_others_sums_nothing():
    """Where a stage has one worker, no time goes to sums; where it has several, in every step."""
    for ranks in (2, 4):
        problem, plan = routed_problem(ranks)
        problem = replace(problem, model=replace(problem.model, tied_embeddings=False))
        others = [len(stage.workers) > 1 for stage in plan.stages for worker in stage.workers]
        assert not all(others)
        for steps, sums in zip(
            run_ranks(steps_of, ranks, problem, plan, replace(OPTIONS, steps=2)), others, strict=True
        ):
            assert [step["seconds_by_kind"].get("reduce", 0.0) > 0 for step in steps] == [sums, sums]


def test_speed_is_the_whole_batch_over_the_step_s_seconds():
    """On each of two ranks: tokens a second, and the idle part is what neither computes nor updates."""
    problem, plan = routed_problem(2)
    for steps in run_ranks(steps_of, 2, problem, plan, replace(OPTIONS, steps=3)):
        assert len(steps) == 3
        for step in steps:
            assert step["tokens_per_s"] * step["seconds"] == pytest.approx(problem.batch.tokens)
            assert 0 <= step["idle"] < 1


def test_every_rank_finds_the_norm_in_whole_gradients(reference):
    """Data parallel over regions of unequal widths and shares, where no norm is exchanged: clipped by the same one."""
    problem, _ = routed_problem(4)
    problem = replace(problem, cluster=small_cluster(1, 2))
    plan = small_plan(problem.cluster, [(0, 6)], [[0, 1, 2]], [[0], [1], [0], [2], [0], [1], [0], [0]])
    assert Layout(problem, plan).gradient_everywhere
    found = run_ranks(run_rank, 3, problem, plan, OPTIONS)
    assert found[0] == pytest.approx(reference, rel=1e-5) and found[0] == found[1] == found[2]


def test_llama_and_experts_train_the_same_under_a_plan():
    """Rotary, grouped heads, gates, untied head and routed experts, on four ranks, give a plain loop's losses."""
    options = replace(OPTIONS, steps=6)
    problem, plan = routed_problem(4, model=LLAMA)
    [expected] = run_ranks(plain_loop, 1, problem, options)
    assert expected[-1] < expected[0]
    assert run_ranks(run_rank, 4, problem, plan, options)[0] == pytest.approx(expected, rel=1e-5)


def test_image_model_trains_the_same_under_a_plan():
    """A vision transformer on handwritten digits, on two ranks, gives a plain loop's losses, and they fall."""
    vit = small_model(
        family="vit", vocab_size=10, image_size=8, patch_size=2, channels=1, max_seq_len=17, causal=False,
        tied_embeddings=False,
    )  # fmt: skip
    problem, plan = routed_problem(2, model=vit, seq_len=17)
    [expected] = run_ranks(plain_loop, 1, problem, replace(OPTIONS, steps=100))
    assert sum(expected[-10:]) < 0.9 * sum(expected[:10])
    assert run_ranks(run_rank, 2, problem, plan, OPTIONS)[1] == pytest.approx(expected[: OPTIONS.steps], rel=1e-5)


@pytest.mark.parametrize("reduction", ["sharded-server", "central-server"])
def test_parameter_servers_give_the_same_loss(reference, reduction, tmp_path):
    """Owners that update and hand out weights, over several regions; another plan resumes from their state."""
    problem, plan = routed_problem(8)
    options = replace(OPTIONS, steps=5, checkpoint_dir=tmp_path)
    for losses in run_ranks(run_rank, 8, problem, replace(plan, reduction=reduction), options):
        assert losses == pytest.approx(reference[:5], rel=1e-5)
    [rest] = run_ranks(run_rank, 1, *routed_problem(1), replace(options, steps=7, resume=True))
    assert rest == pytest.approx(reference[5:7], rel=1e-5)


def tensor_parallel_plan(cluster, first, last):
    """Two stages; `first` and `last` are the devices of each worker of the first and the last stage."""
    plan = small_plan(cluster, [(0, 3), (3, 6)], [[0], [1]], [[0, 0]], micro_batch_size=4)
    pool_of = {d: p.index for p in cluster.pools for d in range(p.first_device, p.first_device + p.devices)}
    stages = tuple(
        replace(stage, workers=tuple(Worker(pool=pool_of[devices[0]], devices=devices) for devices in workers))
        for stage, workers in zip(plan.stages, (first, last), strict=True)
    )
    routes = np.array([[m % len(first), m % len(last)] for m in range(4)])
    spans = tuple((len(stage.workers),) * len(stage.workers) for stage in stages)
    return replace(plan, stages=stages, routes=routes, spans=spans)


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (((0, 1),), ((2, 3), (4, 5))),
        (((0, 1), (2,)), ((4, 5),)),
    ],
    ids=["equal degrees", "unequal degrees in a stage and for the tied weight"],
)
def test_tensor_parallel_workers_give_the_same_loss(reference, first, last, tmp_path):
    """Slices of heads, MLPs and vocabulary on the devices of a worker; resumed by a plan without any slices."""
    problem, whole = routed_problem(1)
    problem = replace(problem, cluster=small_cluster(4, 2))
    options = replace(OPTIONS, steps=5, checkpoint_dir=tmp_path)
    plan = tensor_parallel_plan(problem.cluster, first, last)
    if len(last) == 2:
        plan = replace(plan, stages=tuple(replace(stage, zero=1) for stage in plan.stages))
    for losses in run_ranks(run_rank, plan.world_size, problem, plan, options):
        assert losses == pytest.approx(reference[:5], rel=1e-5)
    [rest] = run_ranks(run_rank, 1, routed_problem(1)[0], whole, replace(options, steps=7, resume=True))
    assert rest == pytest.approx(reference[5:7], rel=1e-5)


@pytest.mark.parametrize(
    ("precision", "recompute", "tolerance"),
    [("fp32", "full", 1e-6), ("bf16", "none", 0.01), ("fp16", "selective", 0.01)],
)
def test_precision_recomputation_and_offload_keep_the_loss(reference, precision, recompute, tolerance):
    """Recomputation and offloading change nothing; half precision (fp16 with loss scaling) stays within 1 % of fp32."""
    options = replace(OPTIONS, offload_optimizer=precision == "fp32")
    problem, plan = routed_problem(2, precision=precision)
    plan = replace(plan, stages=tuple(replace(stage, recompute=recompute) for stage in plan.stages))
    losses = run_ranks(run_rank, 2, problem, plan, options)[0]
    assert losses == pytest.approx(reference, rel=tolerance)


def test_int8_keeps_the_loss():
    """Activations, their gradients and weight gradients packed in int8: loss within 2 % after 100 steps."""
    options = Options(steps=100, learning_rate=3e-3)
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
