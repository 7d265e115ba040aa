"""A model given as a list of layers trains the same under a plan as in a plain loop."""

import re
from dataclasses import replace

import pytest
import torch

from polygon.domain.errors import InputError
from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.formats.files import write_plan
from runners.dist_runner import end_process
from runners.dist_runner import main as dist_runner
from runners.engine.options import Options
from runners.engine.run import train
from runners.engine.user_model import OwnModel, own_problem
from runners.launch import main as launch
from tests.free_ports import free_port
from tests.real_programs import ran
from tests.real_ranks import run_ranks
from tests.small_problems import small_cluster, small_model, small_plan

CNN = """
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional


class Mixer(nn.Module):
    def __init__(self, places, width):
        super().__init__()
        self.norm, self.across, self.along = nn.GroupNorm(4, width), nn.Linear(places, places), nn.Linear(width, width)

    def forward(self, x):
        x = x + self.across(self.norm(x))
        return x + self.along(functional.gelu(x).transpose(1, 2)).transpose(1, 2)


def layers():
    return [
        nn.ZeroPad2d(1),
        nn.Conv2d(1, 16, 3),
        nn.Sequential(nn.GELU(), nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.Flatten(2)),
        Mixer(16, 16),
        Mixer(16, 16),
        nn.Sequential(nn.Flatten(), nn.Linear(256, 10)),
    ]


def loss(output, targets):
    return functional.cross_entropy(output, targets, reduction="sum")


class samples:
    def __init__(self, seed):
        digits = load_digits()
        order = np.random.default_rng(seed).permutation(len(digits.target))
        self.x = torch.from_numpy(digits.images[order, None].astype(np.float32) / 16)
        self.y = torch.from_numpy(digits.target[order].astype(np.int64))

    def batch(self, numbers):
        places = [number % len(self.y) for number in numbers]
        return self.x[places], self.y[places]
"""
OPTIONS = Options(steps=20, learning_rate=3e-3, clip_norm=1.0)


@pytest.fixture
def model_file(tmp_path):
    """A small mixer behind convolutions; shapes between layers differ, the first layer has no parameters."""
    path = tmp_path / "mixer.py"
    path.write_text(CNN)
    return path


@pytest.fixture
def problem_and_plan():
    """Two stages of widths 1 and 2 in two regions, uneven shares, six layers."""
    problem = Problem(
        cluster=small_cluster(1, 2),
        model=small_model(),
        batch=Batch(global_batch=16, seq_len=16, precision="fp32"),
    )
    routes = [[0, 0], [0, 1], [0, 0], [0, 0]]
    return problem, small_plan(problem.cluster, [(0, 3), (3, 6)], [[0], [1, 2]], routes, micro_batch_size=4)


def run_rank(rank, port, problem, plan, options):
    """Losses, and FLOP of a step."""
    losses, flops = [], []
    train(
        *(problem, plan, rank, "127.0.0.1", port, options),
        on_loss=end_process,
        report=lambda result: losses.append(result["loss"]),
        on_start=lambda training: flops.append(training.worker.step_flops),
    )
    return losses, flops[0]


