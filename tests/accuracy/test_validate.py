"""The command that holds predictions against measurements."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polygon.accuracy.foreign_rows import NotExpressibleError, device_named
from polygon.accuracy.measured import MeasuredRun, plan_runs, published_run, row_runtime
from polygon.accuracy.rows import Row, accuracy, predict
from polygon.accuracy.sailor_runs import sailor_runs
from polygon.commands import cli, validate
from polygon.cost.blocks import HOST_ERROR
from polygon.cost.uncertainty import beyond_host, errors
from polygon.cost.zero_sums import weight_matrices
from polygon.domain.errors import InputError
from polygon.domain.runtime import DP_OVERLAP, Runtime
from polygon.domain.uniform import uniform_config
from polygon.formats import catalogue
from polygon.formats.serialization import parse_yaml
from tests.nightly import NIGHTLY
from tests.once import made_once

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "instances" / "measured"
PUBLISHED = str(MEASURED / "published_runs.json")
STAGED = [
    str(MEASURED / "sailor_validation.json"),
    "--profiles",
    str(MEASURED / "sailor_profiles.json"),
    "--network",
    str(MEASURED / "sailor_network.json"),
]


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert cli.run(validate.main, [*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


ERRORS = ROOT / "polygon" / "domain" / "catalogue" / "errors.yaml"


@pytest.fixture(scope="module")
def remade(tmp_path_factory) -> tuple[dict, dict, list[Row]]:
    """The report and the errors that the command in the header of errors.yaml makes, and the rows they are made of."""
    return made_once(tmp_path_factory, "remade", lambda: _remade(tmp_path_factory))


def _remade(tmp_path_factory) -> tuple[dict, dict, list[Row]]:
    (command,) = re.findall(r"^# Made by: polygon validate (.+)$", ERRORS.read_text(), re.MULTILINE)
    target = tmp_path_factory.mktemp("errors") / "errors.yaml"
    argv = []
    for word in shlex.split(command):
        found = sorted(str(path) for path in ROOT.glob(word)) if "/" in word else [word]
        argv += [str(target) if name == "FILE" else name for name in found]
    out, rows, predicted = io.StringIO(), [], validate.predicted

    def kept(*given):
        found = predicted(*given)
        rows.extend(found[0])
        return found

    with contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as patch:
        patch.setattr(validate, "predicted", kept)
        assert cli.run(validate.main, [*argv, "--json"]) == 0
    return json.loads(out.getvalue()), parse_yaml(target.read_text()), rows


def part(remade: tuple[dict, dict, list[Row]], name: str) -> dict:
    """The report of one collection alone: what is predicted of a run does not hang on the others."""
    found, _, rows = remade
    listed = {entry["id"] for entry in json.loads((MEASURED / name).read_text())["rows"]}
    skipped = [entry for entry in found["skipped"] if entry["id"] in listed]
    return validate.report_of([row for row in rows if row.identifier in listed], skipped)


def test_promised_accuracy_on_runs_never_fitted(capsys, tmp_path):
    """Mean error: 5 % overall, 6 % in every data set, 5 % on the two Megatron papers, 6 % and 5 % from profiles.

    README's table is what the command makes of it.
    """
    page = shutil.copy(ROOT / "README.md", tmp_path)
    found = report(capsys, PUBLISHED, *STAGED, "--update", str(page))
    assert Path(page).read_text("utf-8") == (ROOT / "README.md").read_text("utf-8")
    assert found["overall"]["time"]["mean_abs_pct"] <= 5
    for name, kinds in found["datasets"].items():
        assert kinds["time"]["mean_abs_pct"] <= 6, name
    for name in ("korthikanti_table5", "megatron_sc21_table1"):
        assert found["datasets"][name]["time"]["mean_abs_pct"] <= 5
    assert found["datasets"]["sailor_validation"]["time"]["mean_abs_pct"] <= 6
    assert found["datasets"]["sailor_validation"]["memory"]["mean_abs_pct"] <= 5
    assert found["datasets"]["megatron_ci"]["memory"]["mean_abs_pct"] <= 4
    assert 80 <= found["overall"]["time"]["interval_coverage_pct"] <= 97.5


@pytest.mark.skipif(not NIGHTLY, reason="all rows once more: by night")
def test_the_table_of_predictions_is_what_its_command_makes(capsys, tmp_path):
    """Every row of every collection, as docs/prediction.md says it was made."""
    page = shutil.copy(ROOT / "docs" / "prediction.md", tmp_path)
    report(capsys, *map(str, sorted(MEASURED.glob("*_runs.json"))), *STAGED, "--update", str(page))
    assert Path(page).read_text("utf-8") == (ROOT / "docs" / "prediction.md").read_text("utf-8")


def test_promised_accuracy_on_tables_collected_later(remade):
    """Mean error: 10 % in time, 15 % in memory; the intervals hold eight rows of ten; none of them may be fitted."""
    found = part(remade, "collected_runs.json")
    assert not found["calibration"]["datasets"] and not found["skipped"]
    assert found["overall"]["time"]["mean_abs_pct"] <= 10
    assert found["overall"]["memory"]["mean_abs_pct"] <= 15
    for quantity in ("time", "memory"):
        assert found["overall"][quantity]["interval_coverage_pct"] >= 80
    for name in ("mosaicml_multinode", "nvidia_dgxc", "bigscience_176b"):
        assert found["datasets"][name]["time"]["mean_abs_pct"] <= 6


def test_promised_accuracy_on_tables_never_looked_at(remade):
    """What docs/prediction.md says of the second collection, which led to no change of the model."""
    found = part(remade, "recipe_runs.json")
    time = found["overall"]["time"]
    assert time["mean_abs_pct"] <= 8 and time["median_abs_pct"] <= 4 and time["interval_coverage_pct"] >= 90
    assert {entry["reason"].split(":")[0] for entry in found["skipped"]} == {"marked as not predictable"}


def test_promised_accuracy_on_the_third_collection(remade):
    """10 % in the mean, 6.5 % in the median; which of ZeRO-3 and Megatron is faster is known."""
    found = part(remade, "megatron_runs.json")
    time = found["overall"]["time"]
    assert time["rows"] == 161 and not found["skipped"] and not found["calibration"]["datasets"]
    assert time["mean_abs_pct"] <= 10 and time["median_abs_pct"] <= 6.5 and time["spearman"] >= 0.95
    assert time["interval_coverage_pct"] >= 85
    assert found["datasets"]["megatron_sc21_table2"]["time"]["regret_pct"] <= 2


SECOND_BLIND = (
    "dgxc_2505", "dtfm_deepspeed", "dtfm_megatron_slow", "languini_gpt", "nemo_bert", "nemo_launcher", "qwen_finetune"
)  # fmt: skip


def of_datasets(remade: tuple[dict, dict, list[Row]], name: str, wanted: Callable[[str], bool]) -> dict:
    """`part` of a collection, of some of its data sets."""
    found, _, rows = remade
    entries = json.loads((MEASURED / name).read_text())["rows"]
    listed = {entry["id"] for entry in entries if wanted(entry["dataset"])}
    skipped = [entry for entry in found["skipped"] if entry["id"] in listed]
    return validate.report_of([row for row in rows if row.identifier in listed], skipped)


def test_promised_accuracy_on_further_kinds_of_runs(remade):
    """What docs/prediction.md says of them: 15 % in the mean, 10 % in the median, for half of the kinds 10 %."""
    found = of_datasets(remade, "further_runs.json", lambda dataset: dataset not in SECOND_BLIND)
    time = found["overall"]["time"]
    assert time["rows"] == 87 and not found["calibration"]["datasets"]
    assert time["mean_abs_pct"] <= 15 and time["median_abs_pct"] <= 10 and time["spearman"] >= 0.95
    assert time["interval_coverage_pct"] >= 85
    means = [kinds["time"]["mean_abs_pct"] for kinds in found["datasets"].values()]
    assert len(means) == 15 and np.median(means) <= 10.5
    assert {entry["reason"].split(":")[0] for entry in found["skipped"]} == {"marked as not predictable"}


def test_promised_accuracy_on_the_second_blind_test(remade):
    """What docs/prediction.md says of it: 18 % in the mean, 15 % in the median, too short; memory 10 %."""
    found = of_datasets(remade, "further_runs.json", lambda dataset: dataset in SECOND_BLIND)
    time, memory = found["overall"]["time"], found["overall"]["memory"]
    assert set(found["datasets"]) == set(SECOND_BLIND) and time["rows"] == 91 and memory["rows"] == 9
    assert time["mean_abs_pct"] <= 19 and time["median_abs_pct"] <= 16 and time["spearman"] >= 0.95
    assert memory["mean_abs_pct"] <= 11 and time["interval_coverage_pct"] >= 85
    assert found["datasets"]["dgxc_2505"]["time"]["mean_abs_pct"] <= 13
    assert {entry["id"] for entry in found["skipped"]} == {"dgxc_2505-033", "dgxc_2505-034"}


def test_promised_accuracy_on_plans_over_slow_links(remade):
    """A seventh and a tenth too short in the mean, with the intervals as wide; yet the fastest plan is known."""
    found = part(remade, "plan_runs.json")
    times = {name: kinds["time"] for name, kinds in found["datasets"].items()}
    most = {"amp_t4x16": (47, 15), "amp_v100_t4": (43, 12), "dtfm_megatron_regions": (8, 13)}
    most |= {"dtfm_sizes": (30, 6), "dtfm_wan_pp8": (35, 12)}
    assert {name: time["rows"] for name, time in times.items()} == {name: rows for name, (rows, _) in most.items()}
    for name, (_, mean) in most.items():
        assert times[name]["mean_abs_pct"] <= mean, name
    assert times["amp_v100_t4"]["median_abs_pct"] <= 8 and times["amp_v100_t4"]["regret_pct"] == 0
    time = found["overall"]["time"]
    assert time["spearman"] >= 0.95 and time["regret_pct"] <= 1


def test_a_profile_speaks_for_runs_of_its_own_length_alone(capsys):
    """BERT-large is as wide and deep as Sailor's OPT-350M, with shorter sequences: priced without its profile."""
    found = report(capsys, str(MEASURED / "further_runs.json"), "--dataset", "bert_large", *STAGED[1:])
    assert len(found["rows"]) == 16 and {row["source"] for row in found["rows"]} == {"spec", "calibrated"}


