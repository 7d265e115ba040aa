"""How to train, beside what the plan says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from polygon.domain.errors import require, require_number
from runners.engine.trackers import TRACKERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Choices of one run. All ranks must make the same ones, save device and log directory."""

    steps: int = 100
    learning_rate: float = 3e-4
    warmup_steps: int = 0
    weight_decay: float = 0.1
    context: int = 1
    """Parts into which every sequence is cut, each for as many of a worker's devices."""
    sequence_parallel: bool = False
    """Whether the devices of a tensor-parallel group split the tokens between the layers that they cut."""
    expert: int = 1
    """Ranks that share out the experts of a layer."""
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
    data: Path | None = None
    model_file: Path | None = None
    """Python file that defines the model as a list of layers (see `runners.engine.own_model`)."""
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
    """Steps that the PyTorch Profiler records after the first one, on every rank, into the log directory."""
    device: str = "auto"
    log_dir: Path | None = None
    track: tuple[str, ...] = ()
    """Trackers (see `runners.engine.trackers`) that rank 0 tells the figures of all ranks."""
    emulate_links: bool = False
    """Messages between regions take as long as the cluster's links would need (all ranks on one machine)."""
    emulate_devices: float = 0.0
    """Computations take at least so many times as long as predicted for the plan's devices; 0: as long as they do."""

    def __post_init__(self) -> None:
        require(self.steps >= 1, "--steps", self.steps, "a whole number >= 1")
        require(self.context >= 1, "context", self.context, "a whole number >= 1")
        require(self.expert >= 1, "expert", self.expert, "a whole number >= 1")
        require_number(self.balance, "balance", at_least=0)
        require(self.warmup_steps >= 0, "--warmup-steps", self.warmup_steps, "a whole number >= 0")
        require(self.profiled_steps >= 0, "--profiled-steps", self.profiled_steps, "a whole number >= 0")
        require(
            not self.profiled_steps or self.log_dir is not None,
            "--log-dir",
            None,
            "a directory (with --profiled-steps)",
        )
        require(self.lookahead >= 0, "--lookahead", self.lookahead, "a whole number >= 0")
        require_number(self.learning_rate, "--learning-rate", above=0)
        require_number(self.outer_rate, "--outer-rate", above=0)
        require_number(self.outer_momentum, "--outer-momentum", at_least=0)
        require(self.outer_fragments >= 1, "--outer-fragments", self.outer_fragments, "a whole number >= 1")
        require(self.outer_overlap >= 0, "--outer-overlap", self.outer_overlap, "a whole number >= 0")
        first = self.synchronous_steps
        require(first is None or first >= 0, "--synchronous-steps", first, "a whole number >= 0")
        require_number(self.weight_decay, "--weight-decay", at_least=0)
        require_number(self.timeout_s, "--timeout", above=0)
        require_number(self.emulate_devices, "--emulate-devices", at_least=0)
        require_number(self.dead_after_s, "--dead-after", above=0)
        require(self.validate_every >= 0, "validate_every", self.validate_every, "a whole number >= 0")
        require(self.checkpoint_every >= 0, "--checkpoint-every", self.checkpoint_every, "a whole number >= 0")
        require(self.checkpoints_kept >= 1, "--keep", self.checkpoints_kept, "a whole number >= 1")
        require(
            self.checkpoint_dir is not None or not (self.resume or self.checkpoint_every),
            "--checkpoint-dir",
            None,
            "a directory (with --resume or --checkpoint-every)",
        )
        if self.clip_norm is not None:
            require_number(self.clip_norm, "--clip-norm", above=0)
        for name in self.track:
            require(name in TRACKERS, "--track", name, " or ".join(TRACKERS))
        require(self.device in ("auto", "cpu", "cuda"), "--device", self.device, "auto, cpu or cuda")

    def shared(self) -> dict[str, object]:
        """The choices that must be the same on all ranks."""
        own = ("device", "log_dir", "data", "model_file", "weights", "checkpoint_dir")
        return {key: str(value) for key, value in asdict(self).items() if key not in own}
