"""Megatron-LM: arguments with the pipeline layout, and torchrun scripts for every host.

Sources: Megatron-LM megatron/training/arguments.py and megatron/core/transformer/pipeline_parallel_layer_layout.py
(letters E embedding, t transformer layer, m one that predicts a further token, L loss; `|` ends a stage; `t*3` repeats;
with v times as many stages as the pipeline has ranks, v are interleaved on each); its Megatron-FSDP is ZeRO-2 and -3,
its distributed optimizer ZeRO-1.
"""

from __future__ import annotations

from collections.abc import Sequence

from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.errors import Phrase, fault
from polygon.domain.message import Message
from polygon.domain.model import Model
from polygon.domain.plan import Plan, Problem
from polygon.domain.runnable import runnable_as
from polygon.export.bundle import Export, Loss
from polygon.export.launch_hosts import Host, hosts_text, seats
from polygon.export.restrict import Words, losses
from polygon.export.scripts import pairs, run_name, start_all_script, torchrun_script
from polygon.planning.uniform_plans import Uniform, find_uniform


def said_fields(model: Model) -> tuple[str, ...]:
    """Of what is special in a model's blocks, the fields that its flags say: latent attention, groups of experts,
    norms of each head's queries and keys, windows (not chunks) in all or in some blocks, tokens predicted ahead."""
    said = ["expert_groups", "groups_per_token", "predicted_ahead"]
    if model.latent is not None:
        said += ["latent", "value_dim"]
    if model.query_key_norm == "head":
        said.append("query_key_norm")
    if model.causal and not set(model.attention_pattern) - {"window", "full"}:
        said += ["window", "attention_pattern"]
    return tuple(said)


WORDS = Words(rotary_scalings=("llama3",), said_fields=said_fields)
SHARDED = {2: "optim_grads", 3: "optim_grads_params"}
"""`--data-parallel-sharding-strategy` by ZeRO stage."""


def layout(plan: Plan, model: Model) -> str:
    """`--pipeline-model-parallel-layout` of a plan's stages: `Et*3|t*5|t*4L`."""
    parts = []
    for stage in plan.stages:
        blocks = min(stage.last_layer, model.blocks + 1) - max(stage.first_layer, 1)
        text = "E" if stage.first_layer == 0 else ""
        text += f"t*{blocks}" if blocks > 1 else "t" * blocks
        parts.append(text + ("m" * model.predicted_ahead + "L" if stage.last_layer == model.layers else ""))
    return "|".join(parts)


def model_arguments(problem: Problem) -> list[str]:
    """The model's shape and the batch in Megatron-LM's words."""
    model, batch = problem.model, problem.batch
    words = ["--num-layers", model.blocks, "--hidden-size", model.hidden_size, "--ffn-hidden-size", model.ffn_size]
    words += ["--num-attention-heads", model.heads, "--kv-channels", model.head_dim]
    words += ["--seq-length", batch.seq_len, "--max-position-embeddings", max(model.max_seq_len, batch.seq_len)]
    words += ["--vocab-size", model.vocab_size, "--tokenizer-type", "NullTokenizer"]
    if model.kv_heads != model.heads:
        words += ["--group-query-attention", "--num-query-groups", model.kv_heads]
    if model.gated_mlp:
        words.append("--swiglu")
    if model.rms_norm:
        words += ["--normalization", "RMSNorm"]
    words += ["--norm-epsilon", model.norm_eps]
    if not model.learned_positions:
        words += ["--position-embedding-type", "rope", "--rotary-base", round(model.rope_theta)]
        if model.rope_scaling is not None and model.rope_scaling.kind == "llama3":
            words += ["--use-rope-scaling", "--rope-scaling-factor", model.rope_scaling.factor]
    words += attention_arguments(model, batch.seq_len)
    if model.predicted_ahead:
        words += ["--mtp-num-layers", model.predicted_ahead]
    if not model.tied_embeddings:
        words.append("--untie-embeddings-and-output-weights")
    if not model.linear_bias:
        words.append("--disable-bias-linear")
    if model.qkv_bias and not model.linear_bias:
        words.append("--add-qkv-bias")
    if model.experts:
        words += ["--num-experts", model.experts, "--moe-router-topk", model.experts_per_token]
        words += ["--moe-ffn-hidden-size", model.expert_ffn_size]
        if model.expert_groups > 1:
            words += ["--moe-router-num-groups", model.expert_groups, "--moe-router-group-topk", model.groups_per_token]
        if model.shared_experts:
            words += ["--moe-shared-expert-intermediate-size", model.shared_experts * model.expert_ffn_size]
        if model.expert_every > 1:
            sparse = [int(model.is_sparse(layer)) for layer in range(1, model.blocks + 1)]
            words += ["--moe-layer-freq", f"[{','.join(map(str, sparse))}]"]
        elif model.dense_blocks:
            pattern = f"([0]*{model.dense_blocks}+[1]*{model.blocks - model.dense_blocks})"
            words += ["--moe-layer-freq", pattern]
    if batch.precision in ("bf16", "fp16"):
        words.append(f"--{batch.precision}")
    elif batch.precision == "fp8":
        words += ["--bf16", "--fp8-format", "hybrid"]
    words += ["--optimizer", "adam" if batch.optimizer == "adamw" else "sgd"]
    if not problem.runtime.dropout:  # its defaults are 0.1, and masks take memory and time that no plan counts
        words += ["--attention-dropout", 0, "--hidden-dropout", 0]
    return [str(word) for word in words]


