"""Laws of checkpoints, on real ranks: any plan goes on where any other stopped; damage falls back."""

import dataclasses
import fcntl
import os
import re
import resource
import shutil
from pathlib import Path

import pytest

from polygon.domain.errors import InputError
from polygon.formats.files import write_plan
from runners.dist_runner import end_process
from runners.engine import update
from runners.engine.checkpoint import (
    SUFFIX,
    DamagedError,
    prepare_folder,
    read_file,
    step_directory,
    steps_in,
    write_file,
)
from runners.engine.log import RunLog
from runners.engine.options import Options
from runners.engine.run import train
from runners.launch import main as launch
from tests.real_programs import ran
from tests.real_ranks import run_ranks
from tests.small_problems import routed_problem, small_model

STEPS = 8
LARGEST = 2**16
"""Bytes of a file on a disk that is full."""


def run_rank(rank, port, problem, plan, options):
    """Loss by step, as this rank sees it."""
    losses = {}

    def note(result):
        losses[result["step"]] = result["loss"]

    train(problem, plan, rank, "127.0.0.1", port, options, on_loss=end_process, report=note)
    return losses


@pytest.fixture(scope="module")
def whole_run():
    """Losses of an uninterrupted run of one rank."""
    return run_ranks(run_rank, 1, *routed_problem(1), Options(steps=STEPS, learning_rate=3e-3))[0]


def test_any_plan_resumes_from_any_other(whole_run, tmp_path):
    """8 ranks with sharded optimizer state, then 2, then 1, then 4: the losses of the run that never stopped."""
    losses = {}
    for ranks, until in ((8, 3), (2, 4), (1, 6), (4, STEPS)):
        problem, plan = routed_problem(ranks)
        if ranks == 8:
            stages = tuple(dataclasses.replace(stage, zero=1) for stage in plan.stages)
            plan = dataclasses.replace(plan, stages=stages)
        options = Options(steps=until, learning_rate=3e-3, checkpoint_dir=tmp_path, resume=True, checkpoints_kept=2)
        found = run_ranks(run_rank, ranks, problem, plan, options)[0]
        assert min(found) == len(losses)
        losses |= found
    assert losses == pytest.approx(whole_run, rel=1e-5)
    assert steps_in(tmp_path) == [6, STEPS]
    assert not list(tmp_path.glob("**/.*"))


@pytest.mark.parametrize("packing", ["int4", "powersgd"])
def test_error_feedback_goes_on_where_it_stopped(packing, tmp_path):
    """Under the same plan a resumed run owes what the packing dropped before; without that the losses are others."""
    problem, plan = routed_problem(4)
    links = tuple(dataclasses.replace(use, weight_gradients=packing) for use in plan.links)
    plan = dataclasses.replace(plan, links=links)
    first = Options(steps=4, learning_rate=3e-3, checkpoint_dir=tmp_path, log_dir=tmp_path / "log")
    whole = run_ranks(run_rank, 4, problem, plan, dataclasses.replace(first, steps=6, checkpoint_dir=None))[0]
    run_ranks(run_rank, 4, problem, plan, first)
    owed = sorted(path.name for path in step_directory(tmp_path, 4).glob("*.owed"))
    assert owed == ["rank-0.owed", "rank-1.owed", "rank-2.owed"]  # the leaders of the last stage and the tied weight
    rest = dataclasses.replace(first, steps=6, resume=True, checkpoint_dir=tmp_path / "copy")
    shutil.copytree(step_directory(tmp_path, 4), step_directory(tmp_path / "copy", 4))
    resumed = run_ranks(run_rank, 4, problem, plan, rest)[0]
    expected = pytest.approx({step: whole[step] for step in (4, 5)}, rel=1e-7)
    assert resumed == expected
    # Of a version that cut vectors among leaders in another way.
    shutil.copytree(step_directory(tmp_path, 4), step_directory(tmp_path / "old", 4))
    for path in step_directory(tmp_path / "old", 4).glob("*.owed"):
        write_file(path, {key: value for key, value in read_file(path).items() if key != "cut"})
    assert (
        run_ranks(run_rank, 4, problem, plan, dataclasses.replace(rest, checkpoint_dir=tmp_path / "old"))[0] != expected
    )
    assert (
        "error feedback of the checkpoint is of another plan or version" in (tmp_path / "log/rank-1.jsonl").read_text()
    )
    for path in step_directory(tmp_path, 4).glob("*.owed"):
        path.unlink()
    assert run_ranks(run_rank, 4, problem, plan, dataclasses.replace(rest, checkpoint_dir=tmp_path))[0] != expected
    log = (tmp_path / "log" / "rank-1.jsonl").read_text()
    assert "error feedback of the checkpoint is not in it: starting without" in log


