"""Every degree really splits the work, and none changes the losses."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from polygon.domain.errors import InputError
from polygon.formats.files import write_plan
from polygon.formats.schema import check
from runners.dist_runner import end_process
from runners.engine.layers import build_layers
from runners.engine.run import train
from runners.recipes.backends import Job
from runners.recipes.backends.engine_backend import options_of, problem_and_plan
from runners.recipes.data import training_and_validation
from runners.recipes.recipe_schema import Recipe
from tests.nightly import at_night
from tests.real_ranks import run_ranks

STEPS, BALANCE = 6, 0.02
VALIDATED = 11
"""Samples of a validation; no split of batches of 8 divides them."""
DENSE = {
    "blocks": 2, "hidden_size": 32, "heads": 4, "kv_heads": 2, "ffn_size": 64, "vocab_size": 256, "max_seq_len": 64,
}  # fmt: skip
MOE = DENSE | {"experts": 4, "experts_per_token": 2, "expert_ffn_size": 32, "shared_experts": 1}


def job_of(change, parallel, *, steps=STEPS, micro_batch=2, **more):
    """A recipe of a small Qwen2.5 shape on English text."""
    data = {
        "name": "degrees",
        "model": {"source": "qwen2.5-3b", "change": change},
        "batch": {"global_batch": 8, "micro_batch": micro_batch, "seq_len": 32},
        "parallel": parallel,
        "validation": {"every": steps // 2 or 1, "fraction": 0.01, "samples": VALIDATED},
        "optimizer": {"learning_rate": 0.003, "balance": BALANCE if "experts" in change else 0.0},
        "steps": steps,
        **more,
    }
    return Job(check(Recipe, data), Path(), Path(), "cpu")


def run_rank(rank, port, job):
    """What every step measured on this rank, and how many parameters are here."""
    problem, plan = problem_and_plan(job)
    steps, here = [], []
    samples, held = training_and_validation(job.recipe, problem.model, problem.batch.seq_len, job.folder)
    train(
        problem, plan, rank, "127.0.0.1", port, options_of(job, log_dir=None), on_loss=end_process,
        report=steps.append, on_start=lambda training: here.append(sum(len(b.vector) for b in training.buckets)),
        samples=samples, validation=held,
    )  # fmt: skip
    return steps, here[0]


def plain_loop(rank, port, job):
    """Whole batches on one process; the balance of experts as its definition says, from the routers' scores."""
    problem, _ = problem_and_plan(job)
    model, batch, options = problem.model, problem.batch, options_of(job)
    layers = build_layers(model, range(model.layers), options.seed)
    scores = []
    for name, module in layers.named_modules():
        if name.endswith("router"):
            module.register_forward_hook(lambda module, inputs, output: scores.append(output))
    samples, held = training_and_validation(job.recipe, model, batch.seq_len, job.folder)

    def forward(numbers, samples):
        x, targets = samples.batch(numbers)
        for layer in layers.values():
            x = layer(x, targets) if layer is layers[str(model.layers - 1)] else layer(x)
        return x, targets

    parameters = list(dict.fromkeys(layers.parameters()))
    decayed = [[p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim == 1]]
    groups = [{"params": decayed[0], "weight_decay": options.weight_decay}, {"params": decayed[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95))
    losses, validated = [], []
    for step in range(options.steps):
        x, targets = forward(range(step * batch.global_batch, (step + 1) * batch.global_batch), samples)
        loss, unequal = x / targets.numel(), []
        for layer_scores in scores:
            for sequence in layer_scores:
                chosen = sequence.topk(model.experts_per_token).indices
                busy = torch.stack([(chosen == e).sum() for e in range(model.experts)]) / chosen.numel()
                unequal.append(model.experts * (busy * sequence.softmax(-1).mean(0)).sum())
        scores.clear()
        whole = loss + options.balance * sum(unequal) / len(targets) if unequal else loss
        whole.backward()
        torch.nn.utils.clip_grad_norm_(parameters, options.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % options.validate_every == 0:
            with torch.no_grad():
                parts = [forward(range(number, number + 1), held) for number in range(VALIDATED)]
            scores.clear()
            validated.append(sum(x.item() for x, _ in parts) / sum(targets.numel() for _, targets in parts))
    return losses, validated


@pytest.fixture(scope="module")
def plain():
    """Losses of the plain loop, dense and with experts."""
    found = {}
    for name, change in (("dense", DENSE), ("moe", MOE)):
        [found[name]] = run_ranks(plain_loop, 1, job_of(change, {}))
    return found


def agree(steps, expected):
    """Losses of training and of validation are those of the plain loop."""
    losses, validated = expected
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=1e-5)
    found = [step["validation_loss"] for step in steps if "validation_loss" in step]
    assert found == pytest.approx(validated, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        ("dense", {"cp": 4}),
        ("dense", {"cp": 8}),  # more than heads: keys are gathered
        ("dense", {"tp": 2, "cp": 2, "zero": 3, "sequence": True}),
        ("moe", {"tp": 2, "cp": 2, "ep": 2}),
        ("moe", {"tp": 2, "pp": 2, "sequence": True}),
        ("moe", {"dp": 2, "cp": 2, "ep": 4}),
        ("moe", {"dp": 2, "pp": 2, "ep": 2, "zero": 3}),
        *at_night(("dense", {"tp": 2, "cp": 2, "zero": 1})),
    ],
)
def test_no_degree_changes_the_losses(plain, kind, parallel):
    """Data, tensor, pipeline, context and expert parallelism, together, give a plain loop's losses to 1e-5.

    So does the loss of a validation on samples that no split of the batch divides: each counts once.
    """
    job = job_of(DENSE if kind == "dense" else MOE, parallel)
    world_size = job.recipe.parallel.world_size
    for steps, _ in run_ranks(run_rank, world_size, job):
        agree(steps, plain[kind])
    losses, validated = plain[kind]
    assert losses[-1] < 0.95 * losses[0] and len(validated) == 2


