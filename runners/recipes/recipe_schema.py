"""What a recipe may say. Strict: an unknown key, a wrong type or an unknown word is an error that names its place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field

from polygon.domain.errors import InputError, located, one_of
from polygon.formats.files import read_yaml
from polygon.formats.schema import Count, Index, Name, NotNegative, Positive, Strict, check
from polygon.formats.serialization import parse_yaml
from runners.engine.learning_rate import FINAL_PART, LearningRate, RateNames

BACKENDS = {
    "engine": "engine_backend",
    "plan": "engine_backend",
    "ddp": "replicas_backend",
    "deepspeed": "ds",
}
"""Who trains: name in a recipe, and module of `runners.recipes.backends`."""

DATA_KINDS = {
    "english": "plain",
    "digits": "plain",
    "instructions": "instructions",
    "cifar100": "images",
    "food101": "images",
    "images": "images",
}
"""What is read: name in a recipe, and module of `runners.recipes.data`."""

RATE_NAMES = RateNames(
    "optimizer.learning_rate", "optimizer.rate_schedule", "optimizer.warmup_steps", "steps", "optimizer.decay_steps",
    "optimizer.final_rate",
)  # fmt: skip
"""What a recipe calls the fields of its learning rate."""


class ModelPart(Strict):
    """A model of the catalogue, a `config.json` of Hugging Face or a model file, with some of its sizes changed."""

    source: Name
    """Name in the catalogue, or a path (seen from the recipe)."""
    change: dict[Name, Any] = Field(default_factory=dict)
    """Fields of `polygon.domain.model.Model` to set otherwise (`blocks: 2`), for small runs of the same kind."""
    weights: Name | None = None
    """Folder with safetensors of Hugging Face to start from; none: drawn from the seed."""


class DataPart(Strict):
    """What is read."""

    kind: Name = "english"
    """A name of `DATA_KINDS`."""
    path: Name | None = None
    """File or folder (seen from the recipe); none: the small set that the kind brings along."""
    tokenizer: Name | None = None
    """Folder or file of a tokenizer; none: that of the weights; without one instructions train one, text is read by
    bytes."""
    token_type: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    """Of a raw file of tokens that does not say it."""
    cache: Name | None = None
    """Folder of prepared data; none: `~/.cache/polygon`."""
    samples: Count | None = None
    """Most samples that are read, or of a generated set how many there are."""
    part: Literal["train", "test"] = "train"
    """Which part of an image set that has several."""


class ValidationPart(Strict):
    """Samples that are never trained on: the loss on all of them (for images also the accuracy), every few steps.

    They are a fraction of the data that training then does not see, or a `path` or `part` of their own.
    """

    every: Count
    """Steps between two validations; the last step is followed by one too."""
    fraction: Annotated[float, Gt(0), Lt(1)] = 0.1
    path: Name | None = None
    """As in `data`."""
    part: Literal["test"] | None = None
    """The test part of an image set."""
    samples: Count | None = None
    """At most."""


class BatchPart(Strict):
    """One optimizer step's work."""

    global_batch: Count
    """Sequences or images per step; what dp x micro_batch leaves is accumulated."""
    micro_batch: Count = 1
    seq_len: Count | None = None
    """Tokens of a sequence; of an image model given by the model."""


class ParallelPart(Strict):
    """Degrees; ranks in all: dp x tp x pp x cp."""

    dp: Count = 1
    tp: Count = 1
    pp: Count = 1
    sequence: bool = False
    """Whether the tp ranks split the tokens wherever they do not split layers (Megatron's sequence parallelism)."""
    cp: Count = 1
    """Ranks that split every sequence."""
    ep: Count = 1
    """Of the dp x cp ranks that hold the same layers, so many share out the experts; a divisor of dp x cp."""
    zero: Annotated[int, Ge(0), Le(3)] = 0
    """0 to 3: nothing, optimizer state, also gradients, also weights are split over dp x cp."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp * self.pp * self.cp


class MemoryPart(Strict):
    """What saves memory."""

    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    """fp8: of the products of blocks, with backend engine or plan."""
    gradient_precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in backward: none, those inside attention, whole blocks."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What lies in host memory: nothing, the optimizer's state and update, also the weights (DeepSpeed)."""


class ZeroPlusPart(Strict):
    """ZeRO++: less traffic for ZeRO-3 (backend deepspeed)."""

    quantized_weights: bool = False
    """Gather weights in 8 bits."""
    quantized_gradients: bool = False
    """Reduce gradients in 4 bits."""
    hierarchical: Count = 1
    """Ranks of a node that share out a second copy of the weights; backward then gathers inside the node."""


class LoraPart(Strict):
    """Train low-rank additions instead of the weights."""

    rank: Count = 8
    alpha: Positive = 16.0
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    targets: tuple[Name, ...] = Field(("query", "value"), strict=False)
    """Last parts of the names of the blocks' linear layers that get one."""
    adapter: Name | None = None
    """Folder of peft's files to start from; none: additions that change nothing yet."""

    @property
    def additions(self) -> dict[str, Any]:
        """What they are like, without where they come from."""
        return self.model_dump(exclude={"adapter"})


