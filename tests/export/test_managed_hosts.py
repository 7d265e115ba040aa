"""Slurm and Kubernetes: every rank of the plan once, on a device of its type and place, told when to end."""

import argparse
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import yaml

from polygon.domain.model import Batch
from polygon.domain.plan import Plan, Problem
from polygon.export.kubernetes import PRODUCTS, region_labels
from polygon.export.launch_hosts import slug
from polygon.export.rank_script import RANKS_SCRIPT
from polygon.export.targets import export
from polygon.formats import catalogue, files
from polygon.formats.recognition import cluster_from_text
from polygon.planning.decode import Allocation, Decoder
from tests.exported_plans import drawn, planned
from tests.free_ports import free_port
from tests.patience import PATIENCE_S, eventually
from tests.small_problems import small_cluster, small_model, small_plan

ROOT = Path(__file__).resolve().parents[2]

SRUN = """#!/usr/bin/env bash
# Runs a task on every node of a component, as srun does; $NODES has the nodes of each.
group=0
while [[ $1 == --* ]]; do
    case $1 in
        --het-group=*) group=${1#*=} ;;
        --ntasks-per-node=1 | --cpus-per-task=* | --cpu-bind=none | --kill-on-bad-exit=1) ;;
        *) echo "srun: no such option: $1" >&2; exit 9 ;;
    esac
    shift
done
read -r -a nodes <<< "$NODES"
pids=()
for ((n = 0; n < nodes[group]; n++)); do
    SLURM_NODEID=$n TASK="$group $n" "$@" & pids+=($!)
done
worst=0
for pid in "${pids[@]}"; do wait "$pid" || worst=$?; done
exit "$worst"
"""
SCONTROL = """#!/usr/bin/env bash
[[ "$1 $2" == "show hostnames" ]] || exit 9
tr , '\\n' <<< "$3"
"""
RUNNER = """#!/usr/bin/env bash
echo "$TASK $CUDA_VISIBLE_DEVICES $*" > "$SEEN/$$"
"""


def programs(folder, **texts):
    """Scripts in a folder of their own, to be found first."""
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin"


def components(script):
    """What sbatch would read of every component: its own options, no others."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in ("job-name", "signal"):
        parser.add_argument(f"--{option}")
    for option in ("nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node"):
        parser.add_argument(f"--{option}", type=int)
    head = script.split("\nset -euo", maxsplit=1)[0]
    words = [re.findall(r"^#SBATCH (--.*)$", part, re.MULTILINE) for part in head.split("#SBATCH hetjob\n")]
    return [parser.parse_args(" ".join(lines).split()) for lines in words]


def places(problem, plan):
    """Pool of every rank's device."""
    starts = np.array([pool.first_device for pool in problem.cluster.pools])
    return [int(np.searchsorted(starts, device, side="right")) - 1 for device in plan.device_ranks]


