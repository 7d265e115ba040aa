"""How to train, beside what the plan says."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from polygon.domain.errors import require, require_number
from runners.data.choice import DataChoice
from runners.engine.learning_rate import FINAL_PART, LearningRate
from runners.engine.trackers import TRACKERS

OF_LOCAL_STEPS = "outer_rate", "outer_momentum", "outer_fragments", "outer_overlap", "synchronous_steps"
"""Options that matter with local steps alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank additions that are trained in place of the weights (see `runners.engine.additions`)."""

    rank: int = 8
    alpha: float = 16.0
    """Over the rank: the factor on what is added."""
    targets: tuple[str, ...] = ("query", "value")
    """Last parts of the names of the blocks' linear layers that get one."""
    dropout: float = 0.0

    def __post_init__(self) -> None:
        require(self.rank >= 1, "--lora", self.rank, "a rank >= 1")
        require_number(self.alpha, "--lora-alpha", above=0)
        require(self.dropout == 0, "lora.dropout", self.dropout, "0 (what it drops would depend on the plan)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Choices of one run. All ranks must make the same ones, save device and log directory."""

    steps: int = 100
    learning_rate: float = 3e-4
    warmup_steps: int = 0
    schedule: str = "constant"
    """Of the learning rate, as are the next (see `runners.engine.learning_rate`)."""
    schedule_steps: int | None = None
    """Steps until the final rate; None: all."""
    decay_steps: int | None = None
    final_rate: float = FINAL_PART
    """Over the largest."""
    weight_decay: float = 0.1
    decay: str = "matrices"
    """What decays: matrices (embeddings too), or all: norms and biases as well."""
    average: float = 0.0
    """Part that a step leaves of the moving average of the weights; 0: none is kept."""
    compile: str | None = None
    """torch.compile's backend for the blocks, or `none`: they run as they are written; None: as the plan's runtime."""
    loss_chunk: int = 0
    """Tokens whose logits are there at a time; 0: those of the whole micro-batch."""
    balance: float = 0.0
    """Weight of the loss that keeps experts equally busy."""
    offload_optimizer: bool = False
    """Keep the optimizer's state, and its copy of the weights, in host memory."""
    outer_rate: float = 0.7
    outer_momentum: float = 0.9
    """Of the outer optimizer where the plan takes local steps (the defaults are DiLoCo's)."""
    outer_fragments: int = 1
    """Parts of the layers that are exchanged in turn, one every local steps / fragments."""
    outer_overlap: int = 0
    """Steps that an exchange may take while training goes on."""
    synchronous_steps: int | None = None
    """First steps in which all regions sum their gradients, before local steps begin; None: a fifth of all."""
    clip_norm: float | None = 1.0
    """Largest norm of the whole model's gradient; None: not clipped."""
    seed: int = 0
    weights: Path | None = None
    """Folder with safetensors of Hugging Face to start from; None: drawn from the seed."""
    lora: Lora | None = None
    """Train additions to some linear layers; None: the weights."""
    data: DataChoice = field(default_factory=DataChoice)
    model_file: Path | None = None
    """Python file that defines the model as a list of layers (see `runners.engine.user_model`)."""
    timeout_s: float = 300.0
    """How long one message may take before its peer counts as lost."""
    dead_after_s: float = 8.0
    """Silence after which a rank counts as lost and all ranks end."""
    validate_every: int = 0
    """Steps between two validations, where there are samples for them; 0: none."""
    checkpoint_dir: Path | None = None
    checkpoint_every: int = 0
    """Steps between two checkpoints; 0: only when the run is stopped or ends."""
    checkpoints_kept: int = 3
    resume: bool = False
    lookahead: int = 16
    """Receives posted ahead of the action that needs the first of them; 0: nothing overlaps with computing.

    Then messages are asked for when they are needed, and gradients are summed after the last backward.
    """
    traced_steps: int = 8
    profiled_steps: int = 0
    """Steps that the PyTorch Profiler records, on every rank, into the log directory."""
    profiled_after: int = 1
    """Steps before those; it slows the last of them down."""
    device: str = "auto"
    log_dir: Path | None = None
    log_dir_named: bool = True
    """Whether the user said which; else it is called as rank 0 calls it, which need not begin in the same second."""
    track: tuple[str, ...] = ()
    """Trackers (see `runners.engine.trackers`) that rank 0 tells the figures of all ranks."""
    emulate_links: bool = False
    """Messages between regions take as long as the cluster's links would need (all ranks on one machine)."""
    emulate_devices: float = 0.0
    """Computations take at least so many times as long as predicted for the plan's devices; 0: as long as they do."""

    def __post_init__(self) -> None:
        require(self.steps >= 1, "--steps", self.steps, "a whole number >= 1")
        require_number(self.balance, "balance", at_least=0)
        length = self.schedule_steps
        require(length is None or length >= 1, "--schedule-steps", length, "a whole number >= 1")
        assert self.rate  # which checks its own fields
        require(self.seed >= 0, "--seed", self.seed, "a whole number >= 0")
        require(self.traced_steps >= 0, "--traced-steps", self.traced_steps, "a whole number >= 0")
        require(self.profiled_steps >= 0, "--profiled-steps", self.profiled_steps, "a whole number >= 0")
        require(self.profiled_after >= 1, "--profiled-after", self.profiled_after, "a whole number >= 1")
        require(
            not self.profiled_steps or self.log_dir is not None,
            "--log-dir",
            None,
            "a directory (with --profiled-steps)",
        )
        require(self.lookahead >= 0, "--lookahead", self.lookahead, "a whole number >= 0")
        require_number(self.outer_rate, "--outer-rate", above=0)
        require_number(self.outer_momentum, "--outer-momentum", at_least=0)
        require(self.outer_fragments >= 1, "--outer-fragments", self.outer_fragments, "a whole number >= 1")
        require(self.outer_overlap >= 0, "--outer-overlap", self.outer_overlap, "a whole number >= 0")
        first = self.synchronous_steps
        require(first is None or first >= 0, "--synchronous-steps", first, "a whole number >= 0")
        require_number(self.weight_decay, "--weight-decay", at_least=0)
        require(self.decay in ("matrices", "all"), "--decay", self.decay, "matrices or all")
        require(0 <= self.average < 1, "--average", self.average, "a number in 0..1, without 1")
        require(self.loss_chunk >= 0, "--loss-chunk", self.loss_chunk, "a whole number >= 0")
        require_number(self.timeout_s, "--timeout", above=0)
        require_number(self.emulate_devices, "--emulate-devices", at_least=0)
        require_number(self.dead_after_s, "--dead-after", above=0)
        require(self.validate_every >= 0, "--validate-every", self.validate_every, "a whole number >= 0")
        require(self.checkpoint_every >= 0, "--checkpoint-every", self.checkpoint_every, "a whole number >= 0")
        require(self.checkpoints_kept >= 1, "--keep", self.checkpoints_kept, "a whole number >= 1")
        require(
            self.checkpoint_dir is not None or not (self.resume or self.checkpoint_every),
            "--checkpoint-dir",
            None,
            "a directory (with --resume or --checkpoint-every)",
        )
        clip = self.clip_norm
        require(clip is None or 0 < clip < math.inf, "--clip-norm", clip, "a number > 0, or 0: not clipped")
        for name in self.track:
            require(name in TRACKERS, "--track", name, " or ".join(TRACKERS))
        require(self.device in ("auto", "cpu", "cuda"), "--device", self.device, "auto, cpu or cuda")

    @property
    def rate(self) -> LearningRate:
        """The learning rate by step."""
        return LearningRate(
            largest=self.learning_rate,
            schedule=self.schedule,
            warmup_steps=self.warmup_steps,
            steps=self.schedule_steps or self.steps,
            decay_steps=self.decay_steps,
            final_part=self.final_rate,
        )

    @property
    def additions(self) -> dict[str, Any] | None:
        """What LoRA's additions are like, as checkpoints say it; None: the weights are trained."""
        return None if self.lora is None else asdict(self.lora)

    def shared(self) -> dict[str, object]:
        """The choices that must be the same on all ranks."""
        own = ("device", "log_dir", "log_dir_named", "data", "model_file", "weights", "checkpoint_dir")
        # Each rank may save where it likes, but all save or none: they wait for one another's files.
        shared: dict[str, object] = {"saves": self.checkpoint_dir is not None}
        return shared | {key: str(value) for key, value in asdict(self).items() if key not in own}
