"""Measured layer times, memory and links: two formats, interpolated over micro-batch size and tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from polygon.cost.blocks import LayerSplit
from polygon.cost.compute import LayerTimes, layer_times
from polygon.cost.memory import LayerMemory
from polygon.domain.cluster import Device
from polygon.domain.errors import one_of, require
from polygon.domain.message import Message
from polygon.domain.model import LAYER_KINDS, Batch, Model
from polygon.formats.catalogue import own_or_known
from polygon.formats.measurement_specs import LayerProfileSpec, ModelProfilesSpec
from polygon.formats.schema import check

PROFILE_ERROR = 0.131
"""Half of a 90 % interval over a step whose layers' times are from a profile: the conformal quantile of Sailor's 29
measured runs, made as those of the catalogue's errors (`polygon.cost.uncertainty`). Leaving a micro-batch size
out, interpolation alone misses 90 % of the points by less than 7 %."""
LAYER_FORMAT = "polygon-layer-profile"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Times of some layers at one micro-batch size."""

    micro_batch_size: int
    forward_s: np.ndarray
    backward_s: np.ndarray
    update_s: np.ndarray


def between(points: Sequence[Measurement], micro_batch_size: int) -> Measurement:
    """Times at a micro-batch size: linear between measured ones, the last slope beyond, proportional if only one.

    Beyond the measured sizes no sequence takes less than at the outermost one: the slope between two that are equal
    within their noise, or that both wait for the host, would lead to nothing.
    """
    sizes = [point.micro_batch_size for point in points]
    outermost = points[0] if micro_batch_size < sizes[0] else points[-1]
    proportional = micro_batch_size / outermost.micro_batch_size
    if len(points) == 1:
        return Measurement(
            micro_batch_size=micro_batch_size,
            forward_s=outermost.forward_s * proportional,
            backward_s=outermost.backward_s * proportional,
            update_s=outermost.update_s,
        )
    # The two sizes around it; beyond what was measured the outermost two go on.
    i = int(np.clip(np.searchsorted(sizes, micro_batch_size) - 1, 0, len(points) - 2))
    low, high = points[i], points[i + 1]
    weight = (micro_batch_size - low.micro_batch_size) / (high.micro_batch_size - low.micro_batch_size)
    least = 0.0 if 0 <= weight <= 1 else proportional

    def blend(a: np.ndarray, b: np.ndarray, end: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.maximum(a + weight * (b - a), least * end)
        return found

    return Measurement(
        micro_batch_size=micro_batch_size,
        forward_s=blend(low.forward_s, high.forward_s, outermost.forward_s),
        backward_s=blend(low.backward_s, high.backward_s, outermost.backward_s),
        # An optimizer works through parameters, whatever the micro-batch.
        update_s=low.update_s,
    )


def _monotone(points: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """The same points, none slower than a larger micro-batch was: what exceeds that is noise of the measurement."""
    cleaned = [points[-1]]
    for point in reversed(points[:-1]):
        later = cleaned[-1]
        cleaned.append(
            Measurement(
                micro_batch_size=point.micro_batch_size,
                forward_s=np.minimum(point.forward_s, later.forward_s),
                backward_s=np.minimum(point.backward_s, later.backward_s),
                update_s=point.update_s,
            )
        )
    return tuple(reversed(cleaned))


def _frozen(*arrays: np.ndarray) -> None:
    for array in arrays:
        array.setflags(write=False)


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """Every layer of one model, measured on some device types (the `sailor_profiles` format)."""

    name: str
    blocks: int
    hidden_size: int | None
    points: Mapping[tuple[str, int], tuple[Measurement, ...]]
    """By canonical device name and tensor-parallel degree."""
    memory_by_tp: Mapping[int, Mapping[str, np.ndarray]]
    seq_len: int | None = None
    """Tokens of the sequences that were measured; None: not said."""
    block_outputs: int | None = None
    """Numbers that a block puts out for a sequence, tokens times width; None: not said."""
    seen: dict[tuple[str, int, int, int, bool], LayerTimes] = field(default_factory=dict, compare=False)

    def fits(self, model: Model) -> bool:
        """Whether the profile is of a model of this shape.

        Where it does not say its width, what a block puts out has to be whole tokens of the model's.
        """
        if self.blocks != model.blocks:
            return False
        if self.hidden_size is not None:
            return self.hidden_size == model.hidden_size
        return self.block_outputs is None or self.block_outputs % model.hidden_size == 0

    @property
    def devices(self) -> frozenset[str]:
        """Device types that were measured."""
        return frozenset(device for device, _ in self.points)

    def degrees(self, device: str) -> tuple[int, ...] | None:
        """Tensor-parallel degrees of which both times and memory were measured on a device type."""
        return tuple(sorted(tp for name, tp in self.points if name == device and tp in self.memory_by_tp))

    def check(self, model: Model, batch: Batch) -> None:
        """Require that a model and batch are what was measured."""
        where = f"profile of {self.name}"
        shape = Message("expected.blocks", blocks=self.blocks)
        if self.hidden_size:
            shape = Message("found.blocks", blocks=self.blocks, width=self.hidden_size)
        require(self.fits(model), where, Message("found.blocks", blocks=model.blocks, width=model.hidden_size), shape)
        require(batch.element_bytes == 4, f"{where}: precision", batch.precision, "fp32 or tf32, as it was measured")
        length = self.seq_len or batch.seq_len
        require(
            batch.seq_len == length, f"{where}: seq_len", batch.seq_len, Message("expected.as_measured", value=length)
        )

    def measurement(self, device: str, tp: int, micro_batch_size: int) -> Measurement | None:
        """Times on a device; a degree that was not measured lies on a power law between (or beyond) two that were."""
        if (device, tp) in self.points:
            return between(self.points[device, tp], micro_batch_size)
        degrees = sorted(degree for name, degree in self.points if name == device)
        if len(degrees) < 2:
            return None
        i = int(np.clip(np.searchsorted(degrees, tp) - 1, 0, len(degrees) - 2))
        low, high = (between(self.points[device, degrees[j]], micro_batch_size) for j in (i, i + 1))
        # Every doubling of the degree divides the time alike: a line in the logarithms of both.
        weight = math.log(tp / degrees[i]) / math.log(degrees[i + 1] / degrees[i])

        def law(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            found: np.ndarray = np.maximum(a, 1e-9) ** (1 - weight) * np.maximum(b, 1e-9) ** weight
            return found

        return Measurement(
            micro_batch_size=micro_batch_size,
            forward_s=law(low.forward_s, high.forward_s),
            backward_s=law(low.backward_s, high.backward_s),
            update_s=law(low.update_s, high.update_s),
        )

    def times(self, model: Model, batch: Batch, device: Device, split: LayerSplit) -> LayerTimes | None:
        """Times of every layer, or None for another model, device or way to split."""
        if not self.fits(model) or split.cp > 1 or split.experts.members > 1:
            return None
        full = split.recompute == "full"
        key = (device.name, split.tp, split.micro_batch_size, model.layers, full)
        if key not in self.seen:
            point = self.measurement(device.name, split.tp, split.micro_batch_size)
            if point is None:
                return None
            forward = _to_layers(point.forward_s, model.layers)
            backward = _to_layers(point.backward_s, model.layers)
            if full:
                # A block's forward runs once more before its backward; the ends are not recomputed.
                backward[1:-1] += forward[1:-1]
            # What was timed on the devices of a tensor-parallel group has their sums in it.
            communication = np.zeros(model.layers)
            _frozen(forward, backward, communication)
            self.seen[key] = LayerTimes(
                forward_s=forward,
                backward_s=backward,
                communication_s=communication,
                source="profile",
                relative_error=PROFILE_ERROR,
            )
        return self.seen[key]

    def update_rate_s(self, device: str) -> float | None:
        """Seconds of the optimizer for a parameter on one device, all layers together at the least degree."""
        degrees = self.degrees(device)
        if not degrees:
            return None
        parameters = self.memory_by_tp[degrees[0]]["parameters"]
        return float(self.points[device, degrees[0]][0].update_s.sum() / parameters.sum())

    def memory(
        self, model: Model, batch: Batch, tp: int, micro_batch_size: int, recompute: str = "none"
    ) -> LayerMemory | None:
        """What each layer puts on one device; None for a degree that was not measured.

        With full recomputation a block keeps its input alone; selective recomputation was not measured and saves
        nothing here.
        """
        measured = self.memory_by_tp.get(tp)
        if measured is None:
            return None
        parameters = _to_layers(measured["parameters"], model.layers)
        activations = _to_layers(measured["activations"], model.layers) * micro_batch_size
        logits = micro_batch_size * batch.seq_len * model.vocab_size / tp * batch.element_bytes
        scores = micro_batch_size * batch.seq_len**2 * model.heads / tp * batch.element_bytes
        # The backward holds the gradients on both sides of a softmax at once.
        transient = np.full(model.layers, 2.0 * scores)
        transient[0], transient[-1] = 0.0, 2.0 * logits
        if recompute == "full":
            blocks = slice(1, -1)
            transient[blocks] += activations[blocks]
            activations[blocks] = micro_batch_size * batch.seq_len * model.hidden_size * batch.element_bytes
        _frozen(parameters, activations, transient)
        return LayerMemory(
            parameters=parameters, activation_bytes=activations, transient_bytes=transient, tied_parameters=0.0
        )


def _to_layers(values: np.ndarray, layers: int) -> np.ndarray:
    """Profiled layers as a plan counts them: a final norm of its own joins the head."""
    if len(values) == layers + 1:
        return np.concatenate([values[: layers - 1], [values[-2:].sum()]])
    require(len(values) == layers, "profile layers", len(values), f"{layers}")
    return values.copy()


def _once(sizes: Mapping[int, Measurement], where: str, size: int) -> None:
    """Require that a size was not measured before, since which of both counts nobody says."""
    require(size not in sizes, f"{where} {size}", Message("found.entries", entries=2), "one")


def model_profiles(data: Mapping[str, Any]) -> dict[str, ModelProfile]:
    """Read the `sailor_profiles` format: one profile for each model of the file."""
    check(ModelProfilesSpec, data)
    points: dict[str, dict[tuple[str, int], dict[int, Measurement]]] = {name: {} for name in data["models"]}
    for i, entry in enumerate(data["compute"]):
        name = entry["model"]
        require(name in points, "profiles: compute.model", name, " or ".join(points))
        layers = int(data["models"][name]["info"]["profiled_layers"])
        for field_name in ("forward_s_per_layer", "backward_s_per_layer", "optimizer_update_s_per_layer"):
            found = Message("found.entries", entries=len(entry[field_name]))
            require(len(entry[field_name]) == layers, f"compute[{i}].{field_name}", found, f"{layers}")
        # A layer may be too short for a clock, not all of them.
        require(
            sum(entry["forward_s_per_layer"]) > 0, f"compute[{i}].forward_s_per_layer", 0, "a number > 0 among them"
        )
        key = (own_or_known(entry["gpu_type"]), int(entry["tensor_parallel"]))
        size = int(entry["micro_batch_size_sequences"])
        sizes = points[name].setdefault(key, {})
        _once(sizes, f"compute[{i}]: {name}, {key[0]}, tp {key[1]}, micro_batch_size_sequences", size)
        sizes[size] = Measurement(
            micro_batch_size=size,
            forward_s=np.asarray(entry["forward_s_per_layer"], dtype=float),
            backward_s=np.asarray(entry["backward_s_per_layer"], dtype=float),
            update_s=np.asarray(entry["optimizer_update_s_per_layer"], dtype=float),
        )
    profiles = {}
    for name, described in data["models"].items():
        info = described["info"]
        profiles[name] = ModelProfile(
            name=name,
            # Embedding and head are layers of the file, too, and so is Llama's final norm.
            blocks=int(info["profiled_layers"]) - (3 if name.upper().startswith("LLAMA") else 2),
            hidden_size=info.get("hidden_size"),
            seq_len=_seq_len(described),
            block_outputs=_block_outputs(described),
            points={key: _monotone([by[size] for size in sorted(by)]) for key, by in points[name].items()},
            memory_by_tp={
                int(tp): {
                    "parameters": np.asarray(by["parameters_count_per_gpu_per_layer"], dtype=float),
                    "activations": np.asarray(
                        by["activation_memory_bytes_per_gpu_per_layer_per_sequence"], dtype=float
                    ),
                }
                for tp, by in described["by_tensor_parallel"].items()
            },
        )
    return profiles


def _seq_len(described: Mapping[str, Any]) -> int | None:
    """Tokens of a measured sequence, as the file says or as a block's output shows."""
    info, outputs = described["info"], _block_outputs(described)
    if info.get("sequence_length_tokens"):
        return int(info["sequence_length_tokens"])
    return outputs // int(info["hidden_size"]) if info.get("hidden_size") and outputs else None


def _block_outputs(described: Mapping[str, Any]) -> int | None:
    """Numbers of four bytes that the first block puts out for a sequence, where the file says it."""
    per_layer = [
        by.get("output_activation_bytes_per_layer_per_sequence") for by in described["by_tensor_parallel"].values()
    ]
    return int(per_layer[0][1]) // 4 if per_layer and per_layer[0] else None


@dataclass(frozen=True, kw_only=True)
class KindProfile:
    """Layer kinds measured on one device type (our own format); kinds not measured keep the model's times."""

    device: str
    seq_len: int
    precision: str
    points: Mapping[tuple[str, int], tuple[Measurement, ...]]
    """By layer kind (embedding, block, moe, head) and tensor-parallel degree."""
    hidden_size: int | None = None
    """Of the model that was measured; None: not said, any model is taken for it."""
    update_s_per_parameter: float | None = None
    """Of the optimizer, all measured layers together."""

    def fits(self, model: Model, batch: Batch) -> bool:
        """Whether layers were measured as this model and batch have them."""
        measured = (self.seq_len, self.precision, self.hidden_size or model.hidden_size)
        return measured == (batch.seq_len, batch.precision, model.hidden_size)

    def check(self, model: Model, batch: Batch) -> None:
        """Require that a model and batch are what was measured; for others the profile changes nothing."""
        where = f"profile of {self.device}"
        for name, found, measured in (
            ("hidden_size", model.hidden_size, self.hidden_size or model.hidden_size),
            ("seq_len", batch.seq_len, self.seq_len),
            ("precision", batch.precision, self.precision),
        ):
            require(found == measured, f"{where}: {name}", found, Message("expected.as_measured", value=measured))

    @property
    def devices(self) -> frozenset[str]:
        """The device type that was measured."""
        return frozenset({self.device})

    def degrees(self, device: str) -> tuple[int, ...] | None:
        """None: degrees that were not measured keep the model's times."""
        return None

    def update_rate_s(self, device: str) -> float | None:
        """Seconds of the optimizer for a parameter; None if it was not measured."""
        return self.update_s_per_parameter

    def memory(
        self, model: Model, batch: Batch, tp: int, micro_batch_size: int, recompute: str = "none"
    ) -> LayerMemory | None:
        """None: memory is not in this format."""
        return None

    def times(self, model: Model, batch: Batch, device: Device, split: LayerSplit) -> LayerTimes | None:
        """Times of every layer, or None for another device, precision, sequence length or split."""
        same = device.name == self.device and self.fits(model, batch)
        kinds = set(model.layer_kinds())
        measured = {kind: points for (kind, tp), points in self.points.items() if tp == split.tp and kind in kinds}
        if not same or not measured or split.cp > 1 or split.experts.members > 1:
            return None
        spec = layer_times(
            model,
            batch,
            device,
            split.group.intra_node,
            tp=split.tp,
            tp_group=split.group,
            micro_batch_size=split.micro_batch_size,
            recompute=split.recompute,
            sequence_parallel=split.sequence_parallel,
            runtime=split.runtime,
            communication=split.communication,
        )
        forward, backward = spec.forward_s.copy(), spec.backward_s.copy()
        for layer in range(model.layers):
            kind = model.layer_kind(layer)
            if kind in measured:
                point = between(measured[kind], split.micro_batch_size)
                forward[layer], backward[layer] = point.forward_s[0], point.backward_s[0]
                # Blocks alone are recomputed, not the ends.
                if split.recompute == "full" and kind not in ("embedding", "head"):
                    backward[layer] += forward[layer]
        _frozen(forward, backward)
        times = replace(spec, forward_s=forward, backward_s=backward)
        if set(measured) != kinds:
            error = max(PROFILE_ERROR, spec.relative_error)
            return replace(times, source=f"profile+{spec.source}", relative_error=error)
        return replace(times, source="profile", relative_error=PROFILE_ERROR, host_error=0.0)


def kind_profile(data: Mapping[str, Any]) -> KindProfile:
    """Read our own profile format (docs/prediction.md)."""
    spec = check(LayerProfileSpec, data)
    points: dict[tuple[str, int], dict[int, Measurement]] = {}
    for i, entry in enumerate(spec.layers):
        of = entry.kind.partition(",")[0]
        require(of in LAYER_KINDS, f"layers[{i}].kind", entry.kind, one_of(of, LAYER_KINDS))
        sizes = points.setdefault((entry.kind, entry.tp), {})
        _once(sizes, f"layers[{i}]: {entry.kind}, tp {entry.tp}, micro_batch_size", entry.micro_batch_size)
        sizes[entry.micro_batch_size] = Measurement(
            micro_batch_size=entry.micro_batch_size,
            forward_s=np.array([entry.forward_s]),
            backward_s=np.array([entry.backward_s]),
            update_s=np.array([entry.update_s or 0.0]),
        )
    counted = [(entry.update_s, entry.parameters) for entry in spec.layers if entry.update_s and entry.parameters]
    update_s, parameters = sum(pair[0] for pair in counted), sum(pair[1] for pair in counted)
    return KindProfile(
        device=own_or_known(spec.device),
        hidden_size=spec.hidden_size,
        update_s_per_parameter=update_s / parameters if counted else None,
        seq_len=spec.seq_len,
        precision=spec.precision,
        points={key: _monotone([by[size] for size in sorted(by)]) for key, by in points.items()},
    )
