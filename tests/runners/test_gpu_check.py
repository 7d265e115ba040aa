"""Laws of the check for machines with a GPU."""

import json

import pytest
import torch

from benchmarks.gpu_check import (
    STEPS,
    CommandError,
    bench,
    cluster_file,
    configuration,
    main,
    output_of,
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


def test_what_a_part_said_last_is_kept():
    """A command that ends badly is told with its exit code and its last line."""
    with pytest.raises(CommandError, match=r"polygon\.search --cluster missing\.yaml .*: exit 2: .*missing\.yaml"):
        output_of("polygon.search", "--cluster", "missing.yaml", "--model", "gpt-tiny", "--global-batch", "4")


def test_a_configuration_is_planned_run_and_held_against_its_prediction(tmp_path):
    """The part that nobody can try without a GPU is the same on a core: figures of both, and how far they are apart."""
    cluster_file(tmp_path, "cpu")
    bench(tmp_path, "cpu", quick=True)
    row = configuration(tmp_path, "cpu", "gpt-tiny", 2, 64, ("--precision", "fp32"))
    assert row["measured"]["steps"] == STEPS and set(row["predicted"]) == {"catalogue", "bench"}
    for of, predicted in row["predicted"].items():
        assert row["errors"][of] == pytest.approx(predicted["step_s"] / row["measured"]["median_step_s"] - 1)
    assert row["mfu"] > 0 and row["memory_error"] > -1


def test_parts_that_are_named_are_done_again_in_a_file_that_is_there(tmp_path, capsys):
    """What was found before stays; a name that no part has is told, with those there are."""
    out = tmp_path / "found.json"
    out.write_text('{"parts": {"recipes": {"result": [], "seconds": 1.0}}}')
    assert main(["streams", "-o", str(out), "--device", "cpu", "--quick"]) == 0
    assert set(json.loads(out.read_text())["parts"]) == {"recipes", "streams and NCCL"}
    assert main(["stream of", "-o", str(out), "--device", "cpu", "--quick"]) == 1
    assert "no part begins with 'stream of'; parts: streams and NCCL; bench;" in capsys.readouterr().err
