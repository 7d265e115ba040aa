"""torchtitan: command-line flags of its `ParallelismConfig` and torchrun scripts for every host.

Source: torchtitan 0.3 torchtitan/config/configs.py (its configurations are Python, so flags are what can be written
from outside); which recomputation is a subcommand, after which no flag may follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.errors import InputError
from polygon.domain.message import Message
from polygon.domain.model import Model
from polygon.domain.plan import Plan, Problem
from polygon.domain.runnable import runnable_as
from polygon.export.bundle import Export, Loss
from polygon.export.launch_hosts import Host, hosts_text, seats
from polygon.export.restrict import losses
from polygon.export.scripts import pairs, run_name, start_all_script, torchrun_script
from polygon.formats.hugging_face_export import kind_of
from polygon.planning.uniform_plans import Uniform, find_uniform

MODULES = {"llama": "llama3", "qwen3": "qwen3", "qwen3_moe": "qwen3"}
"""Of `torchtitan.models`, by Hugging Face's `model_type`."""
CONFIGS = frozenset(
    {
        *("llama3_8b", "llama3_70b", "llama3_405b", "gpt_oss_20b", "gpt_oss_120b"),
        *("qwen3_0_6b", "qwen3_1_7b", "qwen3_14b", "qwen3_30b_a3b", "qwen3_32b"),
    }
)
"""Functions of these modules' `config_registry`, each the model of that name."""
PRECISIONS = {"bf16": "bfloat16", "fp32": "float32"}
"""`training.mixed_precision_param`: all that it has; products in 8 bits are for a configuration to ask for."""
INSTEAD = {"fp16": "bf16", "fp8": "bf16", "tf32": "fp32"}


def module_names(plan: Plan, model: Model) -> list[list[str]]:
    """`module_fqns_per_model_part`: the modules of every stage by torchtitan's names."""
    parts = []
    for stage in plan.stages:
        names = ["tok_embeddings"] if stage.first_layer == 0 else []
        names += [f"layers.{b - 1}" for b in range(max(1, stage.first_layer), min(stage.last_layer, model.blocks + 1))]
        parts.append(names + (["norm", "lm_head"] if stage.last_layer == model.layers else []))
    return parts


def flags(problem: Problem, uniform: Uniform) -> list[str]:
    """Degrees, schedule, stages and batch as torchtitan's flags."""
    plan = uniform.plan
    stage = plan.stages[0]
    # Parts of a sequence shard the weights together with the ranks of data parallelism.
    shard = max(1, uniform.shards // uniform.cp)
    names = {
        "parallelism.data_parallel_shard_degree": shard,
        "parallelism.data_parallel_replicate_degree": uniform.dp // shard,
        "parallelism.tensor_parallel_degree": uniform.tp,
        "parallelism.context_parallel_degree": uniform.cp,
        "parallelism.expert_parallel_degree": uniform.ep,
        "parallelism.pipeline_parallel_degree": uniform.pp,
        "training.mixed_precision_param": PRECISIONS[INSTEAD.get(problem.batch.precision, problem.batch.precision)],
        "training.seq_len": problem.batch.seq_len,
        "training.global_batch_size": problem.batch.global_batch,
        "training.local_batch_size": plan.micro_batch_size * (uniform.gradient_accumulation if uniform.pp > 1 else 1),
    }
    words = [f"--{key}={value}" for key, value in names.items()]
    if uniform.pp > 1:
        schedule = "1F1B" if plan.chunks == 1 else "Interleaved1F1B"
        words += [f"--parallelism.pipeline_parallel_schedule={schedule}"]
        words += [f"--parallelism.pipeline_parallel_microbatch_size={plan.micro_batch_size}"]
        words += ["--parallelism.module_fqns_per_model_part"]  # a word a stage
        words += [",".join(names) for names in module_names(plan, problem.model)]
    if uniform.pp > 1 or uniform.ep > 1:  # with which it refuses them, but for two of its ways to send tokens
        words += ["--training.disable_cuda_graphs"]
    if uniform.tp > 1 and not stage.sequence_parallel:
        words.append("--parallelism.no-enable_sequence_parallel")
    if stage.zero in (1, 2):
        words.append("--parallelism.fsdp_reshard_after_forward=never")
    return words


def model_names(model: Model) -> tuple[str, str]:
    """Module and configuration of torchtitan's that are a model, each empty where it has none."""
    try:
        module = MODULES.get(kind_of(model), "")
    except InputError:  # of a kind that the engine does not run either, which torchtitan may all the same
        module = "gpt_oss" if model.name.startswith("gpt-oss") else ""
    config = model.name.replace("-", "_").replace(".", "_")
    return (module, config) if config in CONFIGS else (module, "")


def export_torchtitan(problem: Problem, plan: Plan, tables: CostTables, hosts: Sequence[Host]) -> Export | None:
    """Scripts that start `torchtitan.train`; None where no uniform plan fits."""
    runs = runnable_as(problem, "torchtitan")
    uniform = find_uniform(problem, plan, tables, runs)
    if uniform is None:
        return None
    rows = seats(problem.cluster, uniform.chain, hosts)
    words = flags(problem, uniform)
    module, config = model_names(problem.model)
    module_word = f"${{TITAN_MODULE:-{module}}}" if module else "${TITAN_MODULE:?name the module of your model}"
    config_word = f"${{TITAN_CONFIG:-{config}}}" if config else "${TITAN_CONFIG:?name a configuration of your model}"
    names = f'--module "{module_word}" \\\n    --config "{config_word}"'
    recompute = f"activation-checkpoint:{uniform.plan.stages[0].recompute}"
    files = {"hosts.txt": hosts_text(rows), "flags.txt": "\n".join([*pairs(words), recompute]) + "\n"}
    for index, seat in enumerate(rows):
        # torchrun takes "-m MODULE" where a script would stand.
        text = torchrun_script(
            "Runs torchtitan; TORCHTITAN_ROOT is its checkout. TITAN_MODULE and TITAN_CONFIG name the model.",
            rows, index, ["-m torchtitan.train", "--module", *words], "TORCHTITAN_ROOT", last=recompute,
        )  # fmt: skip
        files[run_name(seat)] = text.replace("--module", names, 1)
    files["start-all.sh"] = start_all_script(rows)
    own = "" if module else "TITAN_MODULE=MODULE "
    named = own if config else f"{own}TITAN_CONFIG=CONFIGURATION "
    lost = losses(problem, plan, tables, runs, uniform)
    notes = [] if config else [Message("note.titan_config")]
    if not module and problem.model.family != "llama":
        lost.append(Loss(what=Message("lost.family", family=problem.model.family)))
    precision, optimizer = problem.batch.precision, problem.batch.optimizer
    if precision in INSTEAD:
        lost.append(Loss(what=Message("lost.precision", precision=precision, instead=INSTEAD[precision])))
    if optimizer != "adamw":
        lost.append(Loss(what=Message("lost.optimizer", optimizer=optimizer)))
    return Export(
        target="torchtitan",
        files=files,
        losses=tuple(lost),
        plan_step_s=step_times(plan, tables).step_s,
        step_s=uniform.step_s,
        start=f"TORCHTITAN_ROOT=/path/to/torchtitan {named}bash start-all.sh",
        notes=tuple(notes),
    )