def attention_arguments(model: Model, seq_len: int) -> list[object]:
    """What attention has beside heads: latent attention, norms of queries and keys, windows."""
    words: list[object] = []
    if model.latent is not None:
        rotated = model.latent.rope_dim
        words += ["--multi-latent-attention", "--rope-type", "rope", "--kv-lora-rank", model.latent.kv_rank]
        words += ["--q-lora-rank", model.latent.q_rank] if model.latent.q_rank else []
        words += ["--qk-head-dim", model.head_dim - rotated, "--qk-pos-emb-head-dim", rotated]
        words += ["--v-head-dim", model.value_dim or model.head_dim]
    # Of latent attention it is the norms of what queries, and keys and values, are made of.
    if model.query_key_norm == "head" or model.latent is not None:
        words.append("--qk-layernorm")
    if "window" in model.special(seq_len) and {"window", "attention_pattern"} <= set(said_fields(model)):
        # It counts the tokens before a query, polygon those that a query sees, its own among them.
        words += ["--window-size", f"{model.window - 1},0"]
        if model.attention_pattern:
            seen = [int(model.attention_of(layer) == "window") for layer in range(1, model.blocks + 1)]
            words += ["--window-attn-skip-freq", f"[{','.join(map(str, seen))}]"]
    return words


def parallel_arguments(uniform: Uniform, problem: Problem) -> list[str]:
    """Degrees, layout, micro-batches and memory options."""
    model = problem.model
    plan, first = uniform.plan, uniform.plan.stages[0]
    words: list[object] = ["--tensor-model-parallel-size", uniform.tp, "--pipeline-model-parallel-size", uniform.pp]
    if uniform.pp > 1:
        words += ["--pipeline-model-parallel-layout", layout(plan, model)]
    if uniform.cp > 1:
        words += ["--context-parallel-size", uniform.cp]
    if problem.whole_experts(first):
        words += ["--expert-model-parallel-size", problem.experts_apart(first), "--expert-tensor-parallel-size", 1]
    elif uniform.ep > 1:
        words += ["--expert-model-parallel-size", uniform.ep]
    words += ["--micro-batch-size", plan.micro_batch_size, "--global-batch-size", problem.batch.global_batch]
    if first.sequence_parallel:
        words.append("--sequence-parallel")
    if first.zero:
        words.append("--use-distributed-optimizer")
        if uniform.shards < uniform.dp * uniform.cp:
            words += ["--num-distributed-optimizer-instances", uniform.dp * uniform.cp // uniform.shards]
    if first.zero > 1:
        words += ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", SHARDED[first.zero]]
        words += ["--ckpt-format", "fsdp_dtensor", "--no-gradient-accumulation-fusion"]
    elif uniform.dp > 1:
        words.append("--overlap-grad-reduce")
    if first.recompute == "selective":
        words += ["--recompute-granularity", "selective"]
    elif first.recompute == "full":
        some = first.recompute_blocks
        words += ["--recompute-granularity", "full", "--recompute-method", "uniform" if some is None else "block"]
        words += ["--recompute-num-layers", some or 1]
    return [str(word) for word in words]


def export_megatron(problem: Problem, plan: Plan, tables: CostTables, hosts: Sequence[Host]) -> Export | None:
    """Scripts that start `pretrain_gpt.py` of a Megatron-LM checkout; None where no uniform plan fits."""
    if problem.model.family == "vit":
        raise fault("export", Phrase("a vision transformer"), "a language model for Megatron-LM")
    runs = runnable_as(problem, "megatron")
    uniform = find_uniform(problem, plan, tables, runs)
    if uniform is None:
        return None
    rows = seats(problem.cluster, uniform.chain, hosts)
    words = model_arguments(problem) + parallel_arguments(uniform, problem)
    files = {"hosts.txt": hosts_text(rows), "arguments.txt": "\n".join(pairs(words)) + "\n"}
    # Its tensor and context parallelism insist on this before Blackwell; Megatron-FSDP on the contrary.
    alone = uniform.tp * uniform.cp > 1 and uniform.plan.stages[0].zero < 2
    exported = ["CUDA_DEVICE_MAX_CONNECTIONS=1"] if alone else []
    for index, seat in enumerate(rows):
        program = ["pretrain_gpt.py", *words, "--mock-data", "--train-iters", "100", "--lr", "3e-4"]
        files[run_name(seat)] = torchrun_script(
            "Runs Megatron-LM; MEGATRON_ROOT is its checkout. Replace --mock-data by your --data-path.",
            rows, index, program, "MEGATRON_ROOT", exported=exported,
        )  # fmt: skip
    files["start-all.sh"] = start_all_script(rows)
    lost = losses(problem, plan, tables, runs, uniform, WORDS)
    if len({w.pool for w in uniform.chain}) > 1:
        lost.append(Loss(what=Message("lost.speeds")))
    return Export(
        target="megatron",
        files=files,
        losses=tuple(lost),
        plan_step_s=step_times(plan, tables).step_s,
        step_s=uniform.step_s,
        start="MEGATRON_ROOT=/path/to/Megatron-LM bash start-all.sh",
        notes=(Message("note.rank_order"),),
    )