def test_degrees_resume_from_one_another(plain, tmp_path):
    """Saved by ranks that share out experts, resumed on one, then on parts of sequences: losses go on as they were."""
    ways = [(2, {"dp": 2, "ep": 2, "zero": 1}), (4, {}), (STEPS, {"tp": 2, "cp": 2, "ep": 2})]
    losses = []
    for steps, parallel in ways:
        saved = {"folder": str(tmp_path), "resume": bool(losses)}
        job = job_of(MOE, parallel, steps=steps, checkpoint=saved)
        measured, _ = run_ranks(run_rank, job.recipe.parallel.world_size, job)[0]
        losses += [step["loss"] for step in measured]
    assert losses == pytest.approx(plain["moe"][0], rel=1e-5)


def test_a_recipe_takes_a_plan(plain, tmp_path):
    """With backend plan the file says who does what: here uneven stages, one of two workers with unequal shares."""
    problem, plan = problem_and_plan(job_of(DENSE, {"dp": 2, "pp": 2}))
    first, second = plan.stages
    stages = (replace(first, last_layer=3, workers=first.workers[:1]), replace(second, first_layer=3))
    routes = [[0, 0], [0, 0], [0, 1], [0, 0]]
    uneven = replace(plan, stages=stages, routes=np.array(routes), spans=((1,), (3, 1)))
    write_plan(tmp_path / "plan.json", problem, uneven)
    job = job_of(DENSE, {}, backend="plan", plan=str(tmp_path / "plan.json"))
    for steps, _ in run_ranks(run_rank, 3, job):
        agree(steps, plain["dense"])


def test_context_parallelism_splits_tokens_and_sends_each_to_its_heads():
    """A rank of cp 4 has a quarter of the tokens, all parameters, and sends 3/4 of its q, k, v and result."""
    job = job_of(DENSE, {"cp": 4}, steps=1)
    for [step], parameters in run_ranks(run_rank, 4, job):
        model = problem_and_plan(job)[0].model
        assert step["tokens_here"] == 8 * 32 // 4
        assert parameters == model.parameters
        # Two kv heads of four ranks are sent twice: 4 q, 4 k, 4 v heads there and 4 back, and so for the gradients.
        per_token = 4 * model.heads * model.head_dim * 4
        assert step["exchanged_bytes"] == {"context": 2 * model.blocks * step["tokens_here"] * per_token * 3 // 4}


def test_expert_parallelism_splits_experts():
    """A rank of ep 4 has one of four experts a block, and rows go to their experts and back, in both directions."""
    job = job_of(MOE, {"dp": 4, "ep": 4}, steps=1)
    model = problem_and_plan(job)[0].model
    expert = 3 * model.hidden_size * model.expert_ffn_size
    row = 4 * model.hidden_size
    ranks = run_ranks(run_rank, 4, job)
    for [step], parameters in ranks:
        assert parameters == model.parameters - model.blocks * 3 * expert
        assert step["tokens_here"] == 8 * 32 // 4
    # Every choice of an expert elsewhere is a row that goes there and comes back, and so do both gradients; before
    # them a count for each of the three other ranks.
    rows = 8 * 32 * model.experts_per_token * model.blocks
    sent = sum(step["exchanged_bytes"]["experts"] for [step], _ in ranks)
    assert 0.4 * rows * 4 * row < sent < rows * 4 * row
    assert (sent - 4 * model.blocks * 3 * 8) % (4 * row) == 0


def test_pipeline_carries_each_token_once():
    """With cp 2 each rank hands on its own tokens alone: the boundary carries as many bytes as without."""
    whole = run_ranks(run_rank, 2, job_of(DENSE, {"pp": 2}, steps=1))
    parts = run_ranks(run_rank, 4, job_of(DENSE, {"pp": 2, "cp": 2}, steps=1))
    one_way = 8 * 32 * 32 * 4
    boundary = {rank: sum(n for peer, n in steps[0]["sent_bytes"].items()) for rank, (steps, _) in enumerate(parts)}
    assert sum(whole[0][0][0]["sent_bytes"].values()) == one_way
    assert boundary[0] == boundary[1] == one_way // 2


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"cp": 3}, "expected a multiple of the cp degree 3"),
        ({"dp": 2, "ep": 2}, "expected a divisor of the model's 0 experts"),
        ({"sequence": True}, "parallel.sequence: found true with tp 1"),
        ({"tp": 2, "cp": 2, "sequence": True}, "found 15 tokens on a device, expected a multiple of the tp degree 2"),
    ],
)
def test_degrees_that_cannot_be_are_refused(parallel, message):
    """Degrees that do not divide what they split are refused before anything starts."""
    seq_len = 30 if "15 tokens" in message else 32
    batch = {"global_batch": 8, "micro_batch": 2, "seq_len": seq_len}
    with pytest.raises(InputError, match=message):
        problem_and_plan(job_of(DENSE, parallel, batch=batch))
