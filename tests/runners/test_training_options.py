"""Choices that must not change what is trained, and those that change it as torch's own do."""

from dataclasses import replace

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from polygon.domain.errors import InputError
from runners.engine.checkpoint import step_directory
from runners.engine.layers import build_layer, build_layers, layer_name
from runners.engine.options import Options
from runners.engine.run import train
from runners.engine.saved_weights import SavedWeights
from runners.recipes.tensor_bytes import TensorBytes
from tests.real_ranks import run_ranks
from tests.runners.test_training import plain_losses, run_rank
from tests.small_problems import routed_problem, small_model

STEPS = 6
OPTIONS = Options(steps=STEPS, learning_rate=3e-3, clip_norm=0.5, decay="all", average=0.8)


def plain_loop(problem, options):
    """torch alone: its AdamW with decay on everything, its average; losses and averaged weights."""
    model = problem.model
    layers = build_layers(model, range(model.layers), options.seed)
    averaged = AveragedModel(layers, multi_avg_fn=get_ema_multi_avg_fn(options.average))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=options.weight_decay)
    losses = plain_losses(layers, optimizer, problem, options, lambda: averaged.update_parameters(layers))
    named = {
        f"{layer_name(model, int(number))}.{name}": parameter.detach()
        for number, layer in averaged.module.items()
        for name, parameter in layer.named_parameters()
    }
    return losses, named


def test_average_and_decay_are_torchs_and_compiled_blocks_and_chunks_change_nothing(tmp_path):
    """ZeRO-1 on four ranks, then compiled blocks and logits in chunks on one: losses and average of a plain loop."""
    problem, plan = routed_problem(4)
    losses, expected = plain_loop(problem, OPTIONS)
    plan = replace(plan, stages=tuple(replace(stage, zero=1) for stage in plan.stages))
    first = replace(OPTIONS, steps=3, checkpoint_dir=tmp_path)
    found = run_ranks(run_rank, 4, problem, plan, first)[0]
    rest = replace(first, steps=STEPS, resume=True, compile="aot_eager", loss_chunk=7)
    found += run_ranks(run_rank, 1, *routed_problem(1), rest)[0]
    assert found == pytest.approx(losses, rel=1e-5)
    now, average = (SavedWeights(step_directory(tmp_path, STEPS), average=which) for which in (False, True))
    for name, weight in expected.items():
        torch.testing.assert_close(average.tensor(name), weight, rtol=1e-4, atol=1e-5)
    name = "blocks.0.mlp.up.weight"
    assert (now.tensor(name) - expected[name]).abs().max() > 1e-3
    with pytest.raises(InputError, match="found no average"):
        run_ranks(run_rank, 1, *routed_problem(1), Options(steps=1, checkpoint_dir=tmp_path / "plain"))
        SavedWeights(step_directory(tmp_path / "plain", 1), average=True).tensor(name)


def test_ranks_may_save_where_they_like_but_all_or_none(tmp_path):
    """They wait for one another's files: one that saves none would be waited for."""
    here, there = (Options(checkpoint_dir=tmp_path / name).shared() for name in ("here", "there"))
    assert here == there != Options().shared()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_in_chunks_take_their_part_of_the_memory(dtype):
    """The same loss and gradients, at a sixth of the peak, where the vocabulary is what is large."""
    model = small_model(vocab_size=8000, tied_embeddings=False)
    head = build_layer(model, model.layers - 1, 0)
    x, targets = torch.randn(1, 512, 32), torch.randint(8000, (1, 512))
    targets[0, 3] = -100
    found = []
    for head.chunk in (0, 64):
        head.zero_grad()
        rows = x.clone().requires_grad_()
        with TensorBytes() as tensors, torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = head(rows, targets)
            loss.backward()
        found.append((loss.detach(), rows.grad, head.output.weight.grad, tensors.peak_bytes))
    (*whole, most), (*chunked, least) = found
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(whole, chunked, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(one.abs().max()))
    assert whole[0] == pytest.approx(float(chunked[0]), rel=1e-5)
    assert least < most / 6


def test_what_cannot_be_compiled_is_refused():
    """Before anything starts; and options that are none."""
    problem, plan = routed_problem(1)
    stages = tuple(replace(stage, zero=3) for stage in plan.stages)
    with pytest.raises(InputError, match=r"zero: found 3, expected 0, 1 or 2 \(with --compile\)"):
        train(problem, replace(plan, stages=stages), 0, "127.0.0.1", 1, Options(compile="inductor"), on_loss=print)
    with pytest.raises(InputError, match=r"--compile: found 'inductr', expected 'inductor' \(nearest\)"):
        train(problem, plan, 0, "127.0.0.1", 1, Options(compile="inductr"), on_loss=print)
    for change, message in (
        ({"average": 1.0}, "--average"),
        ({"decay": "none"}, "--decay"),
        ({"loss_chunk": -1}, "-1"),
    ):
        with pytest.raises(InputError, match=message):
            replace(OPTIONS, **change)