def test_nine_rows_of_ten_lie_in_their_intervals(remade):
    """In every shipped collection, without a profile: intervals are made of these errors, so no wider, no narrower."""
    found, _, _ = remade
    rows = {row["dataset"] + "/" + row["id"]: row for row in found["rows"] if row["quantity"] == "time"}
    for file in ("published", "collected", "megatron", "recipe", "bridge", "further", "plan"):
        listed = json.loads((MEASURED / f"{file}_runs.json").read_text())["rows"]
        mine = [rows.get(f"{entry['dataset']}/{entry['id']}") for entry in listed]
        inside = [row["low"] <= row["measured"] <= row["high"] for row in mine if row and row["split"] == "test"]
        assert len(inside) > 50 and 85 <= 100 * np.mean(inside) <= 98, file
    sailors = [row for row in rows.values() if row["runtime"] == "sailor"]
    assert len(sailors) == 48 and {row["source"] for row in sailors} == {"spec"}
    assert 85 <= 100 * np.mean([row["low"] <= row["measured"] <= row["high"] for row in sailors]) <= 97


def test_the_catalogues_errors_are_what_its_command_makes(remade):
    """The same groups with as many runs, and errors within rounding."""
    made, shipped = remade[1], parse_yaml(ERRORS.read_text())
    assert {name: entry["runs"] for name, entry in made["groups"].items()} == {
        name: entry["runs"] for name, entry in shipped["groups"].items()
    }
    for name, entry in made["groups"].items():
        assert entry["error"] == pytest.approx(shipped["groups"][name]["error"], abs=0.0015), name
    assert made["unknown"] == pytest.approx(shipped["unknown"], abs=0.0015)
    assert made["coverage"] == shipped["coverage"] == 0.9