def plain_loop(rank, port, path, options):
    """The same training as one would write it without any plan."""
    own = OwnModel(path, options.seed, layers=6)
    modules = torch.nn.Sequential(*own.layers)
    groups = [[p for p in modules.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": options.weight_decay}, {"params": groups[1], "weight_decay": 0.0}],
        lr=options.learning_rate,
        betas=(0.9, 0.95),
    )
    losses = []
    for step in range(options.steps):
        x, targets = own.samples.batch(range(16 * step, 16 * step + 16))
        loss = torch.nn.functional.cross_entropy(modules(x), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(modules.parameters(), options.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_own_layers_train_the_same_under_a_plan(model_file, problem_and_plan, tmp_path):
    """Losses of a plain loop to 1e-5 under a plan with ZeRO-3 and recomputation, resumed by one rank; FLOP counted."""
    problem, plan = problem_and_plan
    [expected] = run_ranks(plain_loop, 1, model_file, OPTIONS)
    assert expected[-1] < 0.5 * expected[0]
    stages = tuple(replace(stage, zero=3, recompute="full") for stage in plan.stages)
    options = replace(OPTIONS, model_file=model_file, checkpoint_dir=tmp_path / "saved", resume=True, steps=12)
    for losses, flops in run_ranks(run_rank, 3, problem, replace(plan, stages=stages), options):
        assert losses == pytest.approx(expected[:12], rel=1e-5)
        # 2 FLOP a product: 3x3 over 8x8 places, 3x3x16 over 4x4, twice 16 x 16 x (16 + 16), 256 x 10; three times that.
        products = 16 * 9 * 64 + 16 * 16 * 9 * 16 + 2 * 2 * 16**3 + 256 * 10
        assert flops == 3 * 16 * 2 * products
    one = small_plan(problem.cluster, [(0, 6)], [[0]], [[0]] * 4, micro_batch_size=4)
    [(rest, _)] = run_ranks(run_rank, 1, problem, one, replace(options, steps=20))
    assert rest == pytest.approx(expected[12:], rel=1e-5)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_layer_may_return_what_it_takes(model_file, problem_and_plan, zero):
    """An `nn.Identity` between two layers that are split: its backward comes before that of the layer before it."""
    problem, plan = problem_and_plan
    model_file.write_text(
        CNN.replace("Mixer(16, 16),\n        Mixer(16, 16),", "Mixer(16, 16),\n        nn.Identity(),")
    )
    options = replace(OPTIONS, model_file=model_file, steps=3)
    [expected] = run_ranks(plain_loop, 1, model_file, options)
    stages = tuple(replace(stage, zero=zero) for stage in plan.stages)
    for losses, _ in run_ranks(run_rank, 3, problem, replace(plan, stages=stages), options):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_layers_of_ones_own_are_recomputed_whole_or_not_at_all(model_file, problem_and_plan):
    """What lies inside them nobody knows."""
    problem, plan = problem_and_plan
    for recompute in ("none", "full", "selective"):
        asked = replace(plan, stages=tuple(replace(stage, recompute=recompute) for stage in plan.stages))
        if recompute == "selective":
            with pytest.raises(InputError, match=r"stages\[0\]\.recompute: found 'selective', expected none or full"):
                own_problem(problem, asked, model_file)
        else:
            assert own_problem(problem, asked, model_file).model.name == model_file.stem


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("def loss(", "def lost("), "found no function loss, expected layers and loss"),
        (("        nn.ZeroPad2d(1),\n", ""), "mixer.py: layers: found 5, expected 6, as in the plan"),
        (("nn.GELU()", "nn.BatchNorm2d(16)"), "layers()[2]: found the buffer '0.num_batches_tracked', expected none"),
        (("nn.Linear(256, 10)", "nn.Linear(250, 10)"), "layers()[5] on (4, 16, 16): RuntimeError: "),
        (
            ("Mixer(16, 16),\n        Mixer(16, 16),", "*[Mixer(16, 16)] * 2,"),
            "layers()[4]: found norm.weight, which layers()[3] has too, expected weights of its own",
        ),
        (
            (
                "def loss(",
                "made = layers\n\ndef layers():\n    return [m.requires_grad_(False) for m in made()]\n\ndef loss(",
            ),
            "mixer.py: layers(): found no weight that is trained, expected some",
        ),
        (("return functional", "return 1.0  # functional"), "loss: found float, expected a tensor of one number"),
        (("import torch\n", "import torch\nraise OSError('no')\n"), ", line 4: the file: OSError: no"),
        (["--data", "x.npz"], "--data: found with mixer.py, which has samples, expected one of them"),
        (["--validate-every", "2"], "--validate-every: found with mixer.py, which has samples, expected one of them"),
    ],
)
def test_faults_of_the_file_are_named(model_file, problem_and_plan, tmp_path, capfd, change, message):
    """One line on stderr with file, place and what is expected; exit 2."""
    options = change if isinstance(change, list) else []
    model_file.write_text(CNN if options else CNN.replace(*change))
    problem, _ = problem_and_plan
    problem = replace(problem, cluster=small_cluster(1))
    write_plan(
        tmp_path / "plan.json", problem, small_plan(problem.cluster, [(0, 6)], [[0]], [[0]] * 4, micro_batch_size=4)
    )
    arguments = ["--plan", tmp_path / "plan.json", "--model-file", model_file, "--log-dir", tmp_path / "log"]
    place = ["--dist-url", f"tcp://127.0.0.1:{free_port()}", "--world-size", "1", "--rank", "0"]
    assert dist_runner([*map(str, arguments), *place, *options]) == 2
    line = capfd.readouterr().err.replace(f"{model_file.parent}/", "")
    assert message in line
    assert line.count("\n") == 1


def test_a_rank_that_lacks_memory_says_so_in_one_line(model_file, problem_and_plan, tmp_path):
    """Where nobody could know it before; the launcher names the rank and ends the others."""
    wasteful = CNN.replace("        places = [", "        np.ones(10**14 if numbers.start else 1)\n        places = [")
    model_file.write_text(wasteful)
    write_plan(tmp_path / "plan.json", *problem_and_plan)
    words = ["plan.json", "--model-file", model_file, "--steps", "3", "--device", "cpu", "--log-dir", "log"]
    code, _, said = ran(launch, words, tmp_path)
    assert code == 1 and "Traceback" not in said
    assert re.search(r"\[rank \d\] memory: Unable to allocate 728\. TiB", said)
    assert re.search(r"failed: rank \d .*: exit 3: memory: Unable to allocate 728\. TiB", said)