def test_damaged_checkpoint_falls_back_to_the_one_before(whole_run, tmp_path):
    """A changed byte is noticed; the rank that needs the file makes all ranks use the step before."""
    problem, plan = routed_problem(2)
    first = Options(steps=6, learning_rate=3e-3, checkpoint_dir=tmp_path, checkpoint_every=3)
    run_ranks(run_rank, 2, problem, plan, first)
    assert steps_in(tmp_path) == [3, 6]
    file = step_directory(tmp_path, 6) / f"blocks.2{SUFFIX}"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError, match="checksum"):
        read_file(file)
    found = run_ranks(run_rank, 2, problem, plan, dataclasses.replace(first, steps=8, resume=True))
    assert sorted(found[0]) == list(range(3, 8))
    assert found[0] == pytest.approx({step: whole_run[step] for step in range(3, 8)}, rel=1e-5)


def test_checkpoint_that_cannot_be_written_does_not_stop_training(whole_run, tmp_path):
    """Training goes on, nothing half-written stays, and the log says why."""
    step_directory(tmp_path, 2).write_text("not a directory")
    options = Options(
        steps=4, learning_rate=3e-3, checkpoint_dir=tmp_path, checkpoint_every=2, log_dir=tmp_path / "log"
    )
    found = run_ranks(run_rank, 2, *routed_problem(2), options)
    assert found[0] == pytest.approx({step: whole_run[step] for step in range(4)}, rel=1e-5)
    assert "checkpoint of step 2 not written on rank 0" in (tmp_path / "log" / "rank-1.jsonl").read_text()


def test_a_run_that_diverges_ends_and_keeps_its_checkpoints(tmp_path):
    """Weights that are no numbers are never saved in place of good ones; all ranks say since when, and what is left."""
    options = Options(steps=9, learning_rate=1e30, clip_norm=None, checkpoint_dir=tmp_path, checkpoint_every=1)
    message = "step 1: found loss nan and gradient norm nan, .*; the last whole one is .*/step-00000001"
    with pytest.raises(RuntimeError, match=message):
        run_ranks(run_rank, 2, *routed_problem(2), options)
    assert steps_in(tmp_path) == [1]


def test_scaled_losses_that_diverge_are_noticed_at_the_end(tmp_path):
    """fp16 halves its scale at every step until then; what it had before stays, and the run does not end as if well."""
    problem, plan = routed_problem(2)
    problem = dataclasses.replace(problem, batch=dataclasses.replace(problem.batch, precision="fp16"))
    options = Options(
        steps=5, learning_rate=1e30, clip_norm=None, checkpoint_dir=tmp_path, checkpoint_every=1, checkpoints_kept=1
    )
    with pytest.raises(RuntimeError, match=r"step 4: found loss nan .*; the last whole one is .*/step-0000000[01]"):
        run_ranks(run_rank, 2, problem, plan, options)


def run_scaled_rank(rank, port, problem, plan, options):
    """Steps that changed the weights, of a run whose first loss scale is too large by far."""
    update.FIRST_LOSS_SCALE, applied = 2.0**22, {}

    def note(result):
        applied[result["step"]] = result["applied"]

    train(problem, plan, rank, "127.0.0.1", port, options, on_loss=end_process, report=note)
    return applied


def test_the_loss_scale_goes_on(tmp_path):
    """Who resumes in fp16, under another plan too, does not lose the steps again that found the scale."""
    half = {ranks: routed_problem(ranks) for ranks in (1, 4)}
    for ranks, (problem, plan) in half.items():
        half[ranks] = dataclasses.replace(problem, batch=dataclasses.replace(problem.batch, precision="fp16")), plan
    options = Options(steps=10, checkpoint_dir=tmp_path, resume=True)
    first = run_ranks(run_scaled_rank, 4, *half[4], options)[0]
    assert not first[0] and first[9], first
    assert read_file(step_directory(tmp_path, 10) / f"blocks.2{SUFFIX}")["progress"]["loss_scale"] < 2.0**22
    rest = run_ranks(run_scaled_rank, 1, *half[1], dataclasses.replace(options, steps=12))[0]
    assert rest == {10: True, 11: True}