def test_errors_are_made_of_what_was_never_fitted(remade):
    """Quantiles by hand, of one group; fitted rows and times from a profile are none of the scores."""
    found, made, _ = remade
    chosen = [row for row in found["rows"] if row["dataset"] == "internevo_7b"]
    scores = sorted(abs(math.log(row["measured"] / row["predicted"])) for row in chosen)
    own = made["groups"]["ampere/internevo"]
    assert own["runs"] == 46 and 0 <= own["error"] - scores[math.ceil(47 * 0.9) - 1] < 0.001
    times = [row for row in found["rows"] if row["quantity"] == "time" and row["split"] == "test"]
    assert sum(entry["runs"] for name, entry in made["groups"].items() if "/" not in name) == len(times)


@pytest.mark.parametrize(("by", "field"), [("runtime", "runtime"), ("device", "device"), ("bound", "largest")])
def test_rows_are_told_apart_by_runtime_device_or_what_bounds_them(capsys, by, field):
    """Every row is in one group, that of its own field; the text has the same lines."""
    if by == "bound":  # over fast networks compute bounds all
        argv = [str(MEASURED / "plan_runs.json"), "--by", by]
    else:
        argv = [PUBLISHED, "--by", by]
        for name in ("megatron_ci", "megatron_2020", "sailor_gh200"):
            argv += ["--dataset", name]
    found = report(capsys, *argv)
    expected: dict[str, dict[str, int]] = {}
    for row in found["rows"]:
        kinds = expected.setdefault(row[field], {})
        kinds[row["quantity"]] = kinds.get(row["quantity"], 0) + 1
    assert "datasets" not in found and len(expected) >= 3
    assert expected == {
        name: {quantity: statistics["rows"] for quantity, statistics in kinds.items()}
        for name, kinds in found[f"{by}s"].items()
    }
    assert cli.run(validate.main, argv) == 0
    printed = capsys.readouterr().out
    assert all(re.search(rf"^{re.escape(name)} +(time|memory) ", printed, re.MULTILINE) for name in expected)


def test_every_row_is_predicted_or_skipped_with_its_reason(capsys, tmp_path):
    """No row disappears: the report's rows and its skipped ones are the file's."""
    rows = json.loads(Path(PUBLISHED).read_text())["rows"][:4]
    rows[1] = {**rows[1], "device": "Abacus-3000"}
    rows[2] = {**rows[2], "dp": 5}
    rows[3] = {k: v for k, v in rows[3].items() if k != "derived_iteration_time_s"}
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"rows": rows}))
    found = report(capsys, str(file))
    assert [row["id"] for row in found["rows"]] == [rows[0]["id"]]
    reasons = {entry["id"]: entry["reason"] for entry in found["skipped"]}
    assert set(reasons) == {row["id"] for row in rows[1:]}
    assert "Abacus-3000" in reasons[rows[1]["id"]]
    assert "neither a time nor a memory" in reasons[rows[3]["id"]]


def test_a_plan_of_an_undescribed_model_is_skipped_with_its_reason(capsys, tmp_path):
    """A missing field or model is named; the other configurations are predicted."""
    data = json.loads((MEASURED / "sailor_validation.json").read_text())
    data["configurations"] = data["configurations"][:3]
    data["configurations"][0]["model"] = "OPT-9000"
    del data["configurations"][1]["plan"]
    file = tmp_path / "staged.json"
    file.write_text(json.dumps(data))
    found = report(capsys, str(file), *STAGED[1:])
    assert [entry["reason"] for entry in found["skipped"]] == [
        "model OPT-9000 is not described in the file",
        "the field 'plan' is missing",
    ]
    assert {row["quantity"] for row in found["rows"]} == {"time", "memory"} and len(found["rows"]) == 2


