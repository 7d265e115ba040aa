"""Learning rates by step: torch's schedulers give the same, plans and resumed runs too; validation on the way."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from polygon.domain.errors import InputError
from polygon.formats.files import write_plan
from runners.dist_runner import end_process
from runners.engine.learning_rate import SCHEDULES, LearningRate
from runners.engine.options import Options
from runners.engine.run import train
from runners.launch import main as launch
from tests.real_programs import ran
from tests.real_ranks import run_ranks
from tests.small_problems import routed_problem


def torchs_rates(schedule, warmup, steps, decay, final):
    """Rates by step of torch's own schedulers, at most 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    falling = decay if schedule == "wsd" else steps - warmup
    parts, borders = [], []
    if warmup:
        # The first step has 1/warmup of the rate.
        parts.append(lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, max(1, warmup - 1)))
        borders.append(warmup)
    if steps - falling > warmup:
        parts.append(lr_scheduler.ConstantLR(optimizer, 1.0, 0))
        borders.append(steps - falling)
    if schedule == "cosine":
        parts.append(lr_scheduler.CosineAnnealingLR(optimizer, falling, eta_min=final))
    else:
        parts.append(lr_scheduler.LinearLR(optimizer, 1.0, final, falling))
    whole = lr_scheduler.SequentialLR(optimizer, parts, borders)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        whole.step()
    return rates


@given(
    schedule=st.sampled_from(["cosine", "linear", "wsd"]), warmup=st.integers(0, 9), stable=st.integers(0, 9),
    decay=st.integers(1, 20), final=st.floats(0.01, 1),
)  # fmt: skip
def test_rates_are_those_of_torchs_schedulers(schedule, warmup, stable, decay, final):
    """Rise, plateau and fall, at every step."""
    steps = warmup + stable + decay
    rate = LearningRate(
        largest=1.0, schedule=schedule, warmup_steps=warmup, steps=steps, final_part=final,
        decay_steps=decay if schedule == "wsd" else None,
    )  # fmt: skip
    assert [rate.at(step) for step in range(steps)] == pytest.approx(
        torchs_rates(schedule, warmup, steps, decay, final), rel=1e-9
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rate_rises_then_never_rises_again_and_ends_where_it_should(schedule):
    """After the last step it stays; a constant one is the largest."""
    rate = LearningRate(largest=2e-3, schedule=schedule, warmup_steps=10, steps=200)
    rates = np.array([rate.at(step) for step in range(230)])
    assert rates[:10] == pytest.approx(2e-4 * np.arange(1, 11))
    assert (np.diff(rates[9:]) <= 0).all() and rates[10] == pytest.approx(2e-3, rel=1e-3)
    end = 1.0 if schedule == "constant" else 0.1
    assert rates[200:] == pytest.approx(np.full(30, 2e-3 * end))
    if schedule == "wsd":  # a tenth of all steps
        assert rates[180] == 2e-3 > rates[181]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "cosine", "warmup_steps": 9}, "--warmup-steps: found 9, expected less than all 9 steps"),
        ({"decay_steps": 3}, "--decay-steps: found 3, expected none with schedule constant (wsd has them)"),
        (
            {"decay_steps": 500, "warmup_steps": 12},
            "--decay-steps: found 500, expected none with schedule constant (wsd has them)",
        ),
        (
            {"schedule": "wsd", "decay_steps": 10, "warmup_steps": 2},
            "--decay-steps: found 10, expected 1 to 7, the steps after the warm-up",
        ),
        ({"schedule": "step"}, "--schedule: found 'step', expected constant or cosine or linear or wsd"),
        ({"schedule_steps": 0}, "--schedule-steps: found 0, expected a whole number >= 1"),
        ({"schedule": "linear", "final_rate": 2.0}, "--final-rate: found 2.0, expected at most 1"),
    ],
)
def test_what_makes_no_sense_is_one_line(fields, message):
    """With the option's name."""
    with pytest.raises(InputError) as caught:
        Options(steps=9, **fields)
    assert str(caught.value).startswith(message)


def losses_of(rank, port, problem, plan, options):
    """Losses of a run."""
    found = []
    train(problem, plan, rank, "127.0.0.1", port, options, on_loss=end_process, report=found.append)
    return [result["loss"] for result in found]


def test_a_schedule_goes_on_under_another_plan(tmp_path):
    """Cosine with a warm-up over six steps, stopped after three: the losses of a run that did not stop."""
    whole = Options(steps=6, learning_rate=3e-2, schedule="cosine", warmup_steps=2)
    expected = run_ranks(losses_of, 1, *routed_problem(1), whole)[0]
    constant = run_ranks(losses_of, 1, *routed_problem(1), replace(whole, schedule="constant"))[0]
    assert expected != pytest.approx(constant, rel=1e-4)
    first = replace(whole, steps=3, schedule_steps=6, checkpoint_dir=tmp_path)
    begun = run_ranks(losses_of, 2, *routed_problem(2), first)[0]
    rest = replace(whole, checkpoint_dir=tmp_path, resume=True)
    assert begun + run_ranks(losses_of, 4, *routed_problem(4), rest)[0] == pytest.approx(expected, rel=1e-5)


def test_a_plan_validates_on_what_it_does_not_train_on(tmp_path):
    """Every two steps and after the last, with perplexity; in lines, log and summary; the loss falls."""
    write_plan(tmp_path / "plan.json", *routed_problem(2))
    words = ["plan.json", "--steps", "5", "--json", "--log-dir", "log", "--schedule", "wsd", "--device", "cpu"]
    words += ["--validate-every", "2", "--validation-samples", "7", "--learning-rate", "3e-3"]
    code, out, said = ran(launch, words, tmp_path)
    assert code == 0, said
    steps = [json.loads(line) for line in (tmp_path / "log" / "run.jsonl").read_text().splitlines()]
    found = {step["step"]: step["validation_loss"] for step in steps if "validation_loss" in step}
    assert list(found) == [1, 3, 4] and found[4] < found[1]
    summary = json.loads(out)
    assert summary["validation_perplexity"] == pytest.approx(math.exp(found[4]))
    assert f"validation {found[4]:.4f} (perplexity {math.exp(found[4]):,.2f})" in said
