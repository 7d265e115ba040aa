"""DeepSpeed: ds_config.json, hostfile, a training program with pipeline stages, and scripts that start it.

Sources: deepspeed.ai/docs/config-json; DeepSpeed 0.19.8 runtime/config.py (train_batch_size = micro-batch x
accumulation x data-parallel degree), launcher/runner.py (hostfile), runtime/pipe (ZeRO 2 and 3 refused with stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.errors import Phrase, fault, require
from polygon.domain.message import Message
from polygon.domain.model import Batch
from polygon.domain.plan import Plan, Problem
from polygon.domain.runnable import runnable_as
from polygon.export.bundle import Export, Loss, json_text
from polygon.export.launch_hosts import Host, Seat, hosts_text, seats
from polygon.export.restrict import losses
from polygon.export.scripts import PORT, STRICT, folded, run_name, start_all_script, torchrun_script
from polygon.planning.uniform_plans import Uniform, find_uniform

INSTEAD = {"fp8": "bf16", "tf32": "fp32"}
"""Precisions of which DeepSpeed's configuration knows nothing, and what is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroOptions:
    """What DeepSpeed is to split over the replicas, and what lies in host memory."""

    stage: int = 0
    hierarchical: int = 1
    """ZeRO++: ranks of a node that share out a second copy of the weights, so that backward gathers them inside it."""
    quantized_weights: bool = False
    """ZeRO++: weights are gathered in 8 bits."""
    quantized_gradients: bool = False
    """ZeRO++: gradients are reduced in 4 bits, by all-to-all."""
    offload: str = "none"
    """none, optimizer or parameters (the optimizer's state too)."""

    def __post_init__(self) -> None:
        require(self.stage in (0, 1, 2, 3), "zero.stage", self.stage, "0, 1, 2 or 3")
        plus = self.hierarchical > 1 or self.quantized_weights or self.quantized_gradients
        require(self.stage == 3 or not plus, "zero.stage", self.stage, "3 (with ZeRO++)")
        require(self.offload in ("none", "optimizer", "parameters"), "offload", self.offload, "optimizer or parameters")
        require(
            self.offload != "parameters" or self.stage == 3, "zero.stage", self.stage, "3 (parameters in host memory)"
        )
        require(self.offload == "none" or self.stage > 0, "zero.stage", self.stage, "1, 2 or 3 (with offload)")

    def to_config(self) -> dict[str, Any]:
        """DeepSpeed's `zero_optimization`."""
        config: dict[str, Any] = {"stage": self.stage}
        if self.hierarchical > 1:
            config["zero_hpz_partition_size"] = self.hierarchical
        if self.quantized_weights:
            config["zero_quantized_weights"] = True
        if self.quantized_gradients:
            config["zero_quantized_gradients"] = True
        if self.offload != "none":
            config["offload_optimizer"] = {"device": "cpu"}
        if self.offload == "parameters":
            config["offload_param"] = {"device": "cpu"}
        return config


def batch_config(
    batch: Batch, micro_batch_size: int, accumulation: int, zero: ZeroOptions, gradient_precision: str | None = None
) -> dict[str, Any]:
    """The configuration: batch sizes that multiply out, precision, ZeRO, optimizer, type of reduced gradients."""
    gradient = gradient_precision or batch.gradient_precision
    if batch.optimizer == "adamw":
        optimizer = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    else:
        optimizer = {"lr": 1e-2, "momentum": 0.9}
    config: dict[str, Any] = {
        "train_batch_size": batch.global_batch,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": {"adamw": "AdamW", "sgd": "SGD"}[batch.optimizer], "params": optimizer},
        "zero_optimization": zero.to_config(),
        "steps_per_print": 100000,
        "wall_clock_breakdown": False,
    }
    if zero.stage and batch.optimizer != "adamw":  # it refuses others with ZeRO unless it is told that they are meant
        config["zero_allow_untested_optimizer"] = True
    if gradient in ("fp32", "fp16", "bf16"):
        config["communication_data_type"] = gradient
    precision = INSTEAD.get(batch.precision, batch.precision)
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    elif precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 16}
    return config