def test_bad_input_is_one_line_and_exit_2(capsys, tmp_path):
    """A file of another kind is refused by name."""
    file = tmp_path / "other.json"
    file.write_text('{"a": 1}')
    assert cli.run(validate.main, [str(file)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "neither `rows` nor `configurations`" in error


def test_update_replaces_what_is_between_the_markers(capsys, tmp_path):
    """Only the table changes; a file without markers is refused."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{validate.BEGIN}\nold\n{validate.END}\nafter\n")
    assert cli.run(validate.main, [PUBLISHED, "--dataset", "megatron_ci", "--update", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "megatron_ci" in text and "old" not in text
    page.write_text(f"{validate.END} nothing {validate.BEGIN}")
    assert cli.run(validate.main, [PUBLISHED, "--update", str(page)]) == 2
    capsys.readouterr()


def test_plot_is_written(capsys, tmp_path):
    """A PNG with one panel a quantity."""
    pytest.importorskip("matplotlib")
    target = tmp_path / "scatter.png"
    assert cli.run(validate.main, [PUBLISHED, "--dataset", "megatron_ci", "--plot", str(target)]) == 0
    assert target.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()


def row(measured: float, predicted: float, work: float = 1.0) -> Row:
    return Row(
        identifier="r",
        dataset="d",
        quantity="time",
        calibration=False,
        measured=measured,
        predicted=predicted,
        low=0.9 * predicted,
        high=1.1 * predicted,
        source="spec",
        owner="compute",
        terms={},
        group=("g",),
        work=work,
        runtime="unknown",
        device="a100-80gb",
        fullness=0.8 if predicted < 10 else 1.2,
    )


def test_statistics_by_hand():
    """Errors +10, -20 and +80 percent; the pick (predicted 8) costs 10 where 5 was to be had."""
    found = accuracy([row(10, 11), row(10, 8), row(5, 9)])
    assert found.mean_abs_pct == pytest.approx((10 + 20 + 80) / 3)
    assert found.median_abs_pct == pytest.approx(20)
    assert found.refused_pct == pytest.approx(100 / 3)
    assert found.worst_abs_pct == pytest.approx(80)
    assert found.regret_pct == pytest.approx(100)
    assert found.interval_coverage_pct == pytest.approx(100 / 3)


def test_rank_correlation_is_spearman():
    """The same as scipy's, ties included."""
    from scipy.stats import spearmanr

    rng = np.random.default_rng(3)
    pairs = rng.integers(1, 6, size=(30, 2)).astype(float)
    expected = spearmanr(pairs[:, 0], pairs[:, 1]).statistic
    assert accuracy([row(m, p) for m, p in pairs]).spearman == pytest.approx(expected)


def test_calibration_rows_are_what_the_rules_allow():
    """Only MosaicML's runs of up to eight devices may be fitted."""
    rows = json.loads(Path(PUBLISHED).read_text())["rows"]
    for entry in rows:
        run = published_run(entry)
        assert run.calibration == (entry["dataset"] == "mosaicml_llmfoundry" and entry["gpu_count"] <= 8)
    larger = {**next(r for r in rows if r["dataset"] == "mosaicml_llmfoundry"), "gpu_count": 16, "dp": 16}
    larger["global_batch_sequences"] *= 2
    assert not published_run(larger).calibration


SHIPPED = [
    row
    for file in ("published", "collected", "megatron", "recipe")
    for row in json.loads((MEASURED / f"{file}_runs.json").read_text())["rows"]
]


def test_every_shipped_row_names_its_program_and_no_switch_in_vain():
    """The fields are in polygon's words; a switch that a row sets differs from the catalogue's."""
    for entry in SHIPPED:
        known, own = catalogue.runtime(entry["runtime"]), row_runtime(entry)
        assert known.name == entry["runtime"] and catalogue.device(entry["device"]).name == entry["device"]
        for name, value in entry.get("switches", {}).items():
            assert getattr(own, name) == value != getattr(known, name), (entry["id"], name)


def test_no_prose_is_read():
    """Notes, titles of programs and what memory was called can say anything: the run is the same."""
    lie = dict.fromkeys(
        ("notes", "framework", "overlap", "memory_kind", "interconnect", "date"), "unfused triton, none"
    )
    for entry in SHIPPED[::7]:
        if entry["predictable"]:
            said, lied = published_run(entry), published_run(entry | lie)
            assert uniform_config(said.plan) == uniform_config(lied.plan) is not None
            assert said.problem.runtime == lied.problem.runtime
            assert (said.memory_counts, said.model) == (lied.memory_counts, lied.model)


def test_a_row_is_a_problem_and_a_plan():
    """The plan is the uniform split that the row states, on as many devices, with every degree."""
    for entry in SHIPPED[::5]:
        if not entry["predictable"]:
            continue
        run = published_run(entry)
        split = uniform_config(run.plan)
        assert split is not None and split.devices == entry["gpu_count"] == run.plan.world_size
        assert (split.tp, split.pp, split.cp, split.ep) == tuple(entry[key] for key in ("tp", "pp", "cp", "ep"))
        assert (split.zero, split.recompute) == (entry["zero_stage"], entry["recompute"])
        assert run.plan.micro_batches * split.micro_batch_size == run.batch.global_batch
        assert run.problem.runtime.dp_overlap in DP_OVERLAP


def test_sailors_rows_are_plans_of_their_own():
    """Micro-batches are dealt in turn, a worker's devices lie in one node, nothing is used twice."""
    runs = sailor_runs(json.loads((MEASURED / "sailor_validation.json").read_text()))
    assert len(runs) == 15
    for run in runs:
        pools = run.problem.cluster.pools
        for s, stage in enumerate(run.plan.stages):
            assert run.plan.shares(s).max() - run.plan.shares(s).min() <= 1
            for worker in stage.workers:
                assert len({pools[worker.pool].node_of(device) for device in worker.devices}) == 1
        workers = [worker for stage in run.plan.stages for worker in stage.workers]
        assert run.plan.world_size == sum(len(worker.devices) for worker in workers)
        assert run.problem.runtime == catalogue.runtime("sailor")


def test_unlike_nodes_have_cards_of_their_own():
    """Sailor's mixed nodes: each the card that the file says, on a network that passes the widest, whatever type the
    plan names first; a type whose card nobody says is named, and so are files that repeat another's measurements."""
    data = json.loads((MEASURED / "sailor_runs.json").read_text())
    runs = {run.identifier: run for run in sailor_runs(data) if isinstance(run, MeasuredRun)}
    assert len(data["configurations"]) == 21 and sum(run.step_s is not None for run in runs.values()) == 19
    for name, first in (("mit/N2/N2_D1", "rtx-3090"), ("mit/N2/N2_D2", "titan-rtx")):
        cluster = runs[name].problem.cluster
        assert cluster.pools[0].device.name == first
        assert cluster.regions[0].intra_region.bytes_per_s == 3.125e9 and not cluster.regions[0].intra_region.rdma
        cards = {pool.device.name: pool.inter_node.bytes_per_s for pool in cluster.pools}
        assert cards == {"rtx-3090": 0.125e9, "titan-rtx": 3.125e9}
        assert {run.dataset for run in runs.values()} == {"sailor_mixed", "sailor_gpt_neo"}
    unsaid = next(c for c in data["configurations"] if c["id"] == "mit/N2/N2_D1")
    del unsaid["cluster"]["card_bytes_per_s"]["RTX-3090"]
    ((_, reason),) = sailor_runs(data | {"configurations": [unsaid]})
    assert reason == "cluster.card_bytes_per_s of rtx-3090, beside other types, is missing"
    # Its GPT-Neo has no head: 2.65 billion parameters, and what a head of classes needs.
    neo = runs["clariden/GPT-NEO/N8/N8_D4"].model
    assert neo.answers == 2 and neo.parameters == pytest.approx(2_651_673_600, rel=0.003)


def test_zones_without_a_network_are_not_expressible():
    """Links between zones are not guessed."""
    data = json.loads((MEASURED / "sailor_validation.json").read_text())
    data["configurations"] = [c for c in data["configurations"] if len(c["plan"]["stages"]) > 1][:1]
    data["configurations"][0]["plan"]["stages"][0]["workers"][0]["zone"] = "us-west1-b"
    ((_, reason),) = sailor_runs(data)
    assert reason.startswith("no link between the zones us-west1-b and us-central1-a is known")


def test_measured_plans_are_read_and_priced(remade):
    """Every row of the file, by the planner's own path; a runtime that nobody knows is refused."""
    data = json.loads((MEASURED / "plan_runs.json").read_text())
    runs = plan_runs(data)
    assert {run.problem.runtime.name for run in runs} == {"eager", "megatron-2022", "megatron-deepspeed-2022"}
    assert [run.step_s for run in runs] == [entry["measured_step_s"] for entry in data["rows"]]
    found = part(remade, "plan_runs.json")
    assert found["overall"]["time"]["rows"] == 163 and not found["skipped"]
    with pytest.raises(InputError, match=r"found runtime 'eagre', expected 'eager'"):
        plan_runs(data | {"rows": [data["rows"][0] | {"runtime": "eagre"}]})


def test_a_runtime_in_place_of_the_rows_own(capsys):
    """Taken for an unknown program, the interval is wider and the prediction another."""
    own = report(capsys, PUBLISHED, "--dataset", "megatron_2020")["rows"]
    other = report(capsys, PUBLISHED, "--dataset", "megatron_2020", "--runtime", "unknown")["rows"]
    for a, b in zip(own, other, strict=True):
        assert (a["runtime"], b["runtime"]) == ("megatron-2020", "unknown")
        assert a["predicted"] != b["predicted"]
        assert (b["high"] - b["low"]) / b["predicted"] > (a["high"] - a["low"]) / a["predicted"]


OTHERS = {
    "id": "x", "dataset": "theirs", "layers": 24, "hidden_size": 2048, "attention_heads": 16, "gpu_count": 16,
    "sequence_length_tokens": 2048, "gpu_type": "A100-80GB-SXM (HBM2e)", "dp": 16, "global_batch_sequences": 64,
    "measured_iteration_time_s": 1.0, "measured_memory_gigabytes": 30, "notes": "flash attention, torch.compile",
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "runtime"),
    [
        ({"framework": "Megatron-LM", "date": "2021-03"}, "megatron-2021"),
        ({"framework": "Megatron-LM", "date": "2024"}, "megatron-core"),
        ({"framework": "Frobnicator 3", "date": "2024"}, "unknown"),
        ({}, "unknown"),
    ],
)
def test_rows_of_other_collections_are_read_by_their_fields(fields, runtime):
    """Program and date choose the runtime; notes say nothing."""
    run = published_run(OTHERS | fields)
    assert run.problem.runtime == catalogue.runtime(runtime)
    assert run.pool.device == catalogue.device("a100-80gb")


def test_a_row_may_name_a_model_of_the_catalogue():
    """Where its fields cannot say it; they need not be there then."""
    shape = ("layers", "hidden_size", "attention_heads", "kv_heads", "head_dim", "ffn_size", "vocab_size")
    run = published_run({key: value for key, value in OTHERS.items() if key not in shape} | {"model": "kimi-k2"})
    assert run.problem.model == catalogue.model("kimi-k2")
    with pytest.raises(InputError, match="model 'kimi-k9'"):
        published_run(OTHERS | {"model": "kimi-k9"})


def test_a_row_may_say_its_optimizer_and_how_many_blocks_it_recomputes():
    """Both change what is priced and held; none at all is said by 0, and nonsense is told."""
    said = ({}, {"optimizer": "muon"}, {"state_precision": "bf16"}, {"recompute_blocks": 12}, {"recompute_blocks": 0})
    plain, muon, narrow, half, none = (published_run(OTHERS | {"recompute": "full"} | fields) for fields in said)
    assert (plain.batch.optimizer, muon.batch.optimizer) == ("adamw", "muon")
    assert [run.plan.stages[0].recompute_blocks for run in (plain, half, none)] == [None, 12, 0]
    steps = [predict(run)[0].step_s for run in (plain, half, none)]
    assert steps == sorted(steps, reverse=True) and len(set(steps)) == 3
    held = [predict(run)[1].optimizer for run in (narrow, muon, plain)]
    assert held == sorted(held) and len(set(held)) == 3
    with pytest.raises(InputError, match=r"recompute_blocks: found 1\.5"):
        published_run(OTHERS | {"recompute": "full", "recompute_blocks": 1.5})


def test_our_rows_in_their_old_form_name_the_same_program():
    """Without `runtime`, the aliases of what the source calls its program, and the date, lead to it.

    The single cards' sources say PyTorch alone, not that the model was compiled.
    """
    read = set()
    for entry in SHIPPED:
        if entry["predictable"]:
            old = {key: value for key, value in entry.items() if key not in ("runtime", "switches", "device")}
            read.add((entry["runtime"], published_run(old).problem.runtime.name))
    same = {(name, name) for name in {row["runtime"] for row in SHIPPED} - {"pytorch-compiled"}}
    assert read == same | {("pytorch-compiled", "pytorch")}


@pytest.mark.parametrize(
    ("field", "said", "meant"),
    [
        ("precision", "amp_bf16", "bf16"),
        ("precision", "fp32/fp16 (not stated in the file)", "tf32"),
        ("recompute", "none (assumed: recipes)", "none"),
        ("recompute", "selective (per operator)", "selective"),
        ("recompute", True, "full"),
        ("memory_kind", "torch.cuda max_memory_reserved", "reserved"),
        ("memory_kind", "nvidia-smi", "device"),
        ("memory_kind", "as reported", "process"),
        ("optimizer", "Muon (Moonlight's)", "muon"),
        ("optimizer", "FusedLAMB", "adamw"),
    ],
)
def test_words_of_other_collections(field, said, meant):
    """A field has a short list of words; remarks in parentheses are none of them."""
    run = published_run(OTHERS | {field: said})
    found = {
        "precision": run.batch.precision,
        "recompute": run.plan.stages[0].recompute,
        "memory_kind": run.memory_counts,
        "optimizer": run.batch.optimizer,
    }
    assert found[field] == meant


def test_words_that_nobody_knows_are_told():
    """A row is skipped with the reason rather than read as something else."""
    with pytest.raises(NotExpressibleError, match="precision 'posit16' has none of the words"):
        published_run(OTHERS | {"precision": "posit16"})
    with pytest.raises(NotExpressibleError, match="gpu_count is missing"):
        published_run({"layers": 1, "hidden_size": 8, "attention_heads": 1, "sequence_length_tokens": 4})


def collected(dataset: str, **fields: object) -> dict:
    rows = json.loads((MEASURED / "collected_runs.json").read_text())["rows"]
    return next(r for r in rows if r["dataset"] == dataset and all(r.get(k) == v for k, v in fields.items()))


def test_torchtitan_keeps_weights_whole_in_a_pipeline():
    """Fully sharded training that neither reshards nor reduces between micro-batches divides the optimizer alone."""
    assert {stage.zero for stage in published_run(collected("torchtitan", pp=1)).plan.stages} == {3}
    assert {stage.zero for stage in published_run(collected("torchtitan", pp=8)).plan.stages} == {1}


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("H100-96GB-SXM", "h100-sxm"),
        ("H100-80GB-SXM (HBM2e)", "h100-sxm"),
        ("GeForce RTX 4090 24GB", "rtx-4090"),
        ("B300", "b300"),
        ("Tesla T4", "t4"),
        ("AMD Instinct MI300X", "mi300x"),
        ("GH200 480GB", "gh200"),
    ],
)
def test_devices_are_known_by_what_tables_call_them(label, name):
    """Makers' prefixes, remarks and memory sizes of boards that the catalogue does not have are no obstacle."""
    assert device_named(label).name == name


