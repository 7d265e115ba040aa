"""The programs as a user starts them: launcher and single ranks, fine and failing."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from polygon.domain.schedule import worker_order
from polygon.formats.files import read_plan, write_plan
from runners.dist_runner import main as dist_runner
from runners.dist_runner import sum_up
from runners.engine.arguments import default_log_dir
from runners.engine.checkpoint import steps_in
from runners.engine.summary import format_summary, log_lines, summarise
from runners.engine.trackers import TRACKERS
from runners.launch import main as launch
from runners.train import main as train
from tests.free_ports import free_port
from tests.patience import PATIENCE_S, eventually
from tests.real_programs import Program, ran
from tests.routed_plans import ranked
from tests.runners.test_training import tensor_parallel_plan
from tests.small_problems import routed_problem, small_cluster

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(ROOT / "runners" / "launch.py")]


@pytest.fixture
def plan_file(tmp_path):
    """A plan of four ranks with packed links between its two regions."""
    path = tmp_path / "plan.json"
    write_plan(path, *routed_problem(4, compression="int8"))
    return path


def test_rehearsal_runs_the_plans_order_and_writes_logs_and_trace(tmp_path):
    """Loss falls, every worker's executed order is the plan's own, trace, run log and trackers' files are complete."""
    problem, plan = routed_problem(4, compression="int8")
    plan, plan_file = ranked(plan, np.random.default_rng(0)), tmp_path / "plan.json"
    write_plan(plan_file, problem, plan)
    installed = [name for name in TRACKERS if find_spec(name)]
    track = ["--track", *installed] if installed else []
    done = subprocess.run(
        [*COMMAND, plan_file, "--rehearse", "--steps", "12", "--log-dir", tmp_path / "log", "--json", *track],
        cwd=tmp_path,
        env=os.environ | {"WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["steps"] == 12
    assert summary["last_loss"] < 0.9 * summary["first_loss"]
    assert summary["order_differs_on_ranks"] == []
    assert summary["cross_region_bytes_per_step"] > 0
    for rank, (stage, worker, _) in plan.rank_places.items():
        orders = [line["actions"] for line in log_lines(tmp_path / "log", rank) if line["type"] == "order"]
        assert orders == [" ".join(map(str, worker_order(plan, stage, worker)))] * 12
    steps = [line for line in log_lines(tmp_path / "log", 2) if line["type"] == "step"]
    assert all(0 <= step["idle"] < 1 and step["memory_bytes"] > 1e6 for step in steps)
    # Rank 2 leads the last stage in its region: it packs gradients of both kinds, and no activations.
    for kind in ("activation_gradients", "weight_gradients"):
        assert all(0 < step["packing_error"][kind] < 0.02 for step in steps)
    merged = [json.loads(line) for line in Path(summary["log"]).read_text().splitlines()]
    assert [line["step"] for line in merged] == list(range(12))
    for line in merged:
        assert set(line["packing_error"]) == {"activations", "activation_gradients", "weight_gradients"}
        assert set(line["link_bytes"]) >= {"region-0 -> region-1", "region-1 -> region-0"}
        assert 0 < line["mfu"] < 1
        assert 0 < line["bubble"] < 1
        assert 0 < line["exposed_communication"] < 1
        assert line["bubble"] + line["exposed_communication"] < 1
    assert len(list((tmp_path / "log").glob("tensorboard/events*"))) == ("tensorboard" in installed)
    assert len(list((tmp_path / "log").glob("wandb/offline-run-*"))) == ("wandb" in installed)
    events = json.loads(Path(summary["trace"]).read_text())["traceEvents"]
    computed = {(e["pid"], e["name"]) for e in events if e["ph"] == "X" and e["cat"] == "compute"}
    assert computed == {(s, f"{kind}{m}") for s in range(2) for kind in "FB" for m in range(8)}
    assert re.search(r"\[rank 0\] step +11 +loss", done.stderr)


def test_figures_are_shown_where_trace_and_lines_of_steps_cannot_be_written(tmp_path):
    """As on a full disk: training has ended well, and one line each says what is missing."""
    write_plan(tmp_path / "plan.json", *routed_problem(1))
    for name in ("trace.json", "run.jsonl"):
        (tmp_path / "log" / name).mkdir(parents=True)
    code, out, said = ran(launch, [tmp_path / "plan.json", "--steps", "2", "--log-dir", "log", "--json"], tmp_path)
    assert code == 0 and json.loads(out)["steps"] == 2, said
    assert "log/trace.json: cannot be written: Is a directory" in said
    assert "log/run.jsonl: cannot be written: Is a directory" in said


def test_a_run_with_no_step_left_says_so(tmp_path):
    """Resumed when its checkpoint had all steps, as a job that is put back into its queue may be."""
    problem, plan = routed_problem(2)
    for rank in range(plan.world_size):
        (tmp_path / f"rank-{rank}.jsonl").write_text('{"type": "run", "first_step": 8}\n{"type": "end"}\n')
    summary = summarise(problem, plan, tmp_path)
    assert summary["steps"] == 0
    assert "no step was left" in format_summary(summary)


def test_rehearsal_keeps_tensor_parallel_workers(tmp_path):
    """A plan with workers of two devices is rehearsed on ranks that share its layers."""
    problem = replace(routed_problem(1)[0], cluster=small_cluster(4, 2))
    write_plan(tmp_path / "plan.json", problem, tensor_parallel_plan(problem.cluster, ((0, 1),), ((2, 3), (4, 5))))
    words = ["--rehearse", "--max-ranks", "4", "--steps", "6", "--log-dir", tmp_path / "log", "--json"]
    code, out, said = ran(launch, [tmp_path / "plan.json", *words], tmp_path)
    assert code == 0, said
    summary = json.loads(out)
    assert summary["last_loss"] < summary["first_loss"] and summary["order_differs_on_ranks"] == []
    plan = read_plan(tmp_path / "log" / "plan.json").plan
    assert [[worker.tp for worker in stage.workers] for stage in plan.stages] == [[2], [2]]


def ranks_of(pid):
    """Processes whose parent is `pid`, in the order of their start."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(text) for text in found.stdout.split()]


@pytest.fixture
def long_run(plan_file, tmp_path):
    """A launched run in the middle of its steps."""
    words = [plan_file, "--rehearse", "--steps", "100000", "--log-dir", tmp_path / "log"]
    words += ["--checkpoint-dir", tmp_path / "checkpoints", "--dead-after", "10"]
    with Program(launch, words, tmp_path) as program:
        assert any("step    12" in line for line in program.stderr)
        yield program


def gone(pids):
    """Whether all these processes end."""
    return eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_killed_rank_stops_all_and_is_named(long_run):
    """Whoever is killed, all ranks end and the message says who, where and how."""
    ranks = ranks_of(long_run.pid)
    assert len(ranks) == 4
    os.kill(ranks[2], signal.SIGKILL)
    talk = long_run.said()
    assert long_run.returncode == 1
    assert gone(ranks)
    assert re.search(
        r"failed: rank 2 \(stage 1, worker 1, region region-1\): killed by SIGKILL; all ranks stopped", talk
    )


def has_run_for_s(folder, rank):
    """Seconds from the start of a rank's first step to that of its latest."""
    starts_s = [line["start_s"] for line in log_lines(folder, rank) if line["type"] == "step"]
    return starts_s[-1] - starts_s[0] if starts_s else 0.0


def test_stopped_rank_is_noticed_and_named_with_its_last_action(long_run, tmp_path):
    """A rank that hangs (SIGSTOP) ends the run: nothing else is wrong, so only its silence can have been noticed."""
    ranks = ranks_of(long_run.pid)
    # Ranks tell one another every 1.25 s what they do: by then it is a step.
    assert eventually(lambda: has_run_for_s(tmp_path / "log", 1) > 3)
    os.kill(ranks[1], signal.SIGSTOP)
    talk = long_run.said()
    assert long_run.returncode == 1
    assert gone(ranks)
    assert re.search(
        r"lost rank 1 \(stage 1, worker 0, region region-0\): no sign of life for \d+\.\d s; "
        r"its last action was [FB]\d of step \d+",
        talk,
    )


@pytest.mark.parametrize(("number", "whom", "code"), [(signal.SIGINT, None, 130), (signal.SIGTERM, 1, 143)])
def test_interrupt_saves_and_leaves_no_orphans(long_run, tmp_path, number, whom, code):
    """Ctrl-C ends the launcher and every rank after the step, with a checkpoint of it; so does a SIGTERM to a rank."""
    ranks = ranks_of(long_run.pid)
    os.kill(long_run.pid if whom is None else ranks[whom], number)
    talk = long_run.said()
    assert long_run.returncode == code
    assert "interrupted" in talk
    assert gone(ranks)
    [step] = steps_in(tmp_path / "checkpoints")
    steps = [line["step"] for line in log_lines(tmp_path / "log", 3) if line["type"] == "step"]
    assert step == steps[-1] + 1


def test_who_interrupts_before_there_are_ranks_reads_a_line(plan_file, tmp_path):
    """While it still loads what they need: no traceback, and the exit code says the signal."""
    words = [*COMMAND, plan_file, "--rehearse", "--log-dir", tmp_path / "log"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as begun:
        first = begun.stderr.readline()
        begun.send_signal(signal.SIGINT)
        said = begun.stderr.read()
    assert "ranks in stages" in first
    assert begun.returncode == 130 and "Traceback" not in said and "interrupted" in said


@pytest.mark.parametrize("again", [launch, train])
def test_a_folder_in_which_a_run_writes_is_not_taken(long_run, plan_file, tmp_path, again, capsys):
    """Its logs would be cut off and its plan replaced; once it has ended the folder may be used again."""
    log, recipe = tmp_path / "log", "instances/recipes/llm-1d-tiny.yaml"
    kept = (log / "plan.json").read_bytes()
    words = [str(plan_file), "--rehearse", "--log-dir", str(log)] if again is launch else [recipe, "-o", str(log)]
    words += ["--steps", "1"]
    assert again(words) == 2
    assert f"{log}: found logs of a run that still goes on, expected none" in capsys.readouterr().err
    long_run.send_signal(signal.SIGINT)
    long_run.said()
    assert (log / "plan.json").read_bytes() == kept
    assert len([line for line in log_lines(log, 0) if line["type"] == "step"]) > 10
    assert again(words) == 0
    assert [line["step"] for line in log_lines(log, 0) if line["type"] == "step"] == [0]


def test_killed_launcher_leaves_no_orphans(long_run):
    """Ranks do not outlive a launcher that could not say goodbye."""
    ranks = ranks_of(long_run.pid)
    long_run.send_signal(signal.SIGKILL)
    assert gone(ranks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--dist-url: found none, expected tcp://HOST:PORT (or torchrun's MASTER_ADDR and MASTER_PORT)"),
        (["--dist-url", "udp://h:1"], "--dist-url: found 'udp://h:1', expected tcp://HOST:PORT"),
        (
            ["--dist-url", "tcp://h:1"],
            "--world-size: found none, expected a whole number >= 0 (or torchrun's WORLD_SIZE)",
        ),
        (
            ["--dist-url", "tcp://h:1", "--world-size", "3", "--rank", "0"],
            "--world-size: found 3, expected 4, the ranks of the plan",
        ),
        (["--dist-url", "tcp://h:1", "--world-size", "4", "--rank", "4"], "--rank: found 4, expected 0..3"),
        (["--steps", "0"], "--steps: found 0, expected a whole number >= 1"),
        (["--seed", "-1"], "--seed: found -1, expected a whole number >= 0"),
        (["--lora", "2"], "--lora: found without --weights, expected with it"),
        (["--lora-alpha", "2"], "--lora-alpha: found without --lora, expected with it"),
        (["--tokenizer", "t"], "--tokenizer: found without --data, expected with it"),
        (["--validation-data", "t"], "--validation-data: found without --validate-every, expected with it"),
        (
            ["--max-ranks", "2"],
            "--max-ranks: found without --rehearse, expected with it (a real run needs all its devices)",
        ),
    ],
)
def test_bad_options_give_one_line_and_exit_2(plan_file, capsys, monkeypatch, arguments, message):
    """The message alone lets the user mend the command."""
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    assert dist_runner(["--plan", str(plan_file), *arguments]) == 2
    assert capsys.readouterr().err == f"dist_runner: {message}\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            [],
            r"launch: memory: found [\d.,]+ GB available [a-z' ]+, expected the [\d,]{5,} GB that 4 ranks need \(--r",
        ),
        (
            ["--rehearse", "--data", "no.txt"],
            "launch: --data no.txt: No such file or directory, expected a readable file or folder",
        ),
        (["--rehearse", "--log-dir", "/dev/null/x"], "launch: /dev/null/x: cannot be made: Not a directory"),
    ],
)
def test_what_this_machine_cannot_run_is_refused_before_it_starts(options, message, tmp_path):
    """GPT-3 on four ranks here would take the machine down; data that is not there is one line, not one a rank."""
    problem, plan = routed_problem(4)
    giant = replace(problem.model, hidden_size=80 * problem.model.hidden_size, ffn_size=5_000_000)
    write_plan(tmp_path / "plan.json", replace(problem, model=giant), plan)
    code, _, said = ran(launch, ["plan.json", "--device", "cpu", "--log-dir", "log", *options], tmp_path)
    talk, error = said.splitlines()
    assert code == 2 and "4 ranks" in talk and re.match(message, error)
    assert not (tmp_path / "log").exists()