def test_saves_of_later_steps_are_neither_counted_nor_removed(tmp_path):
    """A step 99 that nobody can resume from is in the folder: of this run the last two stay beside it."""
    step_directory(tmp_path, 99).mkdir()
    options = Options(steps=3, checkpoint_dir=tmp_path, checkpoint_every=1, checkpoints_kept=2, resume=True)
    run_ranks(run_rank, 1, *routed_problem(1), options)
    assert steps_in(tmp_path) == [2, 3, 99]


def launch_on_a_full_disk(words):
    """The launcher, with files of at most `LARGEST` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))
    return launch(words)


def test_a_last_save_that_fails_ends_with_an_error_and_names_the_last_whole_one(whole_run, tmp_path):
    """Exit 1 of launcher and ranks, the reason, and the checkpoint before, from which a run goes on."""
    write_plan(tmp_path / "plan.json", *routed_problem(2))
    folder = tmp_path / "saved"
    words = [tmp_path / "plan.json", "--learning-rate", "3e-3", "--device", "cpu"]
    words += ["--checkpoint-dir", folder, "--log-dir", tmp_path / "log", "--traced-steps", "0", "--resume"]
    code, _, said = ran(launch, [*words, "--steps", "2"], tmp_path)
    assert code == 0, said
    before = {path.name: path.read_bytes() for path in (folder / "step-00000002").iterdir()}
    assert max(map(len, before.values())) > LARGEST
    code, _, said = ran(launch_on_a_full_disk, [*words, "--steps", "4", "--keep", "1"], tmp_path)
    assert code == 1, said
    lines = re.findall(r"\[rank (\d)\] (checkpoint of step 4 not written on rank \d: .*)", said)
    assert sorted(rank for rank, _ in lines) == ["0", "1"]
    assert all(text.endswith(f"File too large; the last whole one is {folder}/step-00000002") for _, text in lines)
    assert re.search(r"^failed: rank \d \(.*\): exit 1: checkpoint of step 4", said, re.MULTILINE)
    assert "Traceback" not in said
    assert steps_in(folder) == [2]
    assert before == {path.name: path.read_bytes() for path in (folder / "step-00000002").iterdir()}
    assert not list(folder.glob("**/.*"))
    options = Options(steps=4, learning_rate=3e-3, checkpoint_dir=folder, resume=True)
    found = run_ranks(run_rank, 1, *routed_problem(1), options)[0]
    assert found == pytest.approx({step: whole_run[step] for step in (2, 3)}, rel=1e-5)


def test_folders_of_other_names_are_left_alone(tmp_path):
    """`step-old` is the user's own, with or without a checkpoint in it; so is a file."""
    options = Options(steps=1, checkpoint_dir=tmp_path, checkpoints_kept=1)
    run_ranks(run_rank, 1, *routed_problem(1), options)
    shutil.copytree(step_directory(tmp_path, 1), tmp_path / "step-old")
    (tmp_path / "step-12").mkdir()
    (tmp_path / "step-00000007").write_text("a file")
    assert steps_in(tmp_path) == [1]
    found = run_ranks(run_rank, 1, *routed_problem(1), dataclasses.replace(options, steps=2, resume=True))
    assert list(found[0]) == [1] and steps_in(tmp_path) == [2]
    assert (tmp_path / "step-old" / f"head{SUFFIX}").is_file()


class Unwanted:
    """What a checkpoint has no need of; unpickling it would run a program."""

    def __reduce__(self):
        return (eval, ("1 / 0",))


def test_a_file_with_a_program_in_it_is_damaged_in_one_line(tmp_path):
    """It is not run, and the message does not say how to run it; the checkpoint before is used."""
    options = Options(steps=2, checkpoint_dir=tmp_path, checkpoint_every=1, log_dir=tmp_path / "log")
    run_ranks(run_rank, 1, *routed_problem(1), options)
    path = step_directory(tmp_path, 2) / f"head{SUFFIX}"
    write_file(path, {"parameters": Unwanted()})
    with pytest.raises(DamagedError, match=r"head\.layer: holds more than tensors and plain values \(") as caught:
        read_file(path)
    assert "\n" not in str(caught.value)
    found = run_ranks(run_rank, 1, *routed_problem(1), dataclasses.replace(options, steps=3, resume=True))
    assert list(found[0]) == [1, 2]
    assert "checkpoint not used" in (tmp_path / "log" / "rank-0.jsonl").read_text()


def test_a_log_that_cannot_be_written_does_not_stop_training(tmp_path, capsys):
    """It is said once."""
    log = RunLog(Path("/dev/full"))
    for step in range(3):
        log.write("step", step=step)
    log.close()
    assert capsys.readouterr().err == "/dev/full: No space left on device; training goes on\n"