def test_deepspeed_fetches_ahead_while_little_is_held():
    """A matrix of 530 billion parameters is more than may be held; its layers, and those of 175 billion, are let go.

    Our rows say so; of a row of another collection it follows from the model. In 2021 nothing was fetched ahead.
    """
    rows = [row for row in SHIPPED if row["runtime"] == "deepspeed-2021"]
    foreign = [{k: v for k, v in row.items() if k not in ("runtime", "switches")} for row in rows]
    later = [{**row, "date": "2023-04"} for row in foreign]
    for listed, ahead in ((rows, "none"), (foreign, "none"), (later, "backward")):
        runtimes = {row["model_name"]: published_run(row).problem.runtime for row in listed}
        assert {name: runtime.dp_overlap for name, runtime in runtimes.items()} == {
            "GPT-175B": ahead,
            "GPT-530B": "none",
        }
        assert all(runtime.gathers_again for runtime in runtimes.values())
    assert not published_run({**foreign[0], "recompute": "none"}).problem.runtime.gathers_again


def test_internevo_deals_out_whole_matrices():
    """Five matrices a block of InternLM-7B, embedding and head; other programs divide every one."""
    run = published_run(collected("internevo_7b", gpu_count=512))
    assert run.problem.runtime.owned_weights and weight_matrices(run.model) == 32 * 5 + 2
    assert not published_run(collected("torchtitan")).problem.runtime.owned_weights
    dividing = replace(run.problem, runtime=replace(run.problem.runtime, owned_weights=False))
    assert predict(replace(run, problem=dividing))[0].step_s < predict(run)[0].step_s