def batch(tmp_path, problem, plan):
    """Arguments of every rank that the batch script starts on hosts that are only made believe."""
    folder, seen = tmp_path / "it's here", tmp_path / "seen"
    result = export(problem, plan, "slurm")
    files.write_folder(folder, result.files)
    seen.mkdir()
    parts = components(result.files["job.sbatch"])
    environment = {
        "PATH": programs(tmp_path / "bin", srun=SRUN, scontrol=SCONTROL, runner=RUNNER), "SEEN": str(seen),
        "NODES": " ".join(str(part.nodes) for part in parts), "SLURM_JOB_ID": "4242", "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_NODELIST": "n7,n8", "POLYGON_RUNNER": "runner",
    }  # fmt: skip
    if len(parts) > 1:
        environment["SLURM_JOB_NODELIST_HET_GROUP_0"] = "n7,n8"
    run = subprocess.run(
        ["bash", str(folder / "job.sbatch"), "--steps", "3"], env=environment, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0 and run.stderr == "", run.stderr
    return parts, [path.read_text() for path in seen.iterdir()], folder


@pytest.mark.parametrize("which", ["several pools", "one pool", "parts of nodes"])
def test_slurm_starts_every_rank_once_where_the_plan_has_it(which, tmp_path):
    """Over all components, nodes and local devices: rank, pool, device, world size, plan and meeting place."""
    if which == "several pools":
        problem, plan = planned("ptafm-7dc", global_batch=64)
    elif which == "one pool":
        problem, plan = planned("one-node", "opt-350m")
    else:
        problem, plan = next(
            (problem, plan)
            for problem, plan, _ in drawn(24)
            if plan.world_size < problem.cluster.devices and len(problem.cluster.pools) > 2
        )
    parts, said, folder = batch(tmp_path, problem, plan)
    found = {}
    for text in said:
        group, _, gpu, *words = text.replace("it's here", "it's_here").split()
        given = dict(zip(words[::2], words[1::2], strict=True))
        assert int(gpu) < parts[int(group)].gpus_per_node
        assert given["--plan"] == f"{folder}/plan.json".replace("it's here", "it's_here")
        assert given["--dist-url"] == f"tcp://n7:{20000 + 4242}" and given["--steps"] == "3"
        assert given["--world-size"] == str(plan.world_size)
        found[int(given["--rank"])] = int(group)
    assert sorted(found) == list(range(plan.world_size)) and len(said) == plan.world_size
    pools = places(problem, plan)
    of_group = {}
    for rank, group in found.items():
        assert of_group.setdefault(group, pools[rank]) == pools[rank]
    assert sum(part.nodes * part.gpus_per_node for part in parts) == plan.world_size
    assert all(part.signal.startswith("TERM@") and part.ntasks_per_node == 1 for part in parts)


def pods(job_set):
    """First rank, ranks, pods and node labels of every replicated job."""
    for job in job_set["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        pod = spec["template"]["spec"]
        first, ranks = map(int, pod["containers"][0]["command"][2:4])
        yield first, ranks, spec, pod


def test_kubernetes_pods_cover_the_ranks_in_order_on_nodes_of_their_kind():
    """Pods of each job, one after another, have the ranks; their nodes the plan's region and device."""
    checked = 0
    for problem, plan in [planned("ptafm-7dc", global_batch=64), *((a, b) for a, b, _ in drawn(8))]:
        pools, expected = places(problem, plan), 0
        manifest = yaml.safe_load(export(problem, plan, "kubernetes").files["jobset.yaml"])
        name = manifest["metadata"]["name"]
        for first, ranks, spec, pod in pods(manifest):
            assert first == expected and spec["completionMode"] == "Indexed" and spec["backoffLimit"] == 0
            assert spec["completions"] == spec["parallelism"]
            for rank in range(first, first + ranks * spec["completions"]):
                pool = problem.cluster.pools[pools[rank]]
                device = PRODUCTS.get(pool.device.name, slug(pool.device.name))
                region = region_labels(problem.cluster)[pool.region]
                assert {key: value for key, value in pod["nodeSelector"].items() if key != "nvidia.com/gpu.count"} == {
                    "nvidia.com/gpu.product": device, "topology.kubernetes.io/region": region,
                }  # fmt: skip
            assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == str(ranks)
            settings = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
            assert settings["MASTER_ADDR"] == f"{name}-g0-0-0.{manifest['spec']['network']['subdomain']}"
            assert pod["containers"][0]["command"][4] == str(plan.world_size)
            # A pod is called JOBSET-JOB-0-INDEX-xxxxx, which must be one label of a host name.
            assert len(f"{name}-g{len(pools)}-0-{spec['completions']}-xxxxx") <= 63
            expected += ranks * spec["completions"]
        assert expected == plan.world_size
        checked += 1
    assert checked == 9


def test_pods_keep_to_nodes_of_their_size():
    """Where a region has larger nodes of the same device too: pods for the small ones would fill these, and the pods
    for the large wait for ever. Feature discovery's label says how many devices a node has."""
    cluster = cluster_from_text(
        "regions: [{name: a, nodes: [{device: t4, count: 2, devices_per_node: 2},"
        " {device: t4, count: 1, devices_per_node: 4, price_usd_per_hour: 9},"
        " {device: l4, count: 1, devices_per_node: 2}]}]",
        "sizes",
    )
    problem = Problem(cluster=cluster, model=small_model(), batch=Batch(global_batch=20, seq_len=8))
    plan = small_plan(cluster, [(0, 6)], [list(range(10))], [[i] for i in range(10)])
    manifest = yaml.safe_load(export(problem, plan, "kubernetes").files["jobset.yaml"])
    assert [pod["nodeSelector"].get("nvidia.com/gpu.count") for *_, pod in pods(manifest)] == ["2", "4", None]


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["Berlin", "1.5", "a" * 63], ["Berlin", "1.5", "a" * 63]),
        (["lab a", "lab-a", "Lab A"], ["lab-a-2", "lab-a", "lab-a-3"]),
        (["京都", "東京", "b" * 64, "-c"], ["x", "x-2", "b" * 40, "c"]),
    ],
)
def test_every_region_has_a_label_of_its_own(names, labels):
    """Its name where Kubernetes takes it, as the how-to says; else no other's, or pods would be put into any."""
    cluster = small_cluster(*(1 for _ in names))
    regions = tuple(replace(region, name=name) for region, name in zip(cluster.regions, names, strict=True))
    problem = Problem(
        cluster=replace(cluster, regions=regions), model=small_model(), batch=Batch(global_batch=8, seq_len=8)
    )
    assert region_labels(problem.cluster) == labels
    plan = small_plan(problem.cluster, [(0, 6)], [list(range(len(names)))], [[0]] * 4)
    text = export(problem, plan, "kubernetes").files["jobset.yaml"]
    assert [pod["nodeSelector"]["topology.kubernetes.io/region"] for *_, pod in pods(yaml.safe_load(text))] == labels
    told = [line for line in text.splitlines() if line.startswith("# Region ")]
    assert told == [f'# Region "{a}" is labelled {b}.' for a, b in zip(names, labels, strict=True) if a != b]