def ds_config(problem: Problem, uniform: Uniform) -> dict[str, Any]:
    """The configuration of a uniform plan."""
    plan = uniform.plan
    packings = {use.weight_gradients for use in plan.links}
    gradient = "bf16" if "bf16" in packings else problem.batch.gradient_precision
    zero = ZeroOptions(stage=plan.stages[0].zero)
    return batch_config(problem.batch, plan.micro_batch_size, uniform.gradient_accumulation, zero, gradient)


def model_shape(problem: Problem, uniform: Uniform) -> dict[str, Any]:
    """What the training program builds the model from."""
    model = problem.model
    names = ("blocks", "hidden_size", "heads", "kv_heads", "head_dim", "ffn_size", "vocab_size", "gated_mlp")
    more = ("learned_positions", "rope_theta", "rms_norm", "norm_eps", "linear_bias", "qkv_bias")
    shape = {name: getattr(model, name) for name in (*names, *more)}
    full = uniform.plan.stages[0].recompute == "full"
    return {
        "name": model.name, **shape, "seq_len": problem.batch.seq_len, "stages": uniform.pp,
        "checkpoint_interval": 1 if full else 0,
    }  # fmt: skip


def hostfile(rows: Sequence[Seat]) -> str:
    """A line a host: its name and the slots that take part."""
    return "".join(f"{seat.host.name} slots={len(seat.devices)}\n" for seat in rows)


def launch_script(rows: Sequence[Seat]) -> str:
    """DeepSpeed's own launcher over all hosts, with the devices that take part on each."""
    include = "@".join(f"{seat.host.name}:{','.join(map(str, seat.devices))}" for seat in rows)
    full = "".join(f"{seat.host.name} slots={max(seat.devices) + 1}\\n" for seat in rows)
    words = ["deepspeed", "--hostfile", "$hosts", "--include", include, "--master_addr", rows[0].host.name]
    words += ["--master_port", str(PORT), "train.py"]
    command = folded(words).replace("'$hosts'", '"$hosts"')
    return (
        STRICT
        + "# Starts all hosts by DeepSpeed's launcher (ssh); this folder must be at the same place on each of them.\n"
        + 'cd "$(dirname "${BASH_SOURCE[0]}")"\n'
        + "# --include chooses among the slots, so the list must name as many as the highest number used.\n"
        + 'hosts="$(mktemp)"\ntrap \'rm -f "$hosts"\' EXIT\n'
        + f"printf '{full}' > \"$hosts\"\n"
        + f'{command} "$@"\n'
    )


def export_deepspeed(problem: Problem, plan: Plan, tables: CostTables, hosts: Sequence[Host]) -> Export | None:
    """Everything that DeepSpeed needs to train the plan's model; None where no plan fits that it can express."""
    if problem.model.family == "vit":
        raise fault("export", Phrase("a vision transformer"), Message("expected.for_deepspeed"))
    precision = problem.batch.precision
    runs = runnable_as(problem, "deepspeed")
    uniform = find_uniform(problem, plan, tables, runs)
    if uniform is None:
        return None
    rows = seats(problem.cluster, uniform.chain, hosts)
    template = resources.files("polygon.export").joinpath("templates/train_deepspeed.py.txt")
    files = {
        "ds_config.json": json_text(ds_config(problem, uniform)),
        "model.json": json_text(model_shape(problem, uniform)),
        "hostfile": hostfile(rows),
        "hosts.txt": hosts_text(rows),
        "train.py": template.read_text("utf-8"),
        "run.sh": launch_script(rows),
    }
    for index, seat in enumerate(rows):
        files[run_name(seat)] = torchrun_script("The same without DeepSpeed's launcher.", rows, index, ["train.py"])
    files["start-all.sh"] = start_all_script(rows)
    lost = losses(problem, plan, tables, runs, uniform)
    if any(worker.tp > 1 for stage in plan.stages for worker in stage.workers):
        lost.append(Loss(what=Message("lost.tensor_parallelism")))
    if problem.model.experts:
        lost.append(Loss(what=Message("lost.experts")))
    if precision in INSTEAD:
        lost.append(Loss(what=Message("lost.precision", precision=precision, instead=INSTEAD[precision])))
    notes = [Message("note.small_run")]
    if problem.model.tied_embeddings:
        notes.append(Message("note.not_tied"))
    return Export(
        target="deepspeed",
        files=files,
        losses=tuple(lost),
        plan_step_s=step_times(plan, tables).step_s,
        step_s=uniform.step_s,
        start="bash run.sh --steps 100",
        notes=tuple(notes),
    )