def test_what_nvidia_smi_counts():
    """Context, DeepSpeed's two buckets and what the allocator keeps; an allocator's own figure has none of them."""
    run = published_run(collected("bigscience_1b3"))
    assert run.context_bytes == pytest.approx(1.5e9 + 2e9) and run.memory_factor == pytest.approx(1 / 0.85)
    entry = {**collected("bigscience_1b3"), "memory_counts": "allocated", "runtime": "megatron-2022"}
    run = published_run(entry)
    assert run.context_bytes == 0 and run.memory_factor == 1 and run.memory_error < 0.1


def half_width(runtime: Runtime | None = None, **fields: object) -> float:
    """Half of the interval over the logarithm of the step; of blocks so large that no host holds them up."""
    large = {"hidden_size": 8192, "attention_heads": 64}
    found, _ = predict(published_run(OTHERS | large | fields, runtime))
    assert found.low_s * found.high_s == pytest.approx(found.step_s**2)
    return math.log(found.high_s / found.low_s) / 2


def test_intervals_know_how_well_a_program_is_known():
    """A program with runs of its own on the device has their error; any other its device's, and what it adds itself."""
    groups = errors()["groups"]
    assert half_width(framework="llm-foundry") == pytest.approx(groups["ampere/llm-foundry"]["error"])
    assert half_width(framework="InternEvo") == pytest.approx(groups["ampere/internevo"]["error"])
    assert half_width(framework="torchtitan", date="2025-06") == pytest.approx(groups["ampere"]["error"])
    assert half_width(framework="MaxText", date="2025") > groups["ampere"]["error"]  # `time_error` of its entry


