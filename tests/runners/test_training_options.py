"""Choices that must not change what is trained, and those that change it as torch's own do."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from polygon.cost.autograd_memory import Way, autograd_memory
from polygon.domain.errors import InputError
from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.formats import catalogue
from runners.dist_runner import end_process
from runners.engine.checkpoint import step_directory
from runners.engine.compilation import compiler_of
from runners.engine.layers import build_layer, build_layers, layer_name, tune
from runners.engine.options import Options
from runners.engine.run import train
from runners.engine.saved_weights import SavedWeights
from runners.recipes.tensor_bytes import TensorBytes
from tests.real_ranks import run_ranks
from tests.runners.test_training import plain_losses, run_rank
from tests.small_problems import routed_problem, small_cluster, small_model, small_plan

STEPS = 6
GATED = small_model(family="llama", gated_mlp=True, rms_norm=True, learned_positions=False, linear_bias=False)
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


def test_the_runtime_says_whether_blocks_are_compiled():
    """polygon-compiled: by torch's inductor; the option goes before it."""
    eager, compiled = catalogue.runtime("polygon"), catalogue.runtime("polygon-compiled")
    assert compiler_of(eager, Options()) is None and compiler_of(compiled, Options()) == "inductor"
    assert compiler_of(eager, Options(compile="aot_eager")) == "aot_eager"
    assert compiler_of(compiled, Options(compile="none")) is None


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("model", [GATED, small_model()], ids=["llama", "gpt"])
def test_compiled_parts_of_blocks_keep_what_plans_say(model):
    """Of four blocks: as many bytes as `autograd_memory` says, made with as many graphs as one block has parts."""
    blocks = [build_layer(model, layer, 0) for layer in range(1, model.blocks + 1)]
    weights = {weight.untyped_storage()._cdata for block in blocks for weight in block.parameters()}
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    layers = nn.ModuleDict({str(i): block for i, block in enumerate(blocks)})
    for compiler in (None, "aot_eager_decomp_partition"):
        tune(layers, compiler=compiler, loss_chunk=0, apart=True)
        kept: dict[int, tuple[int, torch.UntypedStorage]] = {}

        def keep(tensor, kept=kept):
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                kept[storage._cdata] = storage.nbytes(), storage
            return tensor

        x = torch.randn(2, 16, model.hidden_size, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            for block in blocks:
                x = block(x)
        x.sum().backward()
        way = Way(micro_batch=2, compiled=compiler is not None, fused_norms=False)
        batch = Batch(global_batch=2, seq_len=16, precision="fp32")
        expected = autograd_memory(model, batch, way).activation_bytes[1:-1].sum()
        # Factors of positions, cosine and sine, are one for all blocks.
        assert sum(n_bytes for n_bytes, _ in kept.values()) == pytest.approx(expected, rel=0.03)
    assert 2 <= counters["unique_graphs"] <= 4


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    """Before anything starts; and options that are none."""
    problem, plan = routed_problem(1)
    with pytest.raises(InputError, match=r"--compile: found 'inductr', expected 'inductor' \(nearest\)"):
        train(problem, plan, 0, "127.0.0.1", 1, Options(compile="inductr"), on_loss=print)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InputError, match=r"expected a C\+\+ compiler \(g\+\+\), or --compile none"):
        train(problem, plan, 0, "127.0.0.1", 1, Options(compile="inductor"), on_loss=print)
    for change, message in (
        ({"average": 1.0}, "--average"),
        ({"decay": "none"}, "--decay"),
        ({"loss_chunk": -1}, "-1"),
    ):
        with pytest.raises(InputError, match=message):
            replace(OPTIONS, **change)


def order_of_sums(rank, port, problem, plan, options):
    """What a rank does in a step: its backwards as they end, its sums as they are handed over."""
    done = []

    def watch(training):
        reducer = training.worker.reducer
        add, end = reducer.line.add, reducer.end_backward
        reducer.line.add = lambda *sum_: (done.append("sum"), add(*sum_))
        reducer.end_backward = lambda: (done.append("backward"), end())

    train(problem, plan, rank, "127.0.0.1", port, options, on_loss=end_process, on_start=watch)
    return done


@pytest.mark.parametrize("lookahead", [0, 1])
def test_sums_begin_beside_the_last_backward_unless_nothing_is_to_overlap(lookahead):
    """Two micro-batches on either of two ranks: layers are summed as their last gradients come, or all at the end."""
    batch = Batch(global_batch=8, seq_len=16, precision="fp32")
    problem = Problem(cluster=small_cluster(2), model=small_model(blocks=2), batch=batch)
    plan = small_plan(problem.cluster, [(0, 4)], [[0, 1]], [[0], [1], [0], [1]])
    layers, losses = ["sum"] * 4, ["sum"]
    order = ["backward", *layers, "backward"] if lookahead else ["backward", "backward", *layers]
    expected = [*order, *losses]
    assert run_ranks(order_of_sums, 2, problem, plan, Options(steps=1, lookahead=lookahead)) == [expected, expected]


def test_zero_that_parameter_servers_cannot_run_is_said(tmp_path):
    """One line of the stage that asks for it, in the log of the stage's first rank; the stage without has none."""
    problem, plan = routed_problem(2)
    first, second = plan.stages
    plan = replace(plan, stages=(first, replace(second, zero=1)), reduction="central-server")
    run_ranks(run_rank, 2, problem, plan, Options(steps=1, log_dir=tmp_path))
    logs = [map(json.loads, (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines()) for rank in (0, 1)]
    notes = [[line["text"] for line in log if line["type"] == "note"] for log in logs]
    line = "stage 1: ZeRO-1 is not run: parameter servers hold whole weights and gradients"
    assert notes == [[], [line]]


@pytest.mark.parametrize("local_steps", [1, 4])
def test_options_of_local_steps_are_not_heeded_in_silence(local_steps, tmp_path):
    """One line in rank 0's log where the plan has none, of those alone that are not as by default."""
    batch = Batch(global_batch=8, seq_len=16, precision="fp32")
    problem = Problem(cluster=small_cluster(1, 1), model=small_model(blocks=2), batch=batch)
    plan = replace(small_plan(problem.cluster, [(0, 4)], [[0, 1]], [[0], [1], [0], [1]]), local_steps=local_steps)
    options = Options(steps=1, log_dir=tmp_path, outer_rate=0.5, outer_fragments=2)
    run_ranks(run_rank, 2, problem, plan, options)
    log = map(json.loads, (tmp_path / "rank-0.jsonl").read_text().splitlines())
    notes = [line["text"] for line in log if line["type"] == "note"]
    why = "the plan has no local steps (all regions sum the gradients of every step)"
    assert notes == ([f"--outer-rate, --outer-fragments: not heeded, {why}"] if local_steps == 1 else [])
