"""Muon and Adafactor under plans are torch's own in one process, whatever holds parts of a matrix."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from polygon.cost.compute import orthogonal_s
from polygon.cost.memory import breakdown, layer_memory, stage_rows
from polygon.cost.tables import CostTables
from polygon.domain.errors import InputError
from polygon.domain.optimizer import OPTIMIZERS
from polygon.export.targets import export
from runners.dist_runner import end_process
from runners.engine.layers import build_layers
from runners.engine.optimizers import STATE_KEYS
from runners.engine.options import Options
from runners.engine.run import train
from runners.engine.runnable import check_runnable
from tests.nightly import at_night
from tests.real_ranks import run_ranks
from tests.runners.test_training import plain_losses, tensor_parallel_plan
from tests.runners.test_zero import one_stage, run_rank, with_zero
from tests.small_problems import routed_problem, small_cluster

OPTIONS = Options(steps=6, learning_rate=3e-3, clip_norm=0.5)


class Both:
    """Two optimizers as one."""

    def __init__(self, *parts):
        self.parts = parts

    def step(self):
        for part in self.parts:
            part.step()

    def zero_grad(self):
        for part in self.parts:
            part.zero_grad()


def plain_optimizer(name, layers, options):
    """As one sets it up by hand: decay for matrices, and Muon for those of blocks."""
    inner = [p for n, layer in layers.items() if 0 < int(n) < len(layers) - 1 for p in layer.parameters()]
    hidden = {id(p): p for p in inner if name == "muon" and p.ndim == 2}
    others = [p for p in dict.fromkeys(layers.parameters()) if id(p) not in hidden]
    groups = [
        {"params": [p for p in others if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0},
    ]
    if name == "adafactor":
        return torch.optim.Adafactor(groups, lr=options.learning_rate)
    return Both(
        torch.optim.Muon(
            list(hidden.values()),
            lr=options.learning_rate,
            weight_decay=options.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95)),
    )


def with_optimizer(case, name):
    """A problem and its plan with another optimizer."""
    problem, plan = case
    return replace(problem, batch=replace(problem.batch, optimizer=name)), plan


def plain_loop(rank, port, problem, options):
    """The losses of one process without any plan."""
    layers = build_layers(problem.model, range(problem.model.layers), options.seed)
    return plain_losses(layers, plain_optimizer(problem.batch.optimizer, layers, options), problem, options)


@pytest.fixture(scope="module", params=["muon", "adafactor"])
def name(request):
    """Of the optimizer."""
    return request.param


@pytest.fixture(scope="module")
def expected(name):
    """Losses of one process."""
    return run_ranks(plain_loop, 1, with_optimizer(routed_problem(1), name)[0], OPTIONS)[0]


@pytest.mark.parametrize("zero", [1, 3, *at_night(0, 2)])
def test_any_plan_takes_the_steps_of_one_process(name, expected, zero, tmp_path):
    """Stages over regions of unequal widths, uneven shares; its checkpoint goes on under a plan of other stages."""
    problem, plan = with_optimizer(routed_problem(8), name)
    plan = with_zero(plan, zero)
    options = replace(OPTIONS, checkpoint_dir=tmp_path, resume=True)
    losses = {}
    for ranks, until in ((8, 2), (2, 4), (8, 6)):
        now = (problem, plan) if ranks == 8 else with_optimizer(routed_problem(ranks), name)
        for found, _ in run_ranks(run_rank, ranks, *now, replace(options, steps=until)):
            assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-5)
        losses |= found
    assert sorted(losses) == list(range(6))


def test_slices_of_matrices_give_the_same_steps(name, expected, tmp_path):
    """Two devices cut what a worker holds, two such workers divide optimizer state; resumed without any slices."""
    problem, whole = with_optimizer(routed_problem(1), name)
    problem = replace(problem, cluster=small_cluster(4, 2))
    plan = with_zero(tensor_parallel_plan(problem.cluster, ((0, 1),), ((2, 3), (4, 5))), 1)
    options = replace(OPTIONS, steps=3, checkpoint_dir=tmp_path)
    for found, _ in run_ranks(run_rank, 6, problem, plan, options):
        assert list(found.values()) == pytest.approx(expected[:3], rel=1e-5)
    rest = run_ranks(
        run_rank, 1, with_optimizer(routed_problem(1), name)[0], whole, replace(options, steps=5, resume=True)
    )
    assert list(rest[0][0].values()) == pytest.approx(expected[3:5], rel=1e-5)


def test_parameter_servers_and_averages_change_nothing(name, expected):
    """Only owners have the sum: the others get directions, gradients and weights from them."""
    problem, plan = with_optimizer(routed_problem(4), name)
    options = replace(OPTIONS, steps=4, average=0.9)
    for found, _ in run_ranks(run_rank, 4, problem, replace(plan, reduction="sharded-server"), options):
        assert list(found.values()) == pytest.approx(expected[:4], rel=1e-5)


@pytest.mark.parametrize("zero", [0, 1])
def test_state_takes_the_bytes_that_the_planner_counts(name, zero):
    """Muon: 4 a parameter in blocks, 8 outside; Adafactor: of rows and columns alone, which the planner leaves out."""
    problem, plan = with_optimizer(one_stage(), name)
    found = run_ranks(run_rank, 3, problem, with_zero(plan, zero), replace(OPTIONS, steps=1))
    rows = stage_rows(layer_memory(problem.model, problem.batch), 0, problem.model.layers)
    counted = breakdown(*rows, in_flight=1, zero=zero, shards=3, batch=problem.batch).optimizer
    # Norms and biases, AdamW's, lie at the end of a layer: the last part has them all.
    mean = sum(held["optimizer"] for _, held in found) / 3
    if name == "adafactor":
        assert counted == 0
        assert mean < 0.1 * found[0][1]["weights"]
    else:
        assert mean == pytest.approx(counted, rel=0.03)


def test_the_engine_knows_every_optimizer_that_is_planned():
    """Its table says what torch's keep under which names; the planner's what that costs."""
    assert STATE_KEYS.keys() == OPTIMIZERS.keys()


def test_what_cannot_be_run_or_exported_is_refused():
    """In one line, before anything starts."""
    problem, plan = with_optimizer(routed_problem(1), "muon")
    with pytest.raises(InputError, match=r"batch.optimizer: found .?muon.?, expected adamw .* \(with --model-file\)"):
        check_runnable(problem, plan, own_model=True)
    with pytest.raises(InputError, match=r"batch.optimizer: found .?muon.?, expected adamw or sgd"):
        export(problem, plan, "megatron")
    narrow = replace(problem.batch, optimizer="adamw", precision="bf16", state_precision="bf16")
    exports = [partial(export, target=target) for target in ("megatron", "torchrun", "slurm")]
    for refuse in (check_runnable, *exports):
        with pytest.raises(InputError, match=r"batch.state_precision: found .?bf16.?, expected fp32"):
            refuse(replace(problem, batch=narrow), plan)
    problem, plan = with_optimizer(routed_problem(1), "adafactor")
    with pytest.raises(InputError, match="--offload-optimizer"):
        train(problem, plan, 0, "127.0.0.1", 1, Options(offload_optimizer=True), on_loss=end_process)


def test_muons_update_counts_its_products():
    """The products take longer than what is read and written, and as long per parameter as the model is wide."""
    muon, sgd = (CostTables(with_optimizer(routed_problem(1), which)[0]).update_s(0, 1e6) for which in ("muon", "sgd"))
    assert muon > sgd
    device = small_cluster(1).catalogue["cpu"]
    assert orthogonal_s(4096, device) == pytest.approx(4 * orthogonal_s(1024, device), rel=0.2)