def test_what_the_host_needs_is_least_known_where_it_decides():
    """A step that the host holds up has half of it more to either side; a score is what that leaves of an error."""
    program = {"framework": "torchtitan", "date": "2025-06", "attention_heads": 16}
    wide, ampere = half_width(**program, hidden_size=256), errors()["groups"]["ampere"]["error"]
    assert ampere < half_width(**program, hidden_size=1024) <= wide <= math.hypot(ampere, math.log(1 + HOST_ERROR))
    for error, host in ((0.3, 0.0), (0.5, 0.3), (0.1, 0.4)):
        for quantile in (0.05, 0.2, 0.45):
            inside = error <= math.hypot(quantile, host)
            assert inside == (beyond_host(error, host) <= quantile)


def test_an_unknown_program_or_device_has_the_widest_interval():
    """No program of the catalogue has a wider one; a device whose architecture was never measured has the worst's."""
    widths = [half_width(runtime) for runtime in catalogue.runtimes().values()]
    assert half_width() == pytest.approx(max(widths)) and sorted(widths)[-2] < max(widths)
    worst = errors()["unknown"]
    assert worst == max(entry["error"] for entry in errors()["groups"].values())
    assert half_width(framework="torchtitan", date="2025-06", gpu_type="AMD Instinct MI250X") == pytest.approx(worst)