def test_ranks_with_different_plans_refuse_to_start(tmp_path):
    """By path from any directory; torchrun's environment; every rank gives the same line and exits 2."""
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    write_plan(files[0], *routed_problem(2))
    write_plan(files[1], *routed_problem(2, compression="bf16"))
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    environment.pop("PYTHONPATH", None)
    ranks = [
        subprocess.Popen(
            [sys.executable, ROOT / "runners" / "dist_runner.py", "--plan", file, "--steps", "1"],
            env=environment | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for rank, file in enumerate(files)
    ]
    talk = [rank.communicate(timeout=PATIENCE_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert talk[0] == talk[1]
    assert re.fullmatch(
        r"dist_runner: plan and options of rank 1: found digest \w+, expected \w+ as on rank 0\n", talk[0]
    )


def test_ranks_that_are_started_one_by_one_leave_one_folder_with_figures(tmp_path):
    """Whatever each would call it (another second or file); plan, trace, lines of steps as the launcher has them."""
    names = ["plan.json", "copy.json"]
    for name in names:
        write_plan(tmp_path / name, *routed_problem(2))
    words = ["--steps", "2", "--dist-url", f"tcp://127.0.0.1:{free_port()}", "--world-size", 2, "--rank"]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(Program(dist_runner, ["--plan", name, *words, rank], tmp_path))
            for rank, name in enumerate(names)
        ]
        said = [rank.said() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    (folder,) = (tmp_path / "out").iterdir()
    assert folder.name.startswith("plan-")
    files = ["plan.json", "rank-0.jsonl", "rank-1.jsonl", "run.jsonl", "trace.json"]
    assert sorted(path.name for path in folder.iterdir()) == files
    assert read_plan(folder / "plan.json").plan.world_size == 2


def test_a_run_of_the_same_second_has_a_folder_of_its_own(tmp_path, monkeypatch):
    """Logs of two runs of a plan are not mixed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("runners.engine.arguments.time.strftime", lambda form: "now")
    for expected in ("plan-now", "plan-now-2", "plan-now-3"):
        found = default_log_dir(Path("there/plan.json"))
        assert found == Path("out") / expected
        found.mkdir(parents=True)


def test_logs_on_other_hosts_are_said_to_be_missing(tmp_path, capsys):
    """Figures of all ranks need all logs."""
    problem, plan = routed_problem(8)
    (tmp_path / "rank-0.jsonl").write_text('{"type": "run", "first_step": 8}\n{"type": "end"}\n')
    sum_up(problem, plan, tmp_path, 1.0)
    assert "rank-1.jsonl and 6 more are on other hosts: no figures of all ranks" in capsys.readouterr().err
