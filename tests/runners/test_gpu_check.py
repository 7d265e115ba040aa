"""Laws of the check for machines with a GPU."""

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_check import (
    QUICK,
    STEPS,
    CommandError,
    Configuration,
    bench,
    cluster_file,
    configuration,
    experts_at_once,
    host,
    main,
    masked_attention,
    output_of,
    recorded_step,
    streams_and_nccl,
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys, tmp_path):
    """Nothing is written, and the exit code tells."""
    assert main(["-o", str(tmp_path / "found.json")]) == 2
    assert capsys.readouterr().err == "gpu-check: torch sees no GPU here: nothing was checked\n"
    assert not list(tmp_path.iterdir())


def test_sums_of_one_rank_with_itself_are_right():
    """The part that checks streams and communicators does, on what is there (here a core)."""
    assert streams_and_nccl("cpu")["sums"] == [((1 << 20) - 1.0) * times for times in range(1, 5)]


class Launches(TorchDispatchMode):
    """A clock that a launched operation moves on by a second: the same on every machine, whatever runs beside."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))

    def perf_counter(self):
        """As of `time`."""
        return float(self.count)


def test_hosts_launch_what_the_engine_runs(monkeypatch):
    """Experts that run one after another are several times as many launches as a block without."""
    with Launches() as clock:
        monkeypatch.setattr("runners.profile_layers.time", clock)
        rows = {(row["gated"], row["experts"]): row for row in host("cpu", quick=True)}
    for gated in (False, True):
        for part in ("forward_s", "backward_s"):
            assert rows[gated, 32][part] > 2 * rows[gated, 8][part] > 2 * rows[gated, 0][part] > 20


def test_experts_at_once_are_held_against_one_after_another():
    """Outputs and gradients of both, and how long either takes."""
    [row] = experts_at_once("cpu", quick=True)
    assert row["in_one_kernel"] and row["apart"] < 0.02 and row["alone_s"] > 0 and row["at_once_s"] > 0


def test_masks_are_measured():
    """Every mask is one of more keys than queries, and the row without one is of as many."""
    for row in masked_attention("cpu", quick=True):
        assert row["masked"] == (row["keys"] > row["queries"]) and row["forward_s"] > 0 and row["backward_s"] > 0


def test_what_a_part_said_last_is_kept():
    """A command that ends badly is told with its exit code and its last line."""
    with pytest.raises(CommandError, match=r"polygon\.search --cluster missing\.yaml .*: exit 2: .*missing\.yaml"):
        output_of("polygon.search", "--cluster", "missing.yaml", "--model", "gpt-tiny", "--global-batch", "4")


def test_a_configuration_is_planned_run_and_held_against_its_prediction(tmp_path):
    """The part that nobody can try without a GPU is the same on a core: figures of both, and how far they are apart.
    What the plan is told it has; a step that the profiler records is none of those that count."""
    cluster_file(tmp_path, "cpu-core")
    bench(tmp_path, "cpu", seconds=0.5)
    of = Configuration(
        model="experts-tiny", sequences=2, tokens=64, options=("--precision", "fp32"), micro_batch_size=1,
        recompute="full", profiled=True,
    )  # fmt: skip
    row = configuration(tmp_path, "cpu", of)
    assert len(row["measured"]["steps_s"]) == STEPS - 1 and set(row["predicted"]) == {"catalogue", "bench"}
    assert row["plan"]["micro_batch_size"] == 1 and row["plan"]["stages"][0]["recompute"] == "full"
    for source, predicted in row["predicted"].items():
        assert row["errors"][source] == pytest.approx(predicted["step_s"] / row["measured"]["step_s"] - 1)
    assert row["mfu"] > 0 and row["memory_error"] > -1
    assert row["recorded"]["forward"]["host_s"] > 0 and row["recorded"]["backward"]["host_s"] > 0


def test_a_plan_that_is_there_is_not_made_again(tmp_path, capsys, monkeypatch):
    """Plans and predictions made elsewhere, with no such device at hand, are those that a machine runs."""
    monkeypatch.setattr("benchmarks.gpu_check.QUICK", QUICK[:1])
    out = tmp_path / "check.json"
    assert main(["--plan-for", "h100-sxm", "--quick", "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert len(said.splitlines()) == 1 and said.startswith("gpt-tiny, 4 x 64")
    files = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "check").glob("*.json"))}
    assert len(files) == 1
    assert main(["--plan-for", "h100-sxm", "--quick", "-o", str(out)]) == 0
    assert capsys.readouterr().out == said
    assert {path: path.stat().st_mtime_ns for path in files} == files


def test_kernels_are_those_of_what_the_host_launched_them_for(tmp_path):
    """By when their launch was, not by when they ran; what the host waited for is told."""

    def event(cat: str, name: str, ts: float, dur: float, correlation: int | None = None) -> dict:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}

    events = [
        event("user_annotation", "compute: F0", 0, 10),
        event("user_annotation", "compute: B0", 10, 20),
        event("cuda_runtime", "cudaLaunchKernel", 1, 2, 1),
        event("cuda_runtime", "cudaStreamSynchronize", 4, 3, 2),
        event("cuda_runtime", "cudaLaunchKernel", 12, 2, 3),
        event("cuda_runtime", "cudaLaunchKernel", 40, 2, 4),
        event("kernel", "product", 15, 5, 1),
        event("kernel", "product", 20, 7, 3),
        event("gpu_memset", "zero", 50, 1, 4),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = recorded_step(path)
    assert found["forward"] == {
        "host_s": pytest.approx(10e-6), "waited_s": pytest.approx(3e-6), "kernels": 1,
        "device_s": pytest.approx(5e-6), "longest": [["product", 1, pytest.approx(5e-6)]],
    }  # fmt: skip
    assert found["backward"]["longest"] == [["product", 1, pytest.approx(7e-6)]]
    assert found["other"]["kernels"] == 1 and found["other"]["device_s"] == pytest.approx(1e-6)


def test_parts_that_are_named_are_done_again_in_a_file_that_is_there(tmp_path, capsys):
    """What was found before stays; a name that no part has is told, with those there are."""
    out = tmp_path / "found.json"
    out.write_text('{"parts": {"recipes": {"result": [], "seconds": 1.0}}}')
    assert main(["streams", "-o", str(out), "--device", "cpu", "--quick"]) == 0
    assert set(json.loads(out.read_text())["parts"]) == {"recipes", "streams and NCCL"}
    assert main(["stream of", "-o", str(out), "--device", "cpu", "--quick"]) == 1
    assert "no part begins with 'stream of'; parts: streams and NCCL; bench;" in capsys.readouterr().err