def test_experts_and_cut_sequences_have_errors_of_their_own():
    """Of any device."""
    groups, program = errors()["groups"], {"framework": "torchtitan", "date": "2025-06"}
    assert half_width(**program, cp=2, dp=8) == pytest.approx(groups["context"]["error"])
    experts = {"experts": 8, "experts_per_token": 2, "expert_ffn_size": 512}
    assert half_width(**program, **experts) == pytest.approx(groups["experts"]["error"])
    nemo = {"framework": "NeMo 24.07", "date": "2024-07"}
    assert half_width(**nemo, cp=2, dp=8) == pytest.approx(groups["context/nemo-24"]["error"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"measured_iteration_time_s": float("nan")}, "measured_iteration_time_s: found nan, expected a number > 0"),
        ({"measured_iteration_time_s": -3.0}, "measured_iteration_time_s: found -3.0, expected a number > 0"),
        ({"measured_iteration_time_s": "fast"}, "measured_iteration_time_s: found 'fast', expected a number > 0"),
        ({"measured_memory_gigabytes": -5}, "measured_memory_gigabytes: found -5, expected a number > 0"),
        ({"tp": 1.5}, "tp: found 1.5, expected a whole number >= 1"),
        ({"gpu_count": "8"}, "gpu_count: found '8', expected a whole number >= 1"),
        ({"device": None, "gpu_type": None}, "device is missing"),
    ],
)
def test_a_row_of_no_numbers_is_skipped_with_what_is_wrong(changes, message, tmp_path):
    """Not a run of an error of nan or -140 %, which was in the mean over all."""
    row = next(
        r
        for r in json.loads((MEASURED / "published_runs.json").read_text("utf-8"))["rows"]
        if r.get("measured_iteration_time_s") and r.get("runtime")
    )
    wrong = {key: value for key, value in (row | changes | {"id": "w"}).items() if value is not None}
    (tmp_path / "runs.json").write_text(json.dumps({"rows": [row, wrong]}), "utf-8")
    runs, skipped = validate.read_runs([str(tmp_path / "runs.json")])
    assert [run.identifier for run in runs] == [row["id"]] and skipped == [{"id": "w", "reason": message}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"measured_step_s": "3 s"}, "rows[0].measured_step_s: found '3 s', expected a number > 0"),
        ({"measured_step_s": float("nan")}, "rows[0].measured_step_s: found nan, expected a number > 0"),
        ({"plan": None}, "rows[0].plan: found nothing"),
        ({"runtime": "eagre"}, "rows[0]: runtime: found runtime 'eagre'"),
    ],
)
def test_a_measured_plan_of_ones_own_is_read_or_told_in_one_line(changes, message):
    """The program is the plan file's where the row names none."""
    data = json.loads((MEASURED / "plan_runs.json").read_text("utf-8"))
    row = data["rows"][0]
    with pytest.raises(InputError) as told:
        plan_runs(data | {"rows": [row | changes]})
    assert str(told.value).startswith(message)
    with pytest.raises(InputError, match="rows: found nothing"):
        plan_runs({key: value for key, value in data.items() if key != "rows"})
    own = {key: value for key, value in row.items() if key not in ("runtime", "dataset")}
    [run] = plan_runs(data | {"rows": [own]})
    assert (run.problem.runtime.name, run.dataset, run.step_s) == ("polygon", "own runs", row["measured_step_s"])


@pytest.mark.parametrize(
    ("option", "name", "change", "message"),
    [
        ("--profiles", "sailor_profiles", ("compute", 3), "compute: found 3, expected a list"),
        ("--profiles", "sailor_profiles", ("compute", [{}]), "compute[0].model: found nothing, expected a text"),
        ("--profiles", "sailor_profiles", ("models", {"x": {}}), "models.x.info: found nothing"),
        ("--network", "sailor_network", ("links", 3), "links: found 3, expected a list"),
        ("--network", "sailor_network", ("links", [{}]), "links[0].coefficients_GBps: found nothing, expected a list"),
        (
            "--network",
            "sailor_network",
            ("links", [{"coefficients_GBps": [1.0, 2.0]}]),
            "links[0].coefficients_GBps: found a list, expected a list of at least 3 entries",
        ),
        ("--network", "sailor_network", ("gpus_per_node", {"t4": 0}), "gpus_per_node.t4: found 0, expected a whole"),
    ],
)
def test_measurements_that_are_none_are_told_in_one_line(option, name, change, message, tmp_path, capsys):
    """Of the file, and where in it; they ended in tracebacks."""
    data = json.loads((MEASURED / f"{name}.json").read_text("utf-8"))
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(data | dict([change])), "utf-8")
    assert cli.run(validate.main, [str(MEASURED / "plan_runs.json"), option, str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{file}: {message}") and error.count("\n") == 1


def test_fields_that_are_nearly_known_and_ids_that_come_twice_are_told(tmp_path, capsys):
    """A misspelt field of a row would fall back to what is assumed without it, and nobody would know."""
    row, plans = (json.loads((MEASURED / f"{name}_runs.json").read_text("utf-8")) for name in ("published", "plan"))
    row = next(r for r in row["rows"] if r.get("zero_stage") and r.get("measured_iteration_time_s"))
    wrong = {"zero_stag" if key == "zero_stage" else key: value for key, value in row.items()}
    (tmp_path / "runs.json").write_text(json.dumps([row, wrong, {**row, "id": None, "zero": 1}]), "utf-8")
    step = plans["rows"][0] | {"runtimes": "polygon"}
    step.pop("runtime")
    (tmp_path / "plans.json").write_text(json.dumps(plans | {"rows": [step]}), "utf-8")
    files = [str(tmp_path / name) for name in ("runs.json", "plans.json")]
    expected = [
        {"id": row["id"], "reason": "zero_stag is not read: is zero_stage meant?"},
        {"id": step["id"], "reason": "runtimes is not read: is runtime meant?"},
        {"id": row["id"], "reason": f"2 runs of {row['dataset']} have this id; each counts"},
    ]
    assert validate.main([*files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["doubtful"] == expected and "rows[2]" in {one["id"] for one in found["rows"]}
    assert validate.main(files) == 0
    assert "doubtful: 3\n" in capsys.readouterr().out


def test_no_shipped_row_is_doubtful():
    """Fields that only their collections have are no misspelt ones."""
    paths = [str(MEASURED / f"{name}_runs.json") for name in ("published", "collected", "further", "megatron", "plan")]
    assert not validate.doubts(validate.read_runs(paths)[0])
