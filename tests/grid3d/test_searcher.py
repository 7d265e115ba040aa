"""The earlier searcher's formula, its files and its constants."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from polygon.commands import cli
from polygon.domain.errors import InputError
from polygon.grid3d.__main__ import main
from polygon.grid3d.searcher import Constants, read_metadata
from polygon.grid3d.splits import GridSplit

CLUSTER = {
    "n_node": 2,
    "n_gpu_per_node": 4,
    "gpu_gflops": 14000,
    "gpu_memory": 16384,
    "bw_gpu_to_gpu": 50,
    "bw_cpu_to_gpu": 12,
    "bw_cpu_to_cpu": 10,
    "bw_inter_node": 5,
}
MODEL = {
    "global_batch_size": 32,
    "num_layers": 3,
    "layer_tflops": [1.0, 2.0, 1.2],
    "layer_activation_MB": [64, 128, 32],
    "dp_sum_gradient_MB": 512,
    "tp_comm_sum_MB": 1024,
    "tp_comm": [1, 2, 3],
}


def test_formula_by_hand():
    """dp 2, tp 2, pp 2: 0.35/1.2/1.25 efficiency on 56 TFLOP/s, over 0.6; 512, 512 and 256 MB at 51.2 GB/s."""
    terms = read_metadata(CLUSTER, MODEL, Constants()).terms_ms(GridSplit(2, 2, 2))
    assert terms["compute"] == pytest.approx(3 * 4.2 / 56 / (0.35 / 1.2 / 1.25) / 0.6 * 1000)
    assert terms["data-parallel"] == pytest.approx(512 / 51200 * 1000)
    assert terms["tensor-parallel"] == pytest.approx(512 / 51200 * 1000)
    assert terms["pipeline-parallel"] == pytest.approx(256 / 51200 * 1000)


def test_one_of_each_costs_compute_alone_and_wide_data_parallelism_leaves_the_node():
    """Communication is 0 for a degree of 1; more data-parallel ranks than a node's GPUs use the slow link."""
    case = read_metadata(CLUSTER, MODEL, Constants())
    assert list(case.terms_ms(GridSplit(1, 1, 1)).values())[1:] == [0, 0, 0]
    wide = case.terms_ms(GridSplit(8, 1, 1))
    assert wide["data-parallel"] == pytest.approx(512 * 2 * 7 / 8 / (5 * 1024) * 1000)
    assert wide["compute"] == pytest.approx(3 * 4.2 / (14 * 8) / (0.35 / 2.4 / 1.7) * 1000)


def test_constants_are_parameters():
    """Twice the base efficiency halves compute; no penalty for imbalance leaves 1."""
    usual = read_metadata(CLUSTER, MODEL, Constants()).terms_ms(GridSplit(4, 1, 2))
    better = read_metadata(CLUSTER, MODEL, Constants(base_efficiency=0.7)).terms_ms(GridSplit(4, 1, 2))
    assert better["compute"] == pytest.approx(usual["compute"] / 2)
    level = read_metadata(CLUSTER, MODEL, replace(Constants(), imbalance_penalty=0)).terms_ms(GridSplit(4, 1, 2))
    assert level["compute"] == pytest.approx(usual["compute"] / 1.3)


def test_command_reads_the_files_as_they_are(tmp_path, capsys):
    """Metadata files choose the formula; every split is written, long pipelines with their reason."""
    for name, data in (("cluster.json", CLUSTER), ("model.json", MODEL)):
        (tmp_path / name).write_text(json.dumps(data))
    out = tmp_path / "output.json"
    words = [str(tmp_path / "cluster.json"), str(tmp_path / "model.json"), "-o", str(out), "--jobs", "1"]
    assert cli.run(main, words) == 0
    data = json.loads(out.read_text())
    assert data["cost_model"] == "seed003"
    rows = data["configurations"]
    assert len(rows) == 10
    steps = [row["step_s"] for row in rows if not row["rejected"]]
    assert steps == sorted(steps)
    # All eight GPUs compute: penalties 1.6 x 1.25 x 1.2 for 4 x 2 against 1.2 x 1.75 x 1.2 for 2 x 4.
    assert (rows[0]["dp"], rows[0]["tp"], rows[0]["pp"]) == (4, 2, 1)
    assert {row["rejected"] for row in rows[len(steps) :]} == {
        "pp 4 is more than the 3 layers",
        "pp 8 is more than the 3 layers",
    }
    assert cli.run(main, [*words, "--cost-model", "polygon"]) == 2
    assert "expected a cluster file for --cost-model polygon" in capsys.readouterr().err


def test_polygons_own_files_can_be_priced_by_the_formula(tmp_path, capsys):
    """What the searcher would have been told is derived from cluster, model and batch."""
    (tmp_path / "cluster.yaml").write_text(
        "name: one\nregions:\n- name: here\n  nodes:\n"
        "  - {device: a100-40gb, count: 1, devices_per_node: 4, intra_node: nvlink3}\n"
    )
    out = tmp_path / "o.json"
    words = [str(tmp_path / "cluster.yaml"), "gpt3-125m", "--global-batch", "8", "-o", str(out)]
    words += ["--cost-model", "seed003"]
    assert cli.run(main, words) == 0
    rows = json.loads(out.read_text())["configurations"]
    assert len(rows) == 6 and not any(row["rejected"] for row in rows)
    assert "pipeline-parallel ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cluster", "model", "words"),
    [
        ({"n_gpu_per_node": 4}, MODEL, "expected the key n_node or n_nodes"),
        (CLUSTER | {"bw_inter_node": -1}, MODEL, "bw_inter_node: found -1, expected a number > 0"),
        (CLUSTER | {"n_node": 1.5}, MODEL, "n_node: found 1.5, expected a whole number >= 1"),
        (CLUSTER, [1, "a"], "model metadata: found 'list', expected a mapping"),
        (CLUSTER, MODEL | {"num_layers": True}, "num_layers: found True, expected a whole number"),
        (CLUSTER, {"num_layers": 3}, "expected the key layer_tflops"),
        (CLUSTER, MODEL | {"layer_activation_MB": []}, "layer_activation_MB: found \\[\\], expected a list"),
    ],
)
def test_bad_metadata_is_named(cluster, model, words):
    """Which key, what was found, what is expected."""
    with pytest.raises(InputError, match=words):
        read_metadata(cluster, model, Constants())