class OptimizerPart(Strict):
    """How weights are updated."""

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: Positive = 3e-4
    warmup_steps: Index = 0
    rate_schedule: Name = "constant"
    """Of the learning rate after the warm-up: constant, cosine, linear or wsd."""
    decay_steps: Count | None = None
    """Last steps, in which wsd falls; none: a tenth of all."""
    final_rate: NotNegative = FINAL_PART
    """Over the largest, where the rate falls."""
    weight_decay: NotNegative = 0.1
    clip_norm: NotNegative = 1.0
    """Largest norm of the whole gradient; 0: not clipped."""
    balance: NotNegative = 0.0
    """Weight of the loss that keeps experts equally busy."""


class CheckpointPart(Strict):
    """Where a run is saved and resumed from."""

    folder: Name
    every: Index = 0
    keep: Count = 3
    resume: bool = False


class MetricsPart(Strict):
    """What is written beside the log of every rank."""

    tensorboard: bool = False
    wandb: Literal["off", "offline", "online"] = "off"
    tensor_bytes: bool = False
    """Follow every tensor, for the peak of their bytes on each rank (slow; for the summary, beside the prediction)."""
    profile_steps: Index = 0
    """Steps, after one of warm-up, that torch's profiler records on every rank."""

    @property
    def trackers(self) -> tuple[str, ...]:
        """Those of `runners.engine.trackers` that are told the figures of all ranks."""
        named = {"tensorboard": self.tensorboard, "wandb": self.wandb != "off"}
        return tuple(name for name, on in named.items() if on)


class HardwarePart(Strict):
    """Equal devices in one place: what predictions are made for. A plan brings its own cluster."""

    device: Name = "cpu-core"
    """Name in the catalogue of devices."""
    devices_per_node: Count = 8


class Recipe(Strict):
    """A whole recipe."""

    name: Name
    model: ModelPart
    data: DataPart = DataPart()
    validation: ValidationPart | None = None
    batch: BatchPart
    parallel: ParallelPart = ParallelPart()
    backend: Name = "engine"
    """A name of `BACKENDS`: who trains."""
    plan: Name | None = None
    """Plan file (seen from the recipe) that says who does what instead of `parallel` (backend `plan`)."""
    hardware: HardwarePart = HardwarePart()
    memory: MemoryPart = MemoryPart()
    lora: LoraPart | None = None
    zero_plus: ZeroPlusPart = ZeroPlusPart()
    optimizer: OptimizerPart = OptimizerPart()
    steps: Count = 10
    seed: Index = 0
    checkpoint: CheckpointPart | None = None
    metrics: MetricsPart = MetricsPart()

    @property
    def rate(self) -> LearningRate:
        """The learning rate by step."""
        rate = self.optimizer
        return LearningRate(
            largest=rate.learning_rate,
            schedule=rate.rate_schedule,
            warmup_steps=rate.warmup_steps,
            steps=self.steps,
            decay_steps=rate.decay_steps,
            final_part=rate.final_rate,
            names=RATE_NAMES,
        )


def read_recipe(path: Path, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe, with some fields set otherwise (`parallel.dp=2`, values as in YAML).

    Raises
    ------
    InputError
        With the place in the file or the setting.
    """
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise InputError(f"{path}: found {type(data).__name__}, expected a recipe (keys and values)")
    data = {"name": path.stem, **data}
    for setting in settings:
        _set(data, setting)
    with located(f"{path}: "):
        recipe = check(Recipe, data)
        _check_words(recipe)
    return recipe


def _set(data: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise InputError(f"--set: found {setting!r}, expected KEY=VALUE, as parallel.dp=2")
    *parents, last = key.split(".")
    for parent in parents:
        below = data.get(parent)
        data[parent] = dict(below) if isinstance(below, dict) else {}
        data = data[parent]
    with located(f"--set {key}: "):
        data[last] = parse_yaml(text)


def _check_words(recipe: Recipe) -> None:
    assert recipe.rate  # which checks its own fields
    if recipe.backend not in BACKENDS:
        raise InputError(f"backend: found {recipe.backend!r}, expected {one_of(recipe.backend, BACKENDS)}")
    if recipe.data.kind not in DATA_KINDS:
        raise InputError(f"data.kind: found {recipe.data.kind!r}, expected {one_of(recipe.data.kind, DATA_KINDS)}")
    for name, part in (("data", recipe.data), ("validation", recipe.validation)):
        if part is not None and part.part == "test" and DATA_KINDS[recipe.data.kind] != "images":
            raise InputError(f"{name}.part: found 'test' with {recipe.data.kind!r}, expected a set of images")
    if (recipe.plan is not None) != (recipe.backend == "plan"):
        raise InputError(f"plan: found {recipe.plan!r}, expected a plan file with backend plan, and only with it")
