"""Files for other systems: they say what the plan says, and nothing hostile gets into them."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import yaml

from polygon.cost.tables import CostTables
from polygon.domain.block import RotaryScaling
from polygon.domain.errors import InputError
from polygon.domain.model import Batch
from polygon.domain.runnable import RUNNABLE
from polygon.export.__main__ import main
from polygon.export.deepspeed import ds_config
from polygon.export.launch_hosts import default_hosts, read_hosts, seats, used_nodes
from polygon.export.megatron import layout, model_arguments
from polygon.export.targets import TARGETS, export
from polygon.export.torchrun import by_rank
from polygon.export.torchtitan import module_names
from polygon.formats import catalogue, files
from polygon.formats.convert_plan import plan_data
from polygon.planning.uniform_plans import find_uniform
from tests import megatron_flags, target_parsers
from tests.deepspeed_parser import read_by_deepspeed
from tests.exported_plans import DIMENSIONS, drawn, of_dimensions, planned
from tests.patience import PATIENCE_S

DEEPSPEED, MEGATRON, TITAN = (RUNNABLE[target] for target in ("deepspeed", "megatron", "torchtitan"))
SHELLCHECK_PATH = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # noqa: PTH120
HOSTILE = [
    "$(touch pwned)",
    "a;touch pwned",
    "a b`touch pwned`",
    "-oProxyCommand=touch",
    "a'b",
    'a"b',
    "../x",
    "a\u2028b",
]


def write_all(result, folder):
    files.write_folder(folder, result.files)
    return folder


def layout_stages(text):
    """Layers of every stage from a Megatron layout string, by its own grammar (E, t, L, `|`, `x*n`)."""
    stages, first = [], 0
    for part in text.split("|"):
        plain = re.sub(r"([EtL])\*(\d+)", lambda m: m[1] * int(m[2]), part)
        assert set(plain) <= set("EtL")
        stages.append((first, first + len(plain)))
        first += len(plain)
    return stages


def test_megatron_layouts_are_the_stages():
    """A layout string read back gives the layers of every stage of the plan."""
    checked = 0
    for problem, plan, tables in drawn(24):
        uniform = find_uniform(problem, plan, tables, MEGATRON)
        if uniform is not None:
            text = layout(uniform.plan, problem.model)
            assert layout_stages(text) == [(s.first_layer, s.last_layer) for s in uniform.plan.stages]
            assert text[0] == "E" and text[-1] == "L" and text.count("|") == uniform.pp - 1
            checked += uniform.pp > 1
    assert checked > 3


def test_torchtitan_modules_are_the_stages():
    """Every module once, in order; as many layers as the stage has."""
    for problem, plan, tables in drawn(16):
        uniform = find_uniform(problem, plan, tables, MEGATRON)
        if uniform is None:
            continue
        parts = module_names(uniform.plan, problem.model)
        names = [name for part in parts for name in part]
        assert names == ["tok_embeddings", *(f"layers.{i}" for i in range(problem.model.blocks)), "norm", "lm_head"]
        for stage, part in zip(uniform.plan.stages, parts, strict=True):
            assert len(part) == stage.last_layer - stage.first_layer + ("lm_head" in part)


def test_megatron_takes_every_flag():
    """Names, types and choices of its parser, for random plans and for the scripts that start them."""
    for problem, plan, tables in [*drawn(20), *(of_dimensions(*case) for case in DIMENSIONS)]:
        result = export(problem, plan, "megatron", tables=tables)
        if result is not None:
            read = megatron_flags.parse(result.files["arguments.txt"].split())
            assert read.num_layers == problem.model.blocks and read.global_batch_size == problem.batch.global_batch
    with pytest.raises(ValueError, match="--num-layer"):
        megatron_flags.parse(["--num-layer", "3"])


def megatron_start(problem, plan, tables):
    """What the script of the first host gives to Megatron-LM: flags, ranks, variables; None where nothing fits."""
    result = export(problem, plan, "megatron", tables=tables)
    if result is None:
        return None
    start = target_parsers.megatron_start(result.files)
    assert set(result.files["arguments.txt"].split()) <= set(start[0])
    return start


def test_megatron_lm_itself_reads_and_accepts_the_scripts():
    """Its own `parse_args` and `validate_args`, with the ranks and variables of the scripts: random plans, every
    dimension, and a DeepSeek that predicts further tokens; it understands the degrees of the plan."""
    cases = [*drawn(20), *(of_dimensions(*case) for case in DIMENSIONS)]
    problem, plan, _ = of_dimensions(*next(case for case in DIMENSIONS if case[0] == "deepseek-v2-lite"))
    ahead = replace(problem, model=replace(problem.model, predicted_ahead=1, expert_groups=8, groups_per_token=3))
    folded = replace(problem, runtime=catalogue.runtime("megatron-core-folded"))
    cases += [(ahead, plan, CostTables(ahead)), (folded, plan, CostTables(folded))]
    asked = [
        (start, plan, problem) for problem, plan, tables in cases if (start := megatron_start(problem, plan, tables))
    ]
    read = target_parsers.read_by_megatron([start for start, _, _ in asked])
    assert [said["refused"] for said in read if "refused" in said] == []
    assert len(read) > 20
    for said, (start, _plan, problem) in zip(read, asked, strict=True):
        tp, pp, cp = (int(said[f"{name}_parallel_size"]) for name in ("tensor_model", "pipeline_model", "context"))
        assert said["data_parallel_size"] * tp * pp * cp == start[1]
        assert said["num_layers"] == problem.model.blocks and said["mtp_num_layers"] in (None, 1)
        latent = problem.model.latent
        assert said["multi_latent_attention"] == (latent is not None)
        if latent is not None:
            assert (said["kv_lora_rank"], said["qk_pos_emb_head_dim"]) == (latent.kv_rank, latent.rope_dim)
            assert said["qk_head_dim"] + latent.rope_dim == problem.model.head_dim
        windows = said["window_attn_skip_freq"] or []
        assert [bool(seen) for seen in windows] == [
            problem.model.attention_of(layer) == "window" for layer in range(1, problem.model.blocks + 1) if windows
        ]
        assert said["window_size"] == ([problem.model.window - 1, 0] if problem.model.window else None)
    assert read[-2]["mtp_num_layers"] == 1 and read[-2]["moe_router_group_topk"] == 3
    # Experts over more devices than hold the same slices: tensor-parallel ranks have whole ones.
    spread = [read[-1][f"expert_{name}_parallel_size"] for name in ("model", "tensor")]
    assert spread == [8, 1] and read[-1]["data_parallel_size"] == 4


def test_megatron_lm_refuses_what_it_does_not_know():
    """The parser that the exports are held against is one: it ends at another flag, at other ranks."""
    words, ranks, variables = megatron_start(*of_dimensions(*DIMENSIONS[1]))
    wrong = [([*words, "--num-layer", "3"], ranks, variables), (words, ranks + 1, variables), (words, ranks, {})]
    assert ["refused" in said for said in target_parsers.read_by_megatron(wrong)] == [True, True, True]


def test_the_recorded_flags_are_megatron_lms():
    """What is held against the record where Megatron-LM is not installed is what it would say itself."""
    starts = [start for case in DIMENSIONS if (start := megatron_start(*of_dimensions(*case)))]
    for (words, *_), said in zip(starts, target_parsers.read_by_megatron(starts), strict=True):
        recorded = vars(megatron_flags.parse(words))
        for name, value in recorded.items():
            if value is not None and not isinstance(value, bool):  # switches were taken, some mean the opposite
                value = value if name != "window_size" else [int(number) for number in value.split(",")]
                assert said["layernorm_epsilon" if name == "norm_epsilon" else name] == value, name


def test_torchtitan_itself_reads_the_flags():
    """Its own `ConfigManager`: random plans and every dimension, with the degrees and the stages of the plan."""
    asked = []
    for problem, plan, tables in [*drawn(20), *(of_dimensions(*case) for case in DIMENSIONS)]:
        result, uniform = export(problem, plan, "torchtitan", tables=tables), find_uniform(problem, plan, tables, TITAN)
        if result is not None:
            asked.append((result.files["flags.txt"].split(), uniform, problem))
    read = target_parsers.read_by_torchtitan([words for words, _, _ in asked])
    assert [said["refused"] for said in read if "refused" in said] == []
    for said, (_, uniform, problem) in zip(read, asked, strict=True):
        degrees = {name: value for name, value in said["parallelism"].items() if name.endswith("_degree")}
        replicate, shard = degrees["data_parallel_replicate_degree"], degrees["data_parallel_shard_degree"]
        assert replicate * shard == uniform.dp and said["training"]["seq_len"] == problem.batch.seq_len
        assert (degrees["tensor_parallel_degree"], degrees["pipeline_parallel_degree"]) == (uniform.tp, uniform.pp)
        assert (degrees["context_parallel_degree"], degrees["expert_parallel_degree"]) == (uniform.cp, uniform.ep)
        parts = said["parallelism"]["module_fqns_per_model_part"]
        if uniform.pp > 1:
            assert [tuple(part) for part in parts] == [tuple(p) for p in module_names(uniform.plan, problem.model)]
        kind = {"none": "NoneType", "selective": "SelectiveAC.Config", "full": "FullAC.Config"}
        assert said["recompute"] == kind[uniform.plan.stages[0].recompute]
    wrong = target_parsers.read_by_torchtitan([[*asked[0][0][:-1], "--parallelism.no_such_degree=2"]])
    assert "refused" in wrong[0]


@pytest.mark.parametrize(("model", "degrees"), DIMENSIONS)
def test_megatron_is_told_every_degree(model, degrees):
    """What the flags say is what the plan says; ranks go tensor first, then context, data and pipeline."""
    problem, plan, tables = of_dimensions(model, degrees)
    read = megatron_flags.parse(export(problem, plan, "megatron", tables=tables).files["arguments.txt"].split())
    flags = {"tp": "tensor_model", "pp": "pipeline_model", "ep": "expert_model", "cp": "context"}
    for name, flag in flags.items():
        said = read.context_parallel_size if name == "cp" else getattr(read, f"{flag}_parallel_size")
        assert (said or 1) == degrees.get(name, 1)
    full = degrees.get("recompute") == "full"
    assert read.recompute_num_layers == (degrees.get("recompute_blocks", 1) if full else None)
    assert read.sequence_parallel == degrees.get("sequence_parallel", False)
    if degrees.get("pp", 1) > 1:
        stages = read.pipeline_model_parallel_layout.count("|") + 1
        assert stages == degrees["pp"] * degrees.get("chunks", 1)
    copies = degrees["dp"] // degrees["shards"] if "shards" in degrees else 1
    assert (read.num_distributed_optimizer_instances or 1) == copies
    assert bool(read.use_megatron_fsdp) == (degrees["zero"] > 1)


@pytest.mark.parametrize(("model", "degrees"), [case for case in DIMENSIONS if "recompute_blocks" not in case[1]])
def test_torchtitan_is_told_every_degree(model, degrees):
    """What the flags say is what the plan says (but some of a stage's blocks recomputed, which they cannot)."""
    problem, plan, tables = of_dimensions(model, degrees)
    flags = export(problem, plan, "torchtitan", tables=tables).files["flags.txt"].split()
    said = dict(word.removeprefix("--parallelism.").split("=") for word in flags if "=" in word)
    for name, flag in {"tp": "tensor", "pp": "pipeline", "ep": "expert", "cp": "context"}.items():
        assert int(said[f"{flag}_parallel_degree"]) == degrees.get(name, 1)
    if degrees.get("pp", 1) > 1:
        assert said["pipeline_parallel_schedule"] == ("Interleaved1F1B" if "chunks" in degrees else "1F1B")
    shards, replicas = int(said["data_parallel_shard_degree"]), int(said["data_parallel_replicate_degree"])
    assert shards * replicas == degrees["dp"] and shards == degrees.get("shards", degrees["dp"])


@pytest.mark.parametrize("name", [name for name, model in catalogue.models().items() if model.family != "vit"])
def test_megatron_is_told_the_whole_model(name):
    """Shared experts, dense leading blocks, eps and rotary base are said where a model has them; fp8 is not fp32."""
    model = catalogue.model(name)
    problem = replace(planned()[0], model=model, batch=Batch(global_batch=8, seq_len=128, precision="fp8"))
    read = megatron_flags.parse(model_arguments(problem))
    assert read.bf16 and read.fp8_format == "hybrid" and read.norm_epsilon == model.norm_eps
    assert (read.num_experts or 0) == model.experts
    assert (read.moe_shared_expert_intermediate_size or 0) == model.shared_experts * model.expert_ffn_size
    experts_in = read.moe_layer_freq or [int(bool(model.experts))] * model.blocks
    assert [bool(value) for value in experts_in] == [model.is_sparse(layer) for layer in range(1, model.blocks + 1)]
    if read.position_embedding_type == "rope":
        assert read.rotary_base == round(model.rope_theta)
        scaled = model.rope_scaling is not None
        assert read.use_rope_scaling == scaled and (not scaled or read.rope_scaling_factor == model.rope_scaling.factor)


@pytest.mark.parametrize("target", TARGETS)
def test_a_plan_that_is_none_for_its_batch_is_not_exported(target):
    """Edited by hand, it trained on another batch than it says."""
    problem, plan = planned()[:2]
    larger = replace(problem, batch=replace(problem.batch, global_batch=3 * problem.batch.global_batch))
    with pytest.raises(InputError, match=r"^plan: .* micro-batches"):
        export(larger, plan, target)


def test_blocks_that_are_not_plain_are_among_what_is_lost():
    """The files say plain blocks; the report names the fields that they do not."""
    problem, plan = planned()[:2]
    strange = replace(problem, model=replace(problem.model, norms=4, family="other"))
    for target in ("megatron", "deepspeed", "torchtitan"):
        fields = [
            [loss.what["fields"] for loss in export(asked, plan, target).losses if loss.what.kind == "lost.blocks"]
            for asked in (problem, strange)
        ]
        assert fields == [[], [("norms",)]]


@pytest.mark.parametrize(("kind", "lost_by"), [("llama3", {"deepspeed", "torchtitan"}), ("yarn", None)])
def test_scaled_positions_are_said_or_among_what_is_lost(kind, lost_by):
    """Megatron-LM has Llama 3's; nobody has YaRN for a plain GPT or Llama."""
    problem, plan = planned()[:2]
    scaling = RotaryScaling(kind=kind, factor=8.0, original_tokens=8192)
    problem = replace(problem, model=replace(problem.model, rope_scaling=scaling))
    targets = {"megatron", "deepspeed", "torchtitan"}
    found = {
        target
        for target in targets
        for loss in export(problem, plan, target).losses
        if loss.what.kind == "lost.blocks" and loss.what["fields"] == ("rope_scaling",)
    }
    assert found == (targets if lost_by is None else lost_by)


def test_what_torchtitan_and_megatron_insist_on():
    """The kind of recomputation is torchtitan's last word, its stages a word each; Megatron's variable."""
    seen = set()
    for problem, plan, tables in drawn(16):
        scripts = {
            target: next(text for name, text in files.items() if name.startswith("run-"))
            for target in ("torchtitan", "megatron")
            if (result := export(problem, plan, target, tables=tables)) and (files := result.files)
        }
        for target, text in scripts.items():
            tensor = "tensor-model-parallel-size 1" not in text
            seen.add((target, tensor))
            if target == "torchtitan":
                assert re.search(r'"\$@" activation-checkpoint:(none|selective|full)$', text.strip())
                spread = "expert_parallel_degree=1 " not in text
                assert ("pipeline_parallel_schedule" in text or spread) == ("disable_cuda_graphs" in text)
                stages = re.findall(r"module_fqns_per_model_part (.*) \\\n", text)
                degree = int(re.search(r"pipeline_parallel_degree=(\d+)", text)[1])
                assert (len(stages[0].split()) if stages else 1) == degree
            else:
                one = tensor and "--use-megatron-fsdp" not in text
                assert ("export CUDA_DEVICE_MAX_CONNECTIONS=1" in text) == one
    assert {("megatron", True), ("megatron", False)} <= seen


@pytest.mark.parametrize(
    ("model", "module", "config"),
    [
        ("qwen3-30b-a3b", "{TITAN_MODULE:-qwen3}", "{TITAN_CONFIG:-qwen3_30b_a3b}"),
        ("llama3-8b", "{TITAN_MODULE:-llama3}", "{TITAN_CONFIG:-llama3_8b}"),
        ("gpt-oss-20b", "{TITAN_MODULE:-gpt_oss}", "{TITAN_CONFIG:-gpt_oss_20b}"),
        ("deepseek-v2-lite", "{TITAN_MODULE:?", "{TITAN_CONFIG:?"),
    ],
)
def test_torchtitan_is_started_with_the_plans_model(model, module, config):
    """Where it has one of that kind and size; else who starts it must name one."""
    problem, plan, tables = of_dimensions(model, dict(DIMENSIONS)[model])
    result = export(problem, plan, "torchtitan", tables=tables)
    script = next(text for name, text in result.files.items() if name.startswith("run-"))
    assert module in script and config in script
    assert ("TITAN_CONFIG=" in result.start) == (model == "deepseek-v2-lite")


def test_ranks_of_torchrun_scripts_are_the_plans_ranks(tmp_path):
    """Hosts in order, each with its number of processes, give every rank the device that the plan means."""
    problem, plan = planned("ptafm-7dc", global_batch=64)
    rows = seats(problem.cluster, by_rank(plan), default_hosts(problem.cluster))
    first = {
        (p.index, n): p.first_device + n * p.devices_per_node for p in problem.cluster.pools for n in range(p.nodes)
    }
    devices = [first[seat.host.pool, seat.host.node] + d for seat in rows for d in seat.devices]
    assert devices == list(plan.device_ranks)
    result = export(problem, plan, "torchrun")
    for index, seat in enumerate(rows):
        text = result.files[f"run-{seat.host.name}.sh"]
        assert f"--node-rank {index} " in text and f"--nproc-per-node {len(seat.devices)} " in text
    again = files.read_plan(write_all(result, tmp_path) / "plan.json")
    assert np.array_equal(again.plan.routes, plan.routes)


@pytest.mark.parametrize("target", ["torchrun", "slurm", "kubernetes", "skypilot"])
def test_a_deployed_plan_says_its_step_and_waits_for_no_bound(target):
    """What no plan can beat may take a minute to know, and no rank reads it; the README says how to rehearse it."""
    result = export(*planned(), target)
    said = json.loads(result.files["plan.json"])["estimate"]
    assert said["step_s"] == result.step_s and not said.keys() & {"lower_bound_s", "lower_bounds_s", "bound_by", "gap"}
    assert "polygon launch plan.json --rehearse" in result.files["README.md"]


@pytest.mark.parametrize("target", list(TARGETS))
def test_scripts_are_clean(target, tmp_path):
    """bash parses every script, shellcheck finds nothing, the dry-run check passes."""
    problem, plan = planned()
    folder = write_all(export(problem, plan, target), tmp_path / "it's here")
    scripts = sorted(str(path) for path in folder.iterdir() if path.suffix in (".sh", ".sbatch"))
    assert subprocess.run(["bash", str(folder / "check.sh")], capture_output=True).returncode == 0
    if shutil.which("shellcheck", path=SHELLCHECK_PATH) is None:
        pytest.skip("shellcheck is not installed")
    checked = subprocess.run(
        [shutil.which("shellcheck", path=SHELLCHECK_PATH), *scripts], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("target", ["deepspeed", "torchrun"])
def test_a_script_runs_what_it_says_where_it_lies(target, tmp_path):
    """With torchrun replaced by a program that prints its arguments, words arrive unbroken, spaces and quotes too."""
    problem, plan = planned()
    folder = write_all(export(problem, plan, target), tmp_path / "a b'c")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    echo = bin_folder / "torchrun"
    echo.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    echo.chmod(0o755)
    script = sorted(folder.glob("run-*.sh"))[0]
    run = subprocess.run(
        [str(script), "--data", "x y'z"], capture_output=True, text=True, env={"PATH": f"{bin_folder}:/usr/bin:/bin"}
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-2:] == ["--data", "x y'z"]
    if target == "torchrun":
        assert str(folder / "plan.json") in run.stdout.splitlines()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_host_names_are_refused(name):
    """A host name that a shell would read otherwise never reaches a script."""
    problem, plan = planned()
    count = sum(pool.nodes for pool in problem.cluster.pools)
    lines = [f"host-{i}" for i in range(count - 1)]
    with pytest.raises(InputError, match="hosts: "):
        read_hosts("\n".join([name, *lines]), problem.cluster, plan)


@pytest.mark.parametrize(
    ("second", "found"), [("a 10.0.0.2", "'a', expected names"), ("b 10.0.0.1", "'10.0.0.1', expected addresses")]
)
def test_a_host_is_given_once(second, found):
    """Two nodes have neither one name nor one address: their ranks would meet on one machine."""
    problem, plan = planned()
    rest = [f"host-{i}" for i in range(len(default_hosts(problem.cluster)) - 2)]
    with pytest.raises(InputError, match=f"hosts: line 2: found {found} that differ"):
        read_hosts("\n".join(["a 10.0.0.1", second, *rest]), problem.cluster, plan)


@pytest.mark.parametrize("target", list(TARGETS))
def test_hosts_of_the_nodes_that_a_plan_uses_are_enough(target):
    """A line a used node gives what a line a node of the whole cluster gives; another number is told what is wanted."""
    problem, plan = planned()
    everything, used = default_hosts(problem.cluster), used_nodes(plan, problem.cluster)
    assert 0 < len(used) < len(everything)
    named = {(host.pool, host.node): host for host in everything}
    few = "\n".join(named[place].name for place in used)
    hosts = read_hosts(few, problem.cluster, plan)
    assert hosts == [named[place] for place in used]
    whole = read_hosts("\n".join(host.name for host in everything), problem.cluster, plan)
    results = [export(problem, plan, target, hosts=given) for given in (hosts, whole)]
    assert results[0].files == results[1].files
    with pytest.raises(InputError, match=f"expected {len(used)}, one for each node that the plan uses"):
        read_hosts("\n".join(f"h{i}" for i in range(len(everything) + 1)), problem.cluster, plan)


@pytest.mark.parametrize("target", list(TARGETS))
def test_hostile_region_and_cluster_names_are_harmless(target, tmp_path):
    """Names of regions, clusters and models with quotes, substitutions and newlines run nothing."""
    problem, plan = planned()
    evil = "x'\"; touch pwned; $(touch pwned) `touch pwned`\ntouch pwned\n"
    regions = tuple(replace(r, name=f"{evil}{i}") for i, r in enumerate(problem.cluster.regions))
    problem = replace(
        problem, cluster=replace(problem.cluster, name=evil, regions=regions), model=replace(problem.model, name=evil)
    )
    folder = write_all(export(problem, plan, target), tmp_path / "out")
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for command in ("torchrun", "deepspeed", "ssh", "tc", "hostname"):
        (stubs / command).write_text("#!/bin/bash\nexit 0\n")
        (stubs / command).chmod(0o755)
    for script in sorted(folder.glob("*.sh")):
        arguments = ["apply", "x"] if script.name == "shape.sh" else []
        subprocess.run(
            ["bash", str(script), *arguments], cwd=folder, capture_output=True, timeout=PATIENCE_S,
            env={"PATH": f"{stubs}:/usr/bin:/bin"},
        )  # fmt: skip
    assert not list(tmp_path.rglob("pwned"))


def test_skypilot_tasks_cover_all_nodes():
    """Tasks read as YAML; their node ranks follow each other and cover every host of the plan."""
    problem, plan = planned()
    result = export(problem, plan, "skypilot")
    tasks = [yaml.safe_load(text) for name, text in sorted(result.files.items()) if name.endswith(".yaml")]
    first = 0
    for task in tasks:
        assert f"$(({first} + SKYPILOT_NODE_RANK))" in task["run"]
        assert subprocess.run(["bash", "-n"], input=task["run"] + task["setup"], text=True).returncode == 0
        first += task["num_nodes"]
    assert first == len(seats(problem.cluster, by_rank(plan), default_hosts(problem.cluster)))


def test_command_writes_files_and_says_what_is_lost(tmp_path, capsys):
    """Data on stdout, exit 0; a wrong target is one line and exit 2."""
    problem, plan = planned()
    (tmp_path / "plan.json").write_text(export(problem, plan, "torchrun").files["plan.json"])
    out = tmp_path / "out"
    assert main([str(tmp_path / "plan.json"), "--to", "deepspeed", "-o", str(out), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert sorted(path.name for path in out.iterdir()) == data["files"]
    assert data["step_s"] >= data["plan_step_s"] > 0
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "plan.json"), "--to", "mpi", "-o", str(out)])
    assert stop.value.code == 2
    assert plan_data(problem, plan)["format"] == "polygon-plan"


def test_deepspeed_configs_multiply_out():
    """train_batch_size = micro-batch x accumulation x replicas, which DeepSpeed asserts."""
    for problem, plan, tables in drawn(16):
        uniform = find_uniform(problem, plan, tables, DEEPSPEED)
        if uniform is not None:
            config = ds_config(problem, uniform)
            product = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * uniform.dp
            assert config["train_batch_size"] == product
            assert uniform.pp == 1 or config["zero_optimization"]["stage"] <= 1


KNOWN_KEYS = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "optimizer", "zero_optimization", "steps_per_print", "wall_clock_breakdown", "communication_data_type", "bf16",
    "fp16", "zero_allow_untested_optimizer",
}  # fmt: skip
"""Of deepspeed.ai/docs/config-json; the parser lets unknown ones pass."""


