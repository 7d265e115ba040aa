"""The formula of an earlier 3D searcher, its constants as parameters, for comparison.

It reads two JSON files (units as it has them: GFLOP/s, GB/s, MB):

- cluster: n_node, n_gpu_per_node, gpu_gflops, bw_gpu_to_gpu, bw_inter_node (gpu_memory, bw_cpu_to_gpu, bw_cpu_to_cpu
  are allowed and not used);
- model: num_layers, layer_tflops (forward, per layer), layer_activation_MB (per layer), dp_sum_gradient_MB,
  tp_comm_sum_MB (global_batch_size, tp_comm are allowed and not used).

In milliseconds, with D = dp, T = tp, P = pp:

    eff     = base / (1 + a (D - 1)) / (1 + b (T - 1)) / (1 + c |D - T|)
    compute = 3 sum(layer_tflops) / (gflops / 1000 D T) / eff / (overlap if P > 1) 1000
    DP      = 2 (D - 1) / D gradient / (1024 (intra if D <= GPUs per node else inter)) 1000
    TP      = 2 (T - 1) / T (tp_comm / T) / (1024 intra) 1000
    PP      = 2 (P - 1) max(activation) / (1024 intra) 1000

What it gets wrong, and polygon's own model does not: memory is not looked at; the pipeline has no bubble and its stages
do not share the work (compute does not fall with P); tensor parallelism never leaves the node; MB over GB counts 1024.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polygon.cost.compute import model_flops_per_step
from polygon.domain.cluster import Pool
from polygon.domain.errors import InputError, require, require_number
from polygon.domain.model import Batch, Model
from polygon.grid3d.grid_rows import GridRow, row, short
from polygon.grid3d.splits import GridSplit

CLUSTER_KEYS = {
    "n_node": ("n_node", "n_nodes"),
    "n_gpu_per_node": ("n_gpu_per_node",),
    "gpu_gflops": ("gpu_gflops", "gpu_flops"),
    "bw_gpu_to_gpu": ("bw_gpu_to_gpu",),
    "bw_inter_node": ("bw_inter_node",),
}
"""Keys that must be there, by the names that are understood."""
MODEL_KEYS = ("num_layers", "layer_tflops", "layer_activation_MB", "dp_sum_gradient_MB", "tp_comm_sum_MB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The searcher's constants."""

    base_efficiency: float = 0.35
    dp_penalty: float = 0.20
    """Loss of efficiency per further data-parallel degree."""
    tp_penalty: float = 0.25
    imbalance_penalty: float = 0.10
    """Loss per unit of difference between the two degrees."""
    pp_overlap: float = 0.60
    mb_per_gb: float = 1024.0

    def __post_init__(self) -> None:
        for name in ("base_efficiency", "pp_overlap", "mb_per_gb"):
            require_number(getattr(self, name), name, above=0)
        for name in ("dp_penalty", "tp_penalty", "imbalance_penalty"):
            require_number(getattr(self, name), name, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearcherCase:
    """Cluster and model in the searcher's units."""

    nodes: int
    gpus_per_node: int
    gpu_gflops: float
    intra_gb_per_s: float
    inter_gb_per_s: float
    layers: int
    layer_tflops: tuple[float, ...]
    layer_activation_mb: tuple[float, ...]
    gradient_mb: float
    tensor_mb: float
    constants: Constants

    @property
    def devices(self) -> int:
        """GPUs of the cluster."""
        return self.nodes * self.gpus_per_node

    def terms_ms(self, split: GridSplit) -> dict[str, float]:
        """Milliseconds per iteration by the formula above; they add up to the iteration."""
        dp, tp, pp, _ = split
        c = self.constants
        efficiency = c.base_efficiency / (1 + c.dp_penalty * (dp - 1)) / (1 + c.tp_penalty * (tp - 1))
        efficiency /= 1 + c.imbalance_penalty * abs(dp - tp)
        compute_s = 3 * sum(self.layer_tflops) / (self.gpu_gflops / 1000 * dp * tp) / efficiency
        if pp > 1:
            compute_s /= c.pp_overlap
        fast, slow = (rate * c.mb_per_gb for rate in (self.intra_gb_per_s, self.inter_gb_per_s))
        across = fast if dp <= self.gpus_per_node else slow
        return {
            "compute": compute_s * 1000,
            "data-parallel": self.gradient_mb * 2 * (dp - 1) / dp / across * 1000,
            "tensor-parallel": self.tensor_mb / tp * 2 * (tp - 1) / tp / fast * 1000,
            "pipeline-parallel": (pp - 1) * 2 * max(self.layer_activation_mb) / fast * 1000,
        }

    def rows(self, split: GridSplit) -> list[GridRow]:
        """The one configuration of a split; a pipeline longer than the model is rejected."""
        values: dict[str, Any] = {"dp": split.dp, "tp": split.tp, "pp": split.pp}
        if split.pp > self.layers:
            return [row({**values, "rejected": f"pp {split.pp} is more than the {self.layers} layers"}, math.inf)]
        terms = self.terms_ms(split)
        step_s = sum(terms.values()) / 1000
        terms_s = {name: short(value / 1000) for name, value in terms.items()}
        return [row({**values, "step_s": short(step_s), "terms_s": terms_s, "rejected": None}, step_s)]


def is_metadata(data: Any) -> bool:
    """Whether a file is the searcher's cluster or model metadata."""
    return isinstance(data, Mapping) and ("n_gpu_per_node" in data or "layer_tflops" in data)


def _numbers(data: Mapping[str, Any], key: str) -> tuple[float, ...]:
    value = data[key]
    require(isinstance(value, list) and len(value) > 0, key, value, "a list of numbers, one a layer")
    for number in value:
        require_number(number, key, at_least=0)
    return tuple(map(float, value))


def read_metadata(cluster: Mapping[str, Any], model: Mapping[str, Any], constants: Constants) -> SearcherCase:
    """The searcher's two files as they are."""
    for which, data in (("cluster", cluster), ("model", model)):
        require(isinstance(data, Mapping), f"{which} metadata", type(data).__name__, "a mapping of names to values")
    found = {}
    for key, names in CLUSTER_KEYS.items():
        name = next((name for name in names if name in cluster), None)
        if name is None:
            raise InputError(f"cluster metadata: found {sorted(cluster)}, expected the key {' or '.join(names)}")
        require_number(cluster[name], name, above=0)
        found[key] = cluster[name]
    for key in MODEL_KEYS:
        if key not in model:
            raise InputError(f"model metadata: found {sorted(model)}, expected the key {key}")
    for key in ("num_layers", "n_node", "n_gpu_per_node"):
        value = model[key] if key in model else found[key]
        whole = isinstance(value, int) and not isinstance(value, bool)
        require(whole and value >= 1, key, value, "a whole number >= 1")
    for key in ("dp_sum_gradient_MB", "tp_comm_sum_MB"):
        require_number(model[key], key, at_least=0)
    return SearcherCase(
        nodes=found["n_node"],
        gpus_per_node=found["n_gpu_per_node"],
        gpu_gflops=found["gpu_gflops"],
        intra_gb_per_s=found["bw_gpu_to_gpu"],
        inter_gb_per_s=found["bw_inter_node"],
        layers=model["num_layers"],
        layer_tflops=_numbers(model, "layer_tflops"),
        layer_activation_mb=_numbers(model, "layer_activation_MB"),
        gradient_mb=model["dp_sum_gradient_MB"],
        tensor_mb=model["tp_comm_sum_MB"],
        constants=constants,
    )


def metadata_of(model: Model, batch: Batch, pool: Pool, constants: Constants) -> SearcherCase:
    """What the searcher would have been told of polygon's cluster and model (forward FLOP evenly over the blocks)."""
    mib = 2.0**20
    boundary = batch.tokens * model.hidden_size * batch.element_bytes / mib
    forward_tflop = model_flops_per_step(model, batch) / 3 / 1e12
    return SearcherCase(
        nodes=pool.nodes,
        gpus_per_node=pool.devices_per_node,
        gpu_gflops=pool.device.peak_flops(batch.precision) / 1e9,
        intra_gb_per_s=pool.intra_node.bytes_per_s / 1e9,
        inter_gb_per_s=pool.inter_node.bytes_per_s / 1e9,
        layers=model.blocks,
        layer_tflops=(forward_tflop / model.blocks,) * model.blocks,
        layer_activation_mb=(boundary,) * model.blocks,
        gradient_mb=model.parameters * batch.gradient_bytes / mib,
        tensor_mb=4 * model.blocks * boundary,
        constants=constants,
    )