def without_defaults(read, ours):
    """What a model has read of our data: all that it kept, less the defaults that it added."""
    if isinstance(read, dict) and isinstance(ours, dict):
        return {key: without_defaults(value, ours[key]) for key, value in read.items() if key in ours}
    if isinstance(read, list) and isinstance(ours, list):
        return [without_defaults(a, b) for a, b in zip(read, ours, strict=True)]
    return read


def test_kubernetes_manifests_are_what_the_api_knows():
    """Read by the models that Kubeflow generates from JobSet's and Kubernetes' own schemas, nothing is left over."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for problem, plan in [planned(), *((a, b) for a, b, _ in drawn(8))]:
        manifest = yaml.safe_load(export(problem, plan, "kubernetes").files["jobset.yaml"])
        read = models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict()
        assert without_defaults(read, manifest) == manifest
    manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["completion"] = 3
    read = models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict()
    assert without_defaults(read, manifest) != manifest  # a key that the schema does not have is dropped


def test_kustomization_names_the_files_beside_it():
    """ConfigMap and JobSet meet under one name; every file that is named is there."""
    files_of = export(*planned(), "kubernetes").files
    made = yaml.safe_load(files_of["kustomization.yaml"])
    (config,) = made["configMapGenerator"]
    assert {*config["files"], *made["resources"]} <= set(files_of)
    for _, _, _, pod in pods(yaml.safe_load(files_of["jobset.yaml"])):
        assert pod["volumes"][0]["configMap"]["name"] == config["name"]
        assert pod["terminationGracePeriodSeconds"] > 30


def started(tmp_path, runner, ranks):
    """`ranks.sh` with a stand-in for the runner, once all its ranks are there."""
    script = tmp_path / "ranks.sh"
    script.write_text(RANKS_SCRIPT)
    path = programs(tmp_path / "bin", runner=runner)
    environment = {
        "PATH": path,
        "POLYGON_RUNNER": "runner",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
        "JOB_COMPLETION_INDEX": "2",
    }
    process = subprocess.Popen(
        ["bash", str(script), "10", str(ranks), "99", "plan.json"], cwd=tmp_path, env=environment
    )
    assert eventually(lambda: len(list(tmp_path.glob("began-*"))) == ranks)
    return process


PATIENT = """#!/usr/bin/env python3
import signal, sys, time
from pathlib import Path

def end(*_):
    Path(f"ended-{rank}").touch()
    sys.exit(143)

rank = sys.argv[8]
signal.signal(signal.SIGTERM, end)
Path(f"began-{rank}").touch()
while not (rank == "FAILS" and Path("go").exists()):
    time.sleep(0.02)
sys.exit(7)
"""
# Not bash: a trap that comes while it reads a substitution may find half a script, and be lost.


def test_a_signal_reaches_every_rank_and_all_are_waited_for(tmp_path):
    """TERM to the script: all ranks of the third host end by it, and the script with the code of a terminated one."""
    process = started(tmp_path, PATIENT, 4)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 143
    assert sorted(path.name for path in tmp_path.glob("ended-*")) == [f"ended-{rank}" for rank in range(18, 22)]


def test_a_rank_that_fails_ends_the_others_and_its_code_is_the_scripts(tmp_path):
    """One exits by itself: the rest are told to end, and its code says why."""
    process = started(tmp_path, PATIENT.replace("FAILS", "17"), 3)
    (tmp_path / "go").touch()
    assert process.wait(PATIENCE_S) == 7
    assert sorted(path.name for path in tmp_path.glob("ended-*")) == ["ended-16", "ended-18"]


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_a_batch_script_trains(tmp_path):
    """Two real ranks on CPUs, started as Slurm would; the loss of the last step is below the first one's."""
    text = "regions: [{name: here, nodes: [{device: t4, count: 1, devices_per_node: 2}]}]"
    cluster = cluster_from_text(text, "pair")
    problem = Problem(cluster=cluster, model=catalogue.model("opt-350m"), batch=Batch(global_batch=8, seq_len=512))
    plan = Decoder(problem, tensor_limit=1).decode(Allocation(workers=np.array([[1], [1]]), micro_batch_size=1))
    assert isinstance(plan, Plan)
    files.write_folder(tmp_path / "job", export(problem, plan, "slurm").files)
    environment = os.environ | {
        "PATH": programs(tmp_path / "bin", srun=SRUN, scontrol=SCONTROL), "NODES": "1",
        "SLURM_JOB_ID": str(free_port() - 20000), "SLURM_SUBMIT_DIR": str(tmp_path / "job"),
        "SLURM_JOB_NODELIST": "127.0.0.1", "POLYGON_RUNNER": f"{sys.executable} {ROOT}/runners/dist_runner.py",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    arguments = ["--rehearse", "--steps", "12", "--device", "cpu", "--log-dir", str(tmp_path / "log")]
    run = subprocess.run(
        ["bash", str(tmp_path / "job" / "job.sbatch"), *arguments], capture_output=True, text=True, env=environment,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    losses = [float(value) for value in re.findall(r"loss[ =:\"]+([\d.]+)", run.stdout + run.stderr)]
    assert len(losses) >= 2 and losses[-1] < losses[0]