def test_deepspeeds_own_parser_takes_every_config():
    """Configurations of 60 drawn plans, read by the installed DeepSpeed with the right number of replicas."""
    configs = []
    for problem, plan, tables in drawn(75):
        uniform = find_uniform(problem, plan, tables, DEEPSPEED)
        if uniform is not None:
            configs.append((uniform.dp, ds_config(problem, uniform)))
    configs = configs[:60]
    assert len(configs) == 60
    assert all(set(config) <= KNOWN_KEYS for _, config in configs)
    read = read_by_deepspeed(configs)
    assert len(read) == 60
    for (_, config), parsed in zip(configs, read, strict=True):
        assert parsed["train_batch_size"] == config["train_batch_size"], config
        assert parsed["stage"] == config["zero_optimization"]["stage"], config
        assert parsed["optimizer"].lower() in ("adamw", "sgd"), config


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_an_optimizer_is_said_or_among_what_is_lost(optimizer):
    """Megatron-LM's distributed optimizer ends at SGD, DeepSpeed's ZeRO wants to be told that it is meant, and
    torchtitan's configurations have one of their own."""
    starts, told, lost = [], set(), set()
    for given, plan, _ in drawn(12):
        problem = replace(given, batch=replace(given.batch, optimizer=optimizer))
        found = {target: export(problem, plan, target) for target in ("megatron", "deepspeed", "torchtitan")}
        if found["megatron"] is not None:
            starts.append(target_parsers.megatron_start(found["megatron"].files))
        if found["deepspeed"] is not None:
            config = json.loads(found["deepspeed"].files["ds_config.json"])
            sharded = config["zero_optimization"]["stage"] > 0
            told.add((sharded, config.get("zero_allow_untested_optimizer", False)))
        if found["torchtitan"] is not None:
            lost |= {str(loss.what) for loss in found["torchtitan"].losses if loss.what.kind == "lost.optimizer"}
    sgd = optimizer == "sgd"
    assert ({"--use-distributed-optimizer"} & {word for words, *_ in starts for word in words} == set()) == sgd
    assert (True, sgd) in told and told <= {(True, sgd), (False, False)}
    assert lost == ({"sgd: the optimizer is the configuration's, AdamW where nobody changes it"} if sgd else set())
    if target_parsers.installed("megatron"):
        assert [said["refused"] for said in target_parsers.read_by_megatron(starts) if "refused" in said] == []


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "fp8", "tf32"])
def test_a_precision_is_said_or_among_what_is_lost(precision):
    """torchtitan trains in bf16 unless it is told, and has no fp16; DeepSpeed's configuration has no 8 bits."""
    problem, plan, _ = of_dimensions("llama3-8b", {"dp": 16, "zero": 3})
    problem = replace(problem, batch=replace(problem.batch, precision=precision))
    instead = {
        "torchtitan": {"fp16": "bf16", "fp8": "bf16", "tf32": "fp32"},
        "deepspeed": {"fp8": "bf16", "tf32": "fp32"},
    }
    for target, changed in instead.items():
        result = export(problem, plan, target)
        lost = {str(loss.what) for loss in result.losses if loss.what.kind == "lost.precision"}
        assert lost == ({f"{precision}: {changed[precision]} instead"} if precision in changed else set())
        written = changed.get(precision, precision)
        if target == "torchtitan":
            known = {"bf16": "bfloat16", "fp32": "float32"}
            assert f"--training.mixed_precision_param={known[written]}" in result.files["flags.txt"].split()
        else:
            config = json.loads(result.files["ds_config.json"])
            assert [name for name in ("bf16", "fp16") if name in config] == ([] if written == "fp32" else [written])