def test_folder_that_cannot_be_made_is_refused_before_training(tmp_path):
    """One line, and no step."""
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.raises(RuntimeError, match="cannot be made: Not a directory"):
        run_ranks(run_rank, 1, *routed_problem(1), Options(steps=1, checkpoint_dir=blocked / "sub"))


def test_a_folder_with_checkpoints_is_only_gone_on_from(tmp_path):
    """Those of another run would be taken for the newest of this one, by the next resume and by the export."""
    options = Options(steps=1, checkpoint_dir=tmp_path)
    run_ranks(run_rank, 1, *routed_problem(1), options)
    with pytest.raises(RuntimeError, match="found step-00000001 in it, expected --resume"):
        run_ranks(run_rank, 1, *routed_problem(1), options)


def test_checkpoint_of_another_model_is_refused(tmp_path):
    """The message names the difference."""
    options = Options(steps=1, checkpoint_dir=tmp_path)
    run_ranks(run_rank, 1, *routed_problem(1), options)
    other = routed_problem(1, model=small_model(heads=2, kv_heads=2, head_dim=16))
    with pytest.raises(RuntimeError, match=r"model\.heads: found 4, expected 2"):
        run_ranks(run_rank, 1, *other, Options(steps=2, checkpoint_dir=tmp_path, resume=True))


def test_checkpoints_of_a_smaller_model_are_not_taken_for_damaged_ones(tmp_path):
    """Its files lack layers of this one, which then began anew and removed them: refused, as in the launcher."""
    first = Options(steps=2, checkpoint_dir=tmp_path / "saved", checkpoint_every=1)
    run_ranks(run_rank, 1, *routed_problem(1), first)
    (step_directory(first.checkpoint_dir, 2) / "head.layer").write_bytes(b"damaged")
    deeper = small_model(blocks=6)
    problem, plan = routed_problem(1, model=deeper)
    plan = dataclasses.replace(plan, stages=(dataclasses.replace(plan.stages[0], last_layer=deeper.layers),))
    with pytest.raises(RuntimeError, match=r"saved: model\.blocks: found 4, expected 6"):
        run_ranks(run_rank, 1, problem, plan, dataclasses.replace(first, steps=4, checkpoints_kept=1, resume=True))
    assert steps_in(first.checkpoint_dir) == [1, 2]
    write_plan(tmp_path / "plan.json", problem, plan)
    words = ["--resume", "--checkpoint-dir", first.checkpoint_dir, "--log-dir", tmp_path / "log"]
    assert launch([str(tmp_path / "plan.json"), *map(str, words)]) == 2
    assert not (tmp_path / "log" / "rank-0.jsonl").exists()
    with pytest.raises(InputError, match="seed of the data order: found 0, expected 1"):
        prepare_folder(first.checkpoint_dir, resume=True, seed=1)


def test_a_folder_that_may_not_be_written_to_is_refused_before_training(tmp_path, monkeypatch):
    """Of a file system mounted for reading alone, say; the first save would have told it, hours later."""
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK))
    with pytest.raises(InputError, match="found a folder that may not be written to"):
        prepare_folder(tmp_path, resume=False)


def test_a_folder_is_written_by_one_run_at_a_time(tmp_path):
    """Two at once would mix their layers in one step; the second is refused until the first has ended."""
    options = Options(steps=1, checkpoint_dir=tmp_path)
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(RuntimeError, match=r"--checkpoint-dir .*: found another run that writes there, expected none"):
        run_ranks(run_rank, 1, *routed_problem(1), options)
    os.close(held)
    run_ranks(run_rank, 1, *routed_problem(1), options)
    run_ranks(run_rank, 1, *routed_problem(1), dataclasses.replace(options, steps=2, resume=True))
    assert steps_in(tmp_path) == [1, 2]


def test_file_appears_whole_or_not_at_all(tmp_path):
    """What cannot be serialised leaves nothing behind; a cut file is damaged; a missing one too."""
    path = tmp_path / "x.layer"
    with pytest.raises(Exception, match="pickle"):
        write_file(path, lambda: None)
    assert list(Path(tmp_path).iterdir()) == []
    write_file(path, {"a": 1})
    assert read_file(path) == {"a": 1}
    path.write_bytes(path.read_bytes()[:-1])
    for file in (path, tmp_path / "y.layer"):
        with pytest.raises(DamagedError):
            read_file(file)