def test_megatron_leaves_out_no_more_than_the_plan():
    """Its dropouts are 0.1 unless it is told, which plans do not count; of a program of before they are its own."""
    problem, plan, _ = of_dimensions("llama3-8b", {"dp": 16, "zero": 3})
    lines = export(problem, plan, "megatron").files["arguments.txt"].splitlines()
    assert {"--attention-dropout 0", "--hidden-dropout 0"} <= set(lines)
    before = replace(problem, runtime=catalogue.runtime("megatron-2022"))
    assert "dropout" not in export(before, plan, "megatron").files["arguments.txt"]


def test_tables_are_those_of_the_problem():
    """Tables may be handed in; the export is the same."""
    problem, plan = planned()
    assert export(problem, plan, "megatron", tables=CostTables(problem)) == export(problem, plan, "megatron")


@pytest.mark.parametrize("target", ["torchrun", "slurm", "kubernetes", "skypilot"])
def test_what_starts_polygons_ranks_says_what_they_will_not_run(target):
    """A plan for another program is refused, as its ranks would be; of a model without layers here a note says so."""
    problem, plan, _ = of_dimensions(*DIMENSIONS[5])
    exported = export(problem, plan, target)
    assert exported.notes[0].kind == "note.own_layers" and "latent" in exported.notes[0]["fields"]
    assert "a model file of your own" in " ".join(exported.files["README.md"].split())
    plain, theirs, _ = of_dimensions(*DIMENSIONS[2])
    assert not [note for note in export(plain, theirs, target).notes if note.kind == "note.own_layers"]
    with pytest.raises(InputError, match=r"problem\.runtime: found megatron-core, expected polygon, whose ranks"):
        export(replace(problem, runtime=catalogue.runtime("megatron-core")), plan, target)
    export(replace(problem, runtime=catalogue.runtime("polygon-compiled")), plan, target)
